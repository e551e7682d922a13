//! Callers that hang up: what was begun for one that does is undone, wherever it was, and who asks again with the same key
//! has one sandbox, and always the same answer.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use thaw_node::api::client::Client;
use thaw_pools::failpoint::Failpoint;
use thaw_tiny_guest::bare::bare;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd};

/// Kinds of places that a first creation comes to.
const COME_TO: [&str; 5] = ["create.", "directory.", "record.", "claim.", "vmm."];

/// Asks for a sandbox with a key, and does not wait.
fn ask(place: &Place, key: &str) -> UnixStream {
    let body = place.request().to_string();
    let mut stream = UnixStream::connect(place.socket()).unwrap();
    let head = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nhost: thawd\r\nconnection: close\r\ncontent-type: application/json\r\n\
         idempotency-key: {key}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream
}

/// Its status and its body.
fn answer(mut stream: UnixStream) -> (String, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_hangs_up_anywhere_leaves_nothing_and_may_ask_again() {
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &bare(0)) else {
        return;
    };
    place.fill_pools_to(0, 0);
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
