//! Reads of what thawd knows: lists by label of many sandboxes, beside the same list found by looking at each; and many
//! callers that watch every change.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use thaw_daemon::api::scope::Scope;
use thaw_daemon::api::watch::{Cache, Query, Selector, Versions, Watcher};
use thaw_protocol::api::Sandbox;
use tokio::task::JoinSet;

use crate::Report;
use crate::clock::{monotonic_ns, us_since};

/// Sandboxes that have one label's value.
const ALIKE: usize = 100;
/// Changes of which one is timed.
const EACH: u64 = 50;

fn sandbox(number: usize, group: usize) -> Sandbox {
    Sandbox {
        id: format!("{number:012x}"),
        // What is found by a label is found by this field too, which nothing indexes.
        image: format!("image-{group}"),
        cpus: 1,
        memory_mib: 128,
        state: "running".into(),
        vsock: format!("/run/thaw/sandboxes/{number:012x}/vsock.sock"),
        labels: [("app".to_owned(), format!("app-{group}"))].into(),
        ..Sandbox::default()
    }
}

/// Lists by label, and by looking at each, in turn.
pub fn lists(report: &mut Report, sandboxes: usize, rounds: usize) -> Result<(), String> {
    let cache = Cache::new(Versions::of_clock());
    let groups = sandboxes.div_ceil(ALIKE);
    for number in 0..sandboxes {
        cache.put(sandbox(number, number % groups));
    }
    let (indexed, scanned) = names(sandboxes);
    for round in 0..rounds {
        let group = round % groups;
        let mut found = Vec::new();
        for (name, labels, fields) in [
            (&indexed, format!("app=app-{group}"), String::new()),
            (&scanned, String::new(), format!("image=image-{group}")),
        ] {
            let query = Query {
                selector: selector(&labels, &fields)?,
                limit: None,
                from: None,
            };
            let start = monotonic_ns();
            let page = cache.list(&query).map_err(|e| e.to_string())?;
            report.sample(name, "µs", us_since(start));
            found.push(page.items.len());
        }
        if found[0] != found[1] || found[0] == 0 {
            return Err(format!(
                "by label {} sandboxes were found, by looking {}",
                found[0], found[1]
            ));
        }
    }
    report.ratio("list_indexed_over_scan", &indexed, &scanned)
}

/// Of all tenants' sandboxes.
fn selector(labels: &str, fields: &str) -> Result<Selector, String> {
    Selector::parse(Scope::node(), labels, fields).map_err(|e| e.to_string())
}

fn names(sandboxes: usize) -> (String, String) {
    (
        format!("list {ALIKE} of {sandboxes} sandboxes: by label, indexed"),
        format!("list {ALIKE} of {sandboxes} sandboxes: by looking at each"),
    )
}

/// One timed change: when it was made, and how many have seen it.
#[derive(Debug, Default)]
struct Timed {
    made: AtomicU64,
    seen: AtomicUsize,
    last: AtomicU64,
}

/// `watchers` that follow `rate` changes a second for a while: each must be told every one.
pub async fn watches(report: &mut Report, watchers: usize, rate: u64, seconds: u64) -> Result<(), String> {
    let cache = Arc::new(Cache::new(Versions::of_clock()));
    for number in 0..ALIKE {
        cache.put(sandbox(number, number));
    }
    let (first, changes) = (cache.version() + 1, rate * seconds);
    let timed: Arc<Vec<Timed>> = Arc::new((0..=changes / EACH).map(|_| Timed::default()).collect());
    let mut following = JoinSet::new();
    for _ in 0..watchers {
        let watcher = Watcher::start(cache.clone(), None, selector("", "")?).map_err(|e| e.to_string())?;
        following.spawn(follow(watcher, first, changes, timed.clone(), watchers));
    }
    let start = monotonic_ns();
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    let mut made = 0;
    while made < changes {
        ticks.tick().await;
        // As many as there should be by now: a late tick makes up for it.
        let due = (monotonic_ns() - start) * rate / 1_000_000_000;
        while made < due.min(changes) {
            if made % EACH == 0 {
                timed[(made / EACH) as usize]
                    .made
                    .store(monotonic_ns(), Ordering::Release);
            }
            let id = format!("{:012x}", made as usize % ALIKE);
            cache.update(&id, |sandbox| sandbox.created = made + 1);
            made += 1;
        }
    }
    let took = us_since(start) / 1e6;
    while let Some(followed) = following.join_next().await {
        followed.map_err(|e| e.to_string())??;
    }
    let name = format!("watch: a change, until the last of {watchers} is told");
    for timed in timed.iter().take((changes / EACH) as usize) {
        let (made, last) = (
            timed.made.load(Ordering::Acquire),
            timed.last.load(Ordering::Acquire),
        );
        report.sample(&name, "ms", last.saturating_sub(made) as f64 / 1e6);
    }
    report.sample(
        &format!("watch: changes made beside {watchers} that watch"),
        "1/s",
        changes as f64 / took,
    );
    report.note(format!(
        "{watchers} watchers each received all {changes} changes; none was lost."
    ));
    Ok(())
}

/// Counts the lines until all are there.
async fn follow(
    mut watcher: Watcher,
    first: u64,
    changes: u64,
    timed: Arc<Vec<Timed>>,
    watchers: usize,
) -> Result<(), String> {
    let mut told = 0;
    while told < changes {
        let lines = watcher
            .next()
            .await
            .map_err(|gone| format!("a watcher lost changes: {gone}"))?;
        let lines = lines.ok_or("a watch ended")?;
        let before = told;
        told += lines.iter().filter(|b| **b == b'\n').count() as u64;
        for index in before.div_ceil(EACH)..told.div_ceil(EACH) {
            let timed = &timed[index as usize];
            if timed.seen.fetch_add(1, Ordering::AcqRel) + 1 == watchers {
                timed.last.store(monotonic_ns(), Ordering::Release);
            }
        }
    }
    match told == changes {
        true => Ok(()),
        false => Err(format!("{told} lines for {changes} changes since {first}")),
    }
}
