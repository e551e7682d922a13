//! Kills thawd at each of its failpoints. Sandboxes keep running, the next thawd takes them over and removes the rest, and in the end the
//! host is as before, by count. Also kills `thaw` where it changes the image store.
//!
//! The failpoints are those that the code declares. One [`Course`] of events reaches each of them, and a failpoint that is never reached
//! fails the test. `THAW_FAILPOINTS` is part of a name, `all`, or `all:` and part of a name. With `all`, the process is killed each time it
//! reaches the failpoint, in each course, and not only the first time.
//!
//! | module | what |
//! |---|---|
//! | [`copies`] | a paused sandbox is copied to a registry, and taken over by another node |
//! | [`courses`] | the courses of events during which thawd is killed |
//! | [`node`] | the node, and what the next thawd must find |
//! | [`pods`] | the same for pods, and for their network namespaces |
//! | [`remote`] | the same for clones whose memory is in a registry, and for pushes and pulls |
//! | [`store`] | the same for the image store, with `thaw image` |
//!
//! Several failpoints are tested at once, in lanes. Each lane has its own network namespace.

#![allow(clippy::unwrap_used)]

mod copies;
mod courses;
mod node;
mod pods;
mod remote;
mod store;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use courses::Course;
use node::Node;
use thaw_failpoint::Failpoint;
use tokio::sync::RwLock;

/// Maximum number of times that a failpoint is tested in one course.
const MOST: usize = 12;

/// Failpoints that only a thawd with fast paths for its slots reaches.
const FAST: [&str; 2] = ["network.fast-", "policy.fast-"];

/// Failpoints that only a thawd that may serve page faults reaches.
const FAULTS: [&str; 2] = ["pages.", "remote."];

/// Failpoints that concern a resource of the whole host: another lane's thawd would find the leftovers and remove them.
const OF_THE_HOST: &str = "cgroup.";

/// The failpoints to test.
struct Plan {
    points: Vec<Failpoint>,
    /// Whether to kill each time a failpoint is reached, in each course.
    all: bool,
    next: AtomicUsize,
    /// Locked for writing while one lane must run alone.
    host: RwLock<()>,
}

impl Plan {
    fn asked() -> Plan {
        let wanted = std::env::var("THAW_FAILPOINTS").unwrap_or_default();
        let (part, all) = match wanted.strip_prefix("all") {
            Some(part) => (part.trim_start_matches(':'), true),
            None => (wanted.as_str(), false),
        };
        let mut points: Vec<_> = Failpoint::ALL
            .iter()
            .filter(|p| p.name().contains(part))
            .collect();
        if let Err(e) = thaw_network::try_fast_path() {
            thaw_test_skip::skip(format!("the fast path's failpoints: {e}"));
            points.retain(|p| !FAST.iter().any(|begins| p.name().starts_with(begins)));
        }
        if !Path::new("/dev/userfaultfd").exists() {
            thaw_test_skip::skip("the failpoints of page faults: this host has no /dev/userfaultfd");
            points.retain(|p| !FAULTS.iter().any(|begins| p.name().starts_with(begins)));
        }
        Plan {
            points: points.into_iter().copied().collect(),
            all,
            next: AtomicUsize::new(0),
            host: RwLock::default(),
        }
    }

    fn take(&self) -> Option<Failpoint> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        self.points.get(next).copied()
    }

    /// Tests a failpoint. Returns how often a process was killed.
    async fn look_at(&self, point: Failpoint, node: &mut Node) -> usize {
        let own = Course::of(point);
        let mut kills = 0;
        for course in Course::ALL.iter().filter(|c| **c == own || self.all) {
            for nth in 1..=if self.all { MOST } else { 1 } {
                let died = course.killed_at(node, point, nth).await;
                assert!(died || nth > 1 || *course != own, "{point} is never come to");
                if !died {
                    break;
                }
                kills += 1;
            }
        }
        kills
    }
}

/// Tests failpoints until none is left. Returns how often a process was killed.
fn lane(plan: &Plan) -> usize {
    // SAFETY: it does not unshare descriptors, which is the only thing that would break other code's assumptions.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
    // Children get the network namespace of the thread that starts them: this one.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut node = {
            let _beside = plan.host.read().await;
            let Some(mut node) = Node::new() else { return 0 };
            node.learn_what_stays().await;
            node
        };
        let mut kills = 0;
        while let Some(point) = plan.take() {
            kills += match point.name().starts_with(OF_THE_HOST) {
                true => {
                    let _alone = plan.host.write().await;
                    plan.look_at(point, &mut node).await
                }
                false => {
                    let _beside = plan.host.read().await;
                    plan.look_at(point, &mut node).await
                }
            };
        }
        kills
    })
}

#[test]
fn kill_at_any_failpoint_leaves_nothing_after_the_next_start() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root there are no slots that lead outside");
    }
    let plan = Plan::asked();
    // A lane mostly waits, for example until the kernel has removed a network namespace.
    let lanes = std::thread::available_parallelism().map_or(2, |n| (2 * n.get()).min(4));
    let looked_at = &plan;
    let kills: usize = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(move || lane(looked_at))).collect();
        lanes.into_iter().map(|lane| lane.join().unwrap()).sum()
    });
    println!("{} failpoints, {kills} kills, {lanes} at once", plan.points.len());
}
