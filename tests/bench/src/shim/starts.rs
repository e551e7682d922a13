//! Starts: `ctr run` from its spawn to its end, one after the other in turn, and many at once.

use std::sync::Barrier;

use super::stages::Stages;
use super::{Node, Way};
use crate::Report;
use crate::clock::{monotonic_ns, us_since};

/// Most guests that the lab's processor may lose (`tests/lab/README.md`) before that is a failure.
const LOSSES: usize = 3;

/// The name of the row of whole runs.
pub fn row(way: Way) -> String {
    format!("{}: ctr run --rm", way.name())
}

/// The name of the row of starts beside so many others.
pub fn row_at_once(way: Way, count: usize) -> String {
    format!("{}: ctr run -d, {count} at once", way.name())
}

/// One of each way, in turn; where thawd's time went too.
///
/// # Errors
/// Says which failed, or that its microVM was not thawed from a template that was there.
pub fn round(node: &Node, number: usize, mut report: Option<&mut Report>) -> Result<(), String> {
    for way in Way::ALL {
        let id = format!(
            "round-{number}-{}",
            way.runtime().rsplit('.').nth(1).unwrap_or("x")
        );
        let before = Stages::of(&node.home)?;
        let ms = run_once(node, way, &id)?;
        let spent = Stages::of(&node.home)?.since(&before);
        if way.is_thaw() {
            spent.check_thawed(1)?;
        }
        let Some(report) = &mut report else { continue };
        report.sample(&row(way), "ms", ms);
        if way == Way::Own {
            for (stage, seconds) in spent.seconds() {
                report.sample(&format!("thaw: thawd's stage {stage}"), "ms", seconds * 1e3);
            }
            report.sample("thaw: thawd's part", "ms", spent.whole() * 1e3);
        }
    }
    Ok(())
}

/// One run, milliseconds. In the lab a guest its processor lost is run again, and that is said.
fn run_once(node: &Node, way: Way, id: &str) -> Result<f64, String> {
    for loss in 0..=LOSSES {
        let began = monotonic_ns();
        let outcome = node.run(way, &["--rm"], &format!("{id}-{loss}"), &["true"]);
        let ms = us_since(began) / 1e3;
        if outcome.status.success() {
            return Ok(ms);
        }
        let lost = std::env::var_os("THAW_LAB").is_some() && outcome.stderr.contains("triple fault");
        if !lost {
            return Err(format!("{}: {outcome:?}", row(way)));
        }
        eprintln!(
            "bench-shim: the lab's processor lost a guest, it is run again: {}",
            outcome.stderr
        );
    }
    Err(format!("{}: {LOSSES} guests were lost", row(way)))
}

/// `count` of one way from one start, each until its container runs.
///
/// # Errors
/// As [`round`].
pub fn at_once(node: &Node, way: Way, count: usize, report: &mut Report) -> Result<(), String> {
    let before = Stages::of(&node.home)?;
    let start = Barrier::new(count);
    let ids: Vec<String> = (0..count).map(|n| format!("at-once-{n}")).collect();
    let times: Vec<Result<f64, String>> = std::thread::scope(|scope| {
        let runs: Vec<_> = ids
            .iter()
            .map(|id| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let began = monotonic_ns();
                    let outcome = node.run(way, &["-d"], id, &["sleep", "100000"]);
                    let ms = us_since(began) / 1e3;
                    match outcome.status.success() {
                        true => Ok(ms),
                        false => Err(format!("{id}: {}", outcome.stderr)),
                    }
                })
            })
            .collect();
        let gone = |_| Err("it panicked".to_owned());
        runs.into_iter()
            .map(|run| run.join().unwrap_or_else(gone))
            .collect()
    });
    for ms in times {
        report.sample(&row_at_once(way, count), "ms", ms?);
    }
    if way.is_thaw() {
        Stages::of(&node.home)?
            .since(&before)
            .check_thawed(count as u64)?;
    }
    ids.iter().try_for_each(|id| node.remove(id))
}
