//! Tenants with `[api] separate_tenants`: no file of an image, a template or a fork is shared with another tenant's machines.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};
use thaw_daemon::api::client::Client;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd, callers, without_limits};

const TENANTS: [&str; 2] = ["acme", "other.example"];

/// `None` if the test cannot run here; the reason has been reported.
fn place() -> Option<Place> {
    if !without_limits().is_empty() {
        thaw_test_skip::skip("this host cannot limit sandboxes");
        return None;
    }
    let thawd = Path::new(env!("CARGO_BIN_EXE_thawd"));
    Place::new(thawd.parent().unwrap(), &lasting())
}

/// Sets whether tenants are separate, from the next start on.
fn configure(place: &Place, separate: bool) {
    let api = callers::serve(place, &TENANTS);
    let none = "{ low = 0, high = 0 }";
    place.configure(&format!(
        "[api]\nseparate_tenants = {separate}\n{api}[pools]\ndisks = {none}\nnetworks = {none}\ncgroups = {none}\n\
         [pools.shells]\nshapes = 0\n[pools.parked]\ntemplates = 0\n"
    ));
}

/// The answer to a tenant's request.
fn ask(place: &Place, tenant: &str, request: &str, body: &Value) -> Value {
    let asked = callers::ask(place, tenant, request, body);
    let (status, body) = asked.unwrap_or_else(|| panic!("no answer: {}", log(place)));
    assert!(status.contains("201"), "{status} {body}; {}", log(place));
    serde_json::from_str(&body).unwrap()
}

/// Creates a sandbox of a tenant. Returns its id and its VMM.
fn create(place: &Place, tenant: &str) -> (String, i64) {
    let made = ask(place, tenant, "POST /v1/sandboxes", &place.request());
    let sandbox = &made["sandbox"];
    let id = sandbox["id"].as_str().unwrap().to_owned();
    (id, sandbox["vmm_pid"].as_i64().unwrap())
}

/// The image files that a VMM has open, by device and inode.
fn image_files(place: &Place, vmm: i64) -> BTreeSet<(u64, u64)> {
    let descriptors = fs::read_dir(format!("/proc/{vmm}/fd")).unwrap();
    let files = descriptors.filter_map(|entry| {
        let path = entry.unwrap().path();
        let (place_of, metadata) = (fs::read_link(&path).ok()?, fs::metadata(&path).ok()?);
        let is_image = place_of.starts_with(place.path("data")) && place_of.to_str()?.contains("/images/");
        is_image.then(|| (metadata.dev(), metadata.ino()))
    });
    files.collect()
}

/// The shareable memory that a VMM has mapped, by device and inode: templates in thawd's memory.
fn mapped_memory(vmm: i64) -> BTreeSet<(String, u64)> {
    let maps = fs::read_to_string(format!("/proc/{vmm}/maps")).unwrap();
    let mapped = maps.lines().filter(|line| line.contains("/memfd:")).map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words[3].to_owned(), words[4].parse().unwrap())
    });
    mapped.collect()
}

fn stock_of(place: &Place, id: &str) -> Value {
    let record = fs::read(place.path("run/sandboxes").join(id).join("record.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    record["stock"].clone()
}

fn entries(directory: &Path) -> usize {
    fs::read_dir(directory).map_or(0, |entries| entries.count())
}

async fn delete(place: &Place, ids: &[&str]) {
    let client = Client::connect(&place.socket()).unwrap();
    for id in ids {
        client.delete(id).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn separate_tenants_share_no_file_of_an_image_and_no_template() {
    let Some(place) = place() else { return };
    let [one, other] = TENANTS;
    // Without the setting, sharing must show, or this test detects nothing.
    for separate in [false, true] {
        configure(&place, separate);
        let thawd = Thawd::start(&place);
        let made = [create(&place, one), create(&place, one), create(&place, other)];
        let [mine, mine_too, theirs] = [&made[0], &made[1], &made[2]].map(|(_, vmm)| {
            let files = image_files(&place, *vmm);
            assert!(!files.is_empty());
            (files, mapped_memory(*vmm))
        });
        assert_eq!(mine.0, mine_too.0);
        assert!(!mine.1.is_disjoint(&mine_too.1), "{mine:?} {mine_too:?}");
        assert_eq!(mine.0.is_disjoint(&theirs.0), separate, "{mine:?} {theirs:?}");
        assert_eq!(mine.1.is_disjoint(&theirs.1), separate, "{mine:?} {theirs:?}");
        for tenant in TENANTS {
            let own = place.path("data/tenants").join(tenant);
            let has = [own.join("images").exists(), own.join("templates").exists()];
            assert_eq!(has, [separate; 2], "{tenant}");
        }
        assert_eq!(
            stock_of(&place, &made[0].0),
            if separate { json!(one) } else { Value::Null }
        );
        delete(&place, &made.each_ref().map(|(id, _)| id.as_str())).await;
        assert!(thawd.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_lies_in_its_tenants_directory() {
    let Some(place) = place() else { return };
    configure(&place, true);
    let held = place.path("held");
    let mut command = place.thawd();
    command.args(["--failpoint", &format!("fork.frozen={}", held.display())]);
    let mut thawd = Thawd::begin(&place, command);
    assert!(thawd.serves(&place), "{}", log(&place));
    let [one, _] = TENANTS;
    let (original, _) = create(&place, one);
    let request = format!("POST /v1/sandboxes/{original}/fork");
    let clone = std::thread::scope(|scope| {
        let forking = scope.spawn(|| ask(&place, one, &request, &json!({"count": 1})));
        eventually("it is frozen", || held.exists());
        let forks = place.path("data/tenants").join(one).join("forks");
        assert_eq!((entries(&forks), entries(&place.path("data/forks"))), (1, 0));
        fs::remove_file(&held).unwrap();
        let forked = forking.join().unwrap();
        forked["items"][0]["sandbox"]["id"].as_str().unwrap().to_owned()
    });
    assert_eq!(stock_of(&place, &clone), json!(one));
    delete(&place, &[&original, &clone]).await;
    assert!(thawd.stop().success());
}

/// A thawd with the other setting adopts a sandbox: it is served and cloned with the files it was made from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adopted_sandbox_keeps_its_stock_when_the_setting_changes() {
    let Some(place) = place() else { return };
    let [one, other] = TENANTS;
    for (before, tenant) in [(true, one), (false, other)] {
        configure(&place, before);
        let thawd = Thawd::start(&place);
        let (original, vmm) = create(&place, tenant);
        let (files, stock) = (image_files(&place, vmm), stock_of(&place, &original));
        thawd.kill();
        configure(&place, !before);
        let thawd = Thawd::start(&place);
        assert_eq!(stock_of(&place, &original), stock);
        let request = format!("POST /v1/sandboxes/{original}/fork");
        let forked = ask(&place, tenant, &request, &json!({"count": 1}));
        let clone = &forked["items"][0]["sandbox"];
        let id = clone["id"].as_str().unwrap();
        assert_eq!(image_files(&place, clone["vmm_pid"].as_i64().unwrap()), files);
        assert_eq!(stock_of(&place, id), stock);
        // New sandboxes follow the current setting.
        let (new, vmm) = create(&place, tenant);
        assert!(image_files(&place, vmm).is_disjoint(&files));
        delete(&place, &[&original, id, &new]).await;
        assert!(thawd.stop().success());
    }
}
