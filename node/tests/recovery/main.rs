//! thawd killed at each of its failpoints: what runs keeps running, the next thawd takes it over and removes the rest, and
//! in the end everything on the host is as it was, counted. `thaw` killed likewise where it changes the image store.
//!
//! The failpoints are those the code declares, each is come to by one [`Course`] of events, and one that is never come to
//! fails the test. `THAW_FAILPOINTS` takes part of a name, `all`, or `all:` and part of a name: then whoever it is is killed
//! not the first time only that it comes to a place, but each time, and in each course.
//!
//! | module | what |
//! |---|---|
//! | [`courses`] | what is done to a thawd that is to die |
//! | [`node`] | the node it is done on, and what the next thawd must find |
//! | [`pods`] | the same of pods, and of what is made in their namespaces |
//! | [`store`] | the same of the image store, by `thaw image` |
//!
//! Several points are looked at at once, each lane of them in a network namespace of its own.

#![allow(clippy::unwrap_used)]

mod courses;
mod node;
mod pods;
mod store;

use std::sync::atomic::{AtomicUsize, Ordering};

use courses::Course;
use node::Node;
use thaw_failpoint::Failpoint;
use tokio::sync::RwLock;

/// Times a place is come to that are looked at, at most.
const MOST: usize = 12;

/// Where a thawd comes whose slots have a fast path.
const FAST: [&str; 2] = ["network.fast-", "policy.fast-"];

/// Where it is about what the host has once: another lane's thawd would find it, and sweep it up.
const OF_THE_HOST: &str = "cgroup.";

/// What is looked at.
struct Plan {
    points: Vec<Failpoint>,
    /// At each time, in each course.
    all: bool,
    next: AtomicUsize,
    /// Written while one lane is to be alone.
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

    /// Looks at a point; returns how often somebody was killed.
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

/// Looks at points until there are no more; returns how often somebody was killed.
fn lane(plan: &Plan) -> usize {
    // SAFETY: it unshares no descriptors, the one thing that breaks other code's assumptions.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
    // Children have the namespace of the thread that begins them: it is this one.
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
    let lanes = std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
    let looked_at = &plan;
    let kills: usize = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(move || lane(looked_at))).collect();
        lanes.into_iter().map(|lane| lane.join().unwrap()).sum()
    });
    println!("{} failpoints, {kills} kills, {lanes} at once", plan.points.len());
}
