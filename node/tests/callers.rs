//! Creations whose caller hangs up, or whose thawd dies, leave nothing. A retry with the same key creates one sandbox and always gets the
//! same answer. A creation whose guest ends fails.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use thaw_daemon::api::client::Client;
use thaw_failpoint::Failpoint;
use thaw_tiny_guest::bare::{bare, brief, lasting};
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd, asked};

/// Each test counts the host's interfaces, so they must not overlap.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Prefixes of the failpoints that a first creation reaches.
const COME_TO: [&str; 5] = ["create.", "directory.", "record.", "claim.", "vmm."];

/// Sends a creation with a key, and does not wait for the answer.
fn ask(place: &Place, key: &str) -> UnixStream {
    asked::ask(place, "POST /v1/sandboxes", Some(key), &place.request()).unwrap()
}

/// The status and the body of the answer.
fn answer(stream: UnixStream) -> (String, String) {
    asked::answer(stream).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn creation_cut_off_anywhere_leaves_nothing_and_can_be_retried() {
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
    // A slot of an earlier test may still be there now, and be removed by the kernel later.
    let is_left = |now: &Counts| {
        let others = |counts: &Counts| Counts {
            interfaces: BTreeSet::new(),
            ..counts.clone()
        };
        !now.interfaces.is_subset(&empty.interfaces) || others(now) != others(&empty)
    };

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
            // A failpoint of a pool: there are no pools here.
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
            !is_left(&now)
        });
    }
    assert!(come_to > 15, "{come_to}");
}

/// The failpoints at which thawd is killed during a creation with a key, and whether the sandbox of that creation is the answer.
const KILLED_AT: [(&str, bool); 6] = [
    ("create.acknowledged", false),
    ("create.ready", true),
    ("create.shown", true),
    ("answer.begun", true),
    ("answer.noted", true),
    ("adopt.shown", true),
];

/// Starts a thawd that dies at a failpoint.
fn doomed(place: &Place, point: &str) -> Thawd {
    let mut command = place.thawd();
    command.args(["--failpoint", point]);
    Thawd::begin(place, command)
}

/// Requests a sandbox, with the failpoint as the key, from a thawd that dies at the failpoint.
fn create_and_die(place: &Place, point: &str) {
    let mut thawd = doomed(place, point);
    if !thawd.serves(place) {
        return;
    }
    let asked = asked::ask(place, "POST /v1/sandboxes", Some(point), &place.request());
    let answered = asked.and_then(asked::answer);
    let is_at_adoption = point == "adopt.shown";
    // A thawd that adopts nothing does not reach that failpoint.
    assert_eq!(answered.is_some(), is_at_adoption, "{point}: {answered:?}");
    if is_at_adoption {
        thawd.kill();
        // Killed during the adoption, it has not answered yet; the next thawd does.
        thawd = doomed(place, point);
    }
    eventually(&format!("{point}: it dies"), || thawd.has_ended());
}

/// Forks a sandbox into two, with a key. Returns the answer.
fn fork(place: &Place, original: &str) -> Option<(String, String)> {
    let path = format!("POST /v1/sandboxes/{original}/fork");
    asked::ask(place, &path, Some("fork"), &serde_json::json!({"count": 2})).and_then(asked::answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idempotency_key_has_the_same_answer_after_a_crash() {
    let _one = ONE_AT_A_TIME.lock().await;
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &lasting()) else {
        return;
    };
    place.fill_pools_to(0..=0, 0..=0);
    for (point, is_made) in KILLED_AT {
        create_and_die(&place, point);
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
        // The answer is the same, whichever thawd gives it and however that thawd ends.
        next.kill();
        let next = Thawd::start(&place);
        assert_eq!(answer(ask(&place, point)).1, body, "{point}");
        let mut other = place.request();
        other["cpus"] = 2.into();
        let reused = asked::ask(&place, "POST /v1/sandboxes", Some(point), &other);
        let reused = asked::answer(reused.unwrap()).unwrap();
        assert!(reused.1.contains("key-reused"), "{point}: {reused:?}");

        // A complete fork is the answer.
        let first = fork(&place, &one[0].id).unwrap();
        assert!(first.0.contains("201"), "{first:?}");
        next.kill();
        let next = Thawd::start(&place);
        let again = fork(&place, &one[0].id).unwrap();
        assert_eq!(again.1, first.1, "{point}");
        let client = Client::connect(&place.socket()).unwrap();
        for sandbox in client.list().await.unwrap() {
            client.delete(&sandbox.id).await.unwrap();
        }
        assert!(next.stop().success(), "{point}: {}", log(&place));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clones_of_a_fork_cut_off_by_a_crash_are_removed() {
    let _one = ONE_AT_A_TIME.lock().await;
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &lasting()) else {
        return;
    };
    place.fill_pools_to(0..=0, 0..=0);
    let thawd = Thawd::start(&place);
    let client = Client::connect(&place.socket()).unwrap();
    let request = serde_json::from_value(place.request()).unwrap();
    let original = client.create(&request).await.unwrap().sandbox.id;
    thawd.kill();
    // Killed when the clones are ready but before the caller got an answer.
    let mut thawd = doomed(&place, "fork.thawed");
    assert!(thawd.serves(&place));
    assert_eq!(fork(&place, &original), None);
    eventually("it ends", || thawd.has_ended());
    let next = Thawd::start(&place);
    let client = Client::connect(&place.socket()).unwrap();
    let left = client.list().await.unwrap();
    let left: Vec<&str> = left.iter().map(|s| s.id.as_str()).collect();
    assert_eq!(left, [original.as_str()]);
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
