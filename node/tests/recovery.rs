//! thawd killed at each of its failpoints: what runs keeps running, the next thawd takes it over and removes the rest, and
//! in the end everything on the host is as it was, counted.
//!
//! The failpoints are those the code declares. Each is come to by one and the same course of events, which has all that
//! thawd does in it; one that is never come to fails the test. `THAW_FAILPOINTS` takes part of a name, or `all`: then thawd
//! is killed not the first time only that it comes to a place, but each time.

#![allow(clippy::unwrap_used)]

use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use thaw_node::api::client::Client;
use thaw_node::exit::Failure;
use thaw_pools::failpoint::Failpoint;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, FreezeSandbox, Sandbox, ThawSandbox};
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd};

/// What is come to only while something is made that then stays: the place must be new.
const COLD: [&str; 7] = [
    "disk.template-formatted",
    "disk.template-made",
    "template.locked",
    "template.drafted",
    "template.booted",
    "template.frozen",
    "template.rehearsed",
];
/// Times a place is come to that are looked at, at most.
const MOST: usize = 12;
/// Where a sandbox is frozen to.
const FROZEN: &str = "frozen/snapshot";

/// A node, and which thawds it has had.
struct Node {
    place: Place,
    thawds: Vec<ProcessRecord>,
    /// What there is when nothing is there but what stays.
    empty: Counts,
}

impl Node {
    fn new() -> Option<Node> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
        let place = Place::new(binaries, &lasting())?;
        place.fill_pools_to(1, 1);
        Some(Node {
            place,
            thawds: Vec::new(),
            empty: Counts::default(),
        })
    }

    fn start(&mut self) -> Thawd {
        let thawd = Thawd::start(&self.place);
        self.thawds.push(thawd.record());
        thawd
    }

    fn client(&self) -> Client {
        Client::connect(&self.place.socket()).unwrap()
    }

    fn counts(&self) -> Counts {
        Counts::of(&self.place, &self.thawds)
    }

    /// Waits until there is nothing more than what stays.
    fn is_empty_again(&self, what: &str) {
        let mut now = self.counts();
        let since = std::time::Instant::now();
        while now != self.empty && since.elapsed().as_secs() < 20 {
            std::thread::sleep(std::time::Duration::from_millis(10));
            now = self.counts();
        }
        assert_eq!(now, self.empty, "{what}: {}", log(&self.place));
    }
}

fn request(place: &Place) -> CreateSandbox {
    serde_json::from_value(place.request()).unwrap()
}

/// All that a thawd does but for its start and its end. Ends at the first failure: thawd's death is one.
async fn course(place: &Place, client: &Client, ended: &mut impl FnMut() -> bool) -> Result<(), Failure> {
    let first = client.create(&request(place)).await?.sandbox;
    let at = serde_json::json!({"directory": place.path(FROZEN)});
    let freeze: FreezeSandbox = serde_json::from_value(at.clone()).unwrap();
    client.freeze(&first.id, &freeze).await?;
    client.pause(&first.id).await?;
    let thaw: ThawSandbox = serde_json::from_value(at).unwrap();
    let thawed = client.thaw(&thaw).await?.sandbox;
    client.delete(&thawed.id).await?;
    // More than are ready, so some are made now.
    let asked = request(place);
    let (one, two) = tokio::join!(client.create(&asked), client.create(&asked));
    for made in [one?, two?] {
        client.delete(&made.sandbox.id).await?;
    }
    eventually("a machine waits, or thawd has ended", || {
        place.spares() > 0 || ended()
    });
    let taken = client.create(&asked).await?.sandbox;
    client.delete(&taken.id).await?;
    client.delete(&first.id).await
}

/// Leaves a running sandbox, and what a killed thawd had made ahead.
async fn survivor(node: &mut Node) -> Sandbox {
    let thawd = node.start();
    let client = node.client();
    let survivor = client.create(&request(&node.place)).await.unwrap().sandbox;
    let other = client.create(&request(&node.place)).await.unwrap().sandbox;
    client.delete(&other.id).await.unwrap();
    eventually("a machine waits", || node.place.spares() > 0);
    thawd.kill();
    survivor
}

/// Kills a thawd at a failpoint, the `nth` time it comes there. Says whether it came there so often.
async fn killed_at(node: &mut Node, point: Failpoint, nth: usize) -> bool {
    let what = format!("{point}:{nth}");
    let survivor = match COLD.contains(&point.name()) {
        true => None,
        false => Some(survivor(node).await),
    };
    let mut command = node.place.thawd();
    command.args(["--failpoint", &what]);
    let mut doomed = Thawd::begin(&node.place, command);
    node.thawds.push(doomed.record());
    if doomed.serves(&node.place)
        && let Some(client) = Client::connect(&node.place.socket())
    {
        let done = course(&node.place, &client, &mut || doomed.has_ended()).await;
        // Its death is seen by its clients first.
        if let Err(e) = done {
            eventually(&format!("{what}: thawd ends, and not {e}"), || doomed.has_ended());
        }
    }
    let status = doomed.stop();
    let died = status.signal() == Some(9);
    assert!(
        died || status.success(),
        "{what}: {status:?}: {}",
        log(&node.place)
    );

    if let Some(survivor) = &survivor {
        let vmm = survivor.vmm_pid.and_then(ProcessRecord::of);
        assert!(vmm.is_some(), "{what}: the sandbox does not go on");
    }
    let next = node.start();
    let client = node.client();
    let living = client.list().await.unwrap();
    if let Some(survivor) = &survivor {
        let found = living.iter().find(|s| s.id == survivor.id);
        let found = found.unwrap_or_else(|| panic!("{what}: the sandbox is not taken over: {living:?}"));
        assert_eq!(
            (found.state.as_str(), found.vmm_pid),
            ("running", survivor.vmm_pid),
            "{what}"
        );
    }
    // The survivor, the first of the course, and the two that are made at once.
    assert!(living.len() <= 4, "{what}: {living:?}");
    assert_eq!(
        node.counts().vmms(),
        living.len(),
        "{what}: {living:?}; {}",
        log(&node.place)
    );
    for sandbox in &living {
        assert_ne!(sandbox.state, "ended", "{what}");
    }
    // Half a snapshot is none.
    let beside: Vec<_> = std::fs::read_dir(node.place.path("frozen"))
        .into_iter()
        .flatten()
        .flatten()
        .collect();
    assert!(
        beside
            .iter()
            .all(|e| e.file_name() == "snapshot" || e.file_name() == "survivor"),
        "{what}: {beside:?}"
    );
    if let Some(survivor) = &survivor {
        // It is all there: its copy wakes, and says so.
        let at = serde_json::json!({"directory": node.place.path("frozen/survivor")});
        let freeze: FreezeSandbox = serde_json::from_value(at.clone()).unwrap();
        let thaw: ThawSandbox = serde_json::from_value(at).unwrap();
        client.freeze(&survivor.id, &freeze).await.unwrap();
        let copy = client.thaw(&thaw).await.unwrap().sandbox;
        client.delete(&copy.id).await.unwrap();
    }
    // It does all that again.
    let made = client
        .create(&request(&node.place))
        .await
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    client.delete(&made.sandbox.id).await.unwrap();
    for sandbox in &living {
        client.delete(&sandbox.id).await.unwrap();
    }
    assert!(next.stop().success(), "{what}: {}", log(&node.place));
    let _ = std::fs::remove_dir_all(node.place.path("frozen"));
    node.is_empty_again(&what);
    died
}

/// What there is in a place where everything was made once, and nothing of it runs.
async fn emptied(node: &mut Node) -> Counts {
    let thawd = node.start();
    let client = node.client();
    let made = client.create(&request(&node.place)).await.unwrap().sandbox;
    client.delete(&made.id).await.unwrap();
    assert!(thawd.stop().success());
    let counts = node.counts();
    assert_eq!(
        (counts.processes.len(), counts.cgroups.len()),
        (0, 0),
        "{counts:?}"
    );
    assert!(
        counts.sockets.is_empty() && counts.taps + counts.namespaces + counts.machines == 0,
        "{counts:?}"
    );
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_failpoint_it_leaves_nothing_that_the_next_does_not_find() {
    let wanted = std::env::var("THAW_FAILPOINTS").unwrap_or_default();
    let (part, all) = match wanted.as_str() {
        "all" => ("", true),
        part => (part, false),
    };
    let Some(mut node) = Node::new() else { return };
    node.empty = emptied(&mut node).await;
    for point in Failpoint::ALL.iter().filter(|p| p.name().contains(part)) {
        for nth in 1..=if all { MOST } else { 1 } {
            let died = match COLD.contains(&point.name()) {
                true => {
                    let mut cold = Node::new().unwrap();
                    cold.empty = node.empty.clone();
                    killed_at(&mut cold, *point, nth).await
                }
                false => killed_at(&mut node, *point, nth).await,
            };
            assert!(died || nth > 1, "{point} is never come to");
            if !died {
                break;
            }
        }
    }
}
