//! Callers that hang up: what was begun for one that does is undone, wherever it was, and who asks again with the same key
//! has one sandbox, and always the same answer. Who waits for what a guest cannot do any more is told.

#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use thaw_daemon::api::client::Client;
use thaw_failpoint::Failpoint;
use thaw_tiny_guest::bare::{bare, brief, lasting};
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd, asked};

/// Each counts the host's interfaces.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Kinds of places that a first creation comes to.
const COME_TO: [&str; 5] = ["create.", "directory.", "record.", "claim.", "vmm."];

/// Asks for a sandbox with a key, and does not wait.
fn ask(place: &Place, key: &str) -> UnixStream {
    asked::ask(place, "POST /v1/sandboxes", Some(key), &place.request()).unwrap()
}

/// Its status and its body.
fn answer(stream: UnixStream) -> (String, String) {
    asked::answer(stream).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_hangs_up_anywhere_leaves_nothing_and_may_ask_again() {
    let _one = ONE_AT_A_TIME.lock().await;
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &bare(0)) else {
        return;
    };
    place.fill_pools_to(0..=0, 0..=0);
    let mut thawds = Vec::new();
    let first = Thawd::start(&place);
    thawds.push(first.record());
    let client = Client::connect(&place.socket()).unwrap();
    let (status, body) = answer(ask(&place, "first"));
    assert!(status.contains("201"), "{status} {body}");
    assert_eq!(answer(ask(&place, "first")).1, body);
    for sandbox in client.list().await.unwrap() {
        client.delete(&sandbox.id).await.unwrap();
    }
    assert!(first.stop().success());
    let empty = Counts::of(&place, &thawds);

    let mut come_to = 0;
    let of_a_creation = |p: &&Failpoint| COME_TO.iter().any(|kind| p.name().starts_with(kind));
    for point in Failpoint::ALL.iter().filter(of_a_creation) {
        let held = place.path("held");
        let mut command = place.thawd();
        command.args(["--failpoint", &format!("{point}={}", held.display())]);
        let mut thawd = Thawd::begin(&place, command);
        thawds.push(thawd.record());
        assert!(thawd.serves(&place), "{point}: {}", log(&place));
        let client = Client::connect(&place.socket()).unwrap();
        let asking = ask(&place, "again");
        let watched = asking.try_clone().unwrap();
        watched.set_nonblocking(true).unwrap();
        let mut answered = false;
        eventually("it comes there, or the creation ends", || {
            answered = (&watched).read(&mut [0; 1]).is_ok();
            answered || held.exists()
        });
        if answered {
            // A pool's, and there are none.
            assert!(point.name().starts_with("claim."), "{point} is never come to");
        } else {
            come_to += 1;
            watched.shutdown(Shutdown::Both).unwrap();
            drop((asking, watched));
            std::fs::remove_file(&held).unwrap();
        }
        let (status, body) = answer(ask(&place, "again"));
        assert!(
            status.contains("201"),
            "{point}: {status} {body}; {}",
            log(&place)
        );
        assert_eq!(answer(ask(&place, "again")).1, body, "{point}");
        let living = || async { client.list().await.unwrap() };
        let one = living().await;
        assert_eq!(one.len(), 1, "{point}: {one:?}; {}", log(&place));
        assert!(body.contains(&one[0].id), "{point}");
        eventually(&format!("{point}: its machine is the only one"), || {
            Counts::of(&place, &thawds).vmms() == 1
        });
        client.delete(&one[0].id).await.unwrap();
        assert!(thawd.stop().success(), "{point}: {}", log(&place));
        let mut now = Counts::default();
        eventually(&format!("{point}: nothing is left"), || {
            now = Counts::of(&place, &thawds);
            now == empty
        });
    }
    assert!(come_to > 15, "{come_to}");
}

/// Where a thawd is killed of whom a sandbox was asked with a key, and whether its caller is then answered by that sandbox.
const KILLED_AT: [(&str, bool); 6] = [
    ("create.acknowledged", false),
    ("create.ready", true),
    ("create.shown", true),
    ("answer.begun", true),
    ("answer.noted", true),
    ("adopt.shown", true),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_answered_alike_by_the_thawd_after_the_one_that_died() {
    let _one = ONE_AT_A_TIME.lock().await;
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &lasting()) else {
        return;
    };
    place.fill_pools_to(0..=0, 0..=0);
    let doomed = |point: &str| {
        let mut command = place.thawd();
        command.args(["--failpoint", point]);
        Thawd::begin(&place, command)
    };
    for (point, is_made) in KILLED_AT {
        let mut thawd = doomed(point);
        if thawd.serves(&place) {
            let asked = asked::ask(&place, "POST /v1/sandboxes", Some(point), &place.request());
            let answered = asked.and_then(asked::answer);
            // One that adopts nothing comes through.
            assert_eq!(
                answered.is_some(),
                point == "adopt.shown",
                "{point}: {answered:?}"
            );
            if point == "adopt.shown" {
                thawd.kill();
                // Killed while it takes over, it has said nothing yet; the next says it.
                let mut dying = doomed(point);
                eventually("it takes over, and dies", || dying.has_ended());
            } else {
                eventually(&format!("{point}: it dies"), || thawd.has_ended());
            }
        }
        let next = Thawd::start(&place);
        let client = Client::connect(&place.socket()).unwrap();
        let left = client.list().await.unwrap();
        assert_eq!(left.len(), usize::from(is_made), "{point}: {left:?}");
        let (status, body) = answer(ask(&place, point));
        assert!(status.contains("201"), "{point}: {status} {body}");
        let one = client.list().await.unwrap();
        assert_eq!(one.len(), 1, "{point}: {one:?}");
        assert!(body.contains(&one[0].id), "{point}: {body}");
        assert!(left.iter().all(|left| left.id == one[0].id), "{point}");
        // Whoever answered it, and however it ended.
        next.kill();
        let next = Thawd::start(&place);
        assert_eq!(answer(ask(&place, point)).1, body, "{point}");
        let mut other = place.request();
        other["cpus"] = 2.into();
        let reused = asked::ask(&place, "POST /v1/sandboxes", Some(point), &other);
        let reused = asked::answer(reused.unwrap()).unwrap();
        assert!(reused.1.contains("key-reused"), "{point}: {reused:?}");

        // A fork of which part is there is none; one that is whole is the answer.
        let fork = format!("POST /v1/sandboxes/{}/fork", one[0].id);
        let two = serde_json::json!({"count": 2});
        let first = asked::answer(asked::ask(&place, &fork, Some("fork"), &two).unwrap()).unwrap();
        assert!(first.0.contains("201"), "{first:?}");
        next.kill();
        let next = Thawd::start(&place);
        let again = asked::answer(asked::ask(&place, &fork, Some("fork"), &two).unwrap()).unwrap();
        assert_eq!(again.1, first.1, "{point}");
        let client = Client::connect(&place.socket()).unwrap();
        for sandbox in client.list().await.unwrap() {
            client.delete(&sandbox.id).await.unwrap();
        }
        assert!(next.stop().success(), "{point}: {}", log(&place));
    }
    // Killed when its clones are ready and nobody knows of them.
    let thawd = Thawd::start(&place);
    let client = Client::connect(&place.socket()).unwrap();
    let original = client
        .create(&serde_json::from_value(place.request()).unwrap())
        .await;
    let original = original.unwrap().sandbox.id;
    thawd.kill();
    let mut thawd = doomed("fork.thawed");
    assert!(thawd.serves(&place));
    let fork = format!("POST /v1/sandboxes/{original}/fork");
    let two = serde_json::json!({"count": 2});
    let cut = asked::ask(&place, &fork, Some("fork"), &two).and_then(asked::answer);
    assert_eq!(cut, None);
    eventually("it ends", || thawd.has_ended());
    let next = Thawd::start(&place);
    let client = Client::connect(&place.socket()).unwrap();
    let left = client.list().await.unwrap();
    assert_eq!(
        left.iter().map(|s| s.id.as_str()).collect::<Vec<_>>(),
        [original.as_str()]
    );
    client.delete(&original).await.unwrap();
    assert!(next.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_ends_before_its_container_runs_is_told_and_gone() {
    let _one = ONE_AT_A_TIME.lock().await;
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &brief()) else {
        return;
    };
    place.fill_pools_to(0..=0, 0..=0);
    let thawd = Thawd::start(&place);
    let mut wanted = place.request();
    wanted["container"] = serde_json::json!({"command": ["/hello"]});
    let (status, body) = answer(asked::ask(&place, "POST /v1/sandboxes", None, &wanted).unwrap());
    assert!(body.contains("guest-ended"), "{status} {body}\n{}", log(&place));
    let client = Client::connect(&place.socket()).unwrap();
    assert_eq!(client.list().await.unwrap().len(), 0);
    assert!(thawd.stop().success());
}
