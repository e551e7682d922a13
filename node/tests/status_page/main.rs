//! The status page in a real browser, served by a thawd with sandboxes of a tiny guest, in the window of a desktop and of a phone.

#![allow(clippy::unwrap_used)]

mod browser;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd, callers, make_image, without_limits};

use browser::{Browser, Page};

const TENANT: &str = "acme";
const DESKTOP: (u32, u32) = (1280, 800);
const PHONE: (u32, u32) = (390, 844);
/// As markup it would change the page's title.
const HOSTILE: &str = "<img src=x onerror=document.title='hit'>";

/// `None` if the test cannot run here; the reason has been reported.
fn place() -> Option<Place> {
    if !browser::is_installed() {
        thaw_test_skip::skip("chromium is not installed");
        return None;
    }
    if !without_limits().is_empty() {
        thaw_test_skip::skip("this host cannot limit sandboxes");
        return None;
    }
    let thawd = Path::new(env!("CARGO_BIN_EXE_thawd"));
    let place = Place::new(thawd.parent().unwrap(), &lasting())?;
    let api = callers::serve(&place, &[TENANT]);
    let some = "{ low = 1, high = 2 }";
    place.configure(&format!(
        "[api]\n{api}[pools]\ndisks = {some}\nnetworks = {some}\ncgroups = {some}\n[pools.shells]\nshapes = 1\neach = {some}\n\
         [pools.parked]\ntemplates = 1\neach = {some}\n"
    ));
    Some(place)
}

fn create(place: &Place, name: &str, image: &str) {
    let mut request = place.request();
    request["name"] = name.into();
    request["image"] = image.into();
    let (status, body) = callers::ask(place, TENANT, "POST /v1/sandboxes", &request).unwrap();
    assert!(status.contains("201"), "{status} {body}; {}", log(place));
}

/// Opens the page and connects with the tenant's token, after a wrong one was refused.
fn connect<'a>(browser: &'a mut Browser, place: &Place, window: (u32, u32)) -> Page<'a> {
    let address = format!("http://{}/", callers::address(place).unwrap());
    let mut page = browser.open(&address, window);
    eventually("it asks for a token", || {
        page.value("document.querySelector('#login')?.hidden") == json!(false)
    });
    let submit = |token: &str| {
        format!(
            "document.querySelector('#token').value = '{token}'; document.querySelector('form').requestSubmit()"
        )
    };
    page.value(&submit("wrong"));
    eventually("a wrong token is refused", || {
        let refused = page.value("document.querySelector('#refused').textContent");
        refused.as_str().is_some_and(|text| text.contains("refused"))
    });
    page.value(&submit(&callers::token(TENANT)));
    page
}

fn rows(page: &mut Page) -> Value {
    page.value("document.querySelectorAll('#sandboxes tbody tr').length")
}

/// Checks that the page shows the data as text and fits its window.
fn check(page: &mut Page) {
    eventually("three sandboxes are listed", || rows(page) == json!(3));
    eventually("pools, stages and images are shown", || {
        let shown =
            "['#pools > div', '#stages > div', '#images tbody tr'].every(s => document.querySelector(s))";
        page.value(shown) == json!(true)
    });
    let text = page.value("document.body.innerText");
    let text = text.as_str().unwrap();
    assert!(text.contains(HOSTILE), "{text}");
    assert_eq!(page.value("document.querySelectorAll('img').length"), json!(0));
    assert_eq!(page.value("document.title"), json!("Thaw"));
    let too_wide = page.value("document.documentElement.scrollWidth - window.innerWidth");
    assert_eq!(too_wide, json!(0), "nothing scrolls sideways");
    // The policy is in force: the page cannot run what a value could bring, nor call another address.
    let blocked = page.value("try { eval('1'); 'ran' } catch (e) { e.name }");
    assert_eq!(blocked, json!("EvalError"));
}

/// With `THAW_WRITE_DOCS`, writes the screenshot that the documents show.
fn keep(page: &mut Page, name: &str) {
    let picture = page.screenshot();
    assert!(picture.starts_with(b"\x89PNG"), "{name}");
    if std::env::var_os("THAW_WRITE_DOCS").is_some() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        fs::write(docs.join(name), picture).unwrap();
    }
}

#[test]
fn status_page_shows_the_node_on_desktop_and_phone() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    create(&place, "web", &place.image());
    create(&place, "worker", &place.image());
    create(
        &place,
        "build",
        &make_image(&place.path(HOSTILE), "hello", b"hello\n"),
    );
    let mut browser = Browser::start(&place.path("browser"));
    for (window, picture) in [(DESKTOP, "status-desktop.png"), (PHONE, "status-phone.png")] {
        let mut page = connect(&mut browser, &place, window);
        check(&mut page);
        keep(&mut page, picture);
    }
    let mut page = connect(&mut browser, &place, DESKTOP);
    eventually("three sandboxes are listed", || rows(&mut page) == json!(3));
    let (status, _) = callers::ask(&place, TENANT, "DELETE /v1/sandboxes/worker", &json!({})).unwrap();
    assert!(status.contains("20"), "{status}");
    eventually("the page follows", || rows(&mut page) == json!(2));
    thawd.kill();
    eventually("it says that thawd is gone", || {
        page.value("document.querySelector('#state').innerText") == json!("thawd does not answer")
    });
    drop(browser);
    // The next thawd removes what the killed one left.
    let thawd = Thawd::start(&place);
    for name in ["web", "build"] {
        callers::ask(
            &place,
            TENANT,
            &format!("DELETE /v1/sandboxes/{name}"),
            &json!({}),
        )
        .unwrap();
    }
    assert!(thawd.stop().success());
}
