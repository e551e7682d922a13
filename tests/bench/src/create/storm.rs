//! Many creations at once, each timed from one start to the answer that its guest runs.

use std::sync::Arc;

use thaw_protocol::api::{Account, CreatedSandbox, Stage};
use thaw_sandbox::slow::Slow;
use thaw_tiny_node::Place;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::{Node, Ready};
use crate::Report;
use crate::clock::{monotonic_ns, us_since};

/// The series of a quantity of `count` creations at once, of a thawd that has this ready.
pub fn name(count: usize, ready: Ready, missed: bool, what: &str) -> String {
    let parked = match ready {
        Ready::Parked => ", parked",
        Ready::Nothing | Ready::Parts => "",
    };
    match missed {
        true => format!("{count} at once{parked}, a pool missed: {what}"),
        false => format!("{count} at once{parked}: {what}"),
    }
}

/// Whether a creation found something missing that its thawd was to have ready: any reason that is a pool's.
fn missed(ready: Ready, account: &Account) -> bool {
    let expected = |slow: &&Slow| slow.is_miss() && (ready != Ready::Parts || **slow != Slow::NoParkedVm);
    let mut misses = Slow::ALL.iter().filter(expected);
    misses.any(|slow| account.reasons.iter().any(|reason| reason.code == slow.code()))
}

/// From the start to the answer: the guest runs, and so does its process where it was to have one.
pub const CREATED: &str = "create to guest running";

/// So many at once, so often, of a thawd that has this ready. One round more, which warms up, is not counted.
#[derive(Clone, Copy, Debug)]
pub struct Storm {
    pub ready: Ready,
    pub at_once: usize,
    pub rounds: usize,
}

impl Storm {
    pub const fn new(ready: Ready, at_once: usize, rounds: usize) -> Storm {
        Storm {
            ready,
            at_once,
            rounds,
        }
    }

    /// All its rounds, by a thawd of its own; gives the place back.
    pub async fn run(self, place: Place, report: &mut Report) -> Result<Place, String> {
        // More are ready than are claimed, so that a refill that has begun takes nobody's; and refilled from half, as by default.
        let low = self.at_once + self.at_once / 4 + 2;
        let node = Node::start(place, self.ready, low..=2 * low).await?;
        for number in 0..=self.rounds {
            let counted = (number > 0).then_some(&mut *report);
            let done = round(&node, self.at_once, counted).await;
            done.map_err(|e| format!("{} at once, round {number}: {e}", self.at_once))?;
        }
        eprintln!("{}: {self:?}", report.name);
        Ok(node.stop())
    }
}

/// One round: makes `count` sandboxes, adds what that took to the report unless it is a warm-up, deletes them and waits until
/// the pools are full again.
async fn round(node: &Node, count: usize, report: Option<&mut Report>) -> Result<(), String> {
    let (go, waits) = watch::channel(0u64);
    let mut making = JoinSet::new();
    let request = Arc::new(node.request());
    for _ in 0..count {
        let (client, request, mut waits) = (node.client.clone(), request.clone(), waits.clone());
        making.spawn(async move {
            let start = *waits
                .wait_for(|start| *start > 0)
                .await
                .map_err(|e| e.to_string())?;
            let made = client.create(&request).await.map_err(|e| e.to_string())?;
            Ok::<_, String>((us_since(start) / 1e3, made))
        });
    }
    // All of them wait by now, or find it started.
    tokio::task::yield_now().await;
    let start = monotonic_ns();
    go.send_replace(start);
    let mut made: Vec<(f64, CreatedSandbox)> = Vec::with_capacity(count);
    while let Some(one) = making.join_next().await {
        made.push(one.map_err(|e| e.to_string())??);
    }
    let seconds = us_since(start) / 1e6;
    let deleted = delete(node, &made).await?;
    if let Some(report) = report {
        for (ms, created) in &made {
            sample(report, count, node.ready, *ms, created);
        }
        let unpooled = node.ready == Ready::Nothing;
        let name = |what| name(count, node.ready, unpooled, what);
        report.sample(&name("delete"), "ms", deleted);
        report.sample(&name("rate"), "1/s", count as f64 / seconds);
    }
    node.settle().await
}

fn sample(report: &mut Report, count: usize, ready: Ready, ms: f64, created: &CreatedSandbox) {
    let missed = missed(ready, &created.account);
    let name = |what: &str| name(count, ready, missed, what);
    report.sample(&name(CREATED), "ms", ms);
    for stage in &created.account.stages {
        let what = format!("stage {}", stage.name);
        report.sample(&name(&what), "ms", stage.duration_ns as f64 / 1e6);
    }
    let (end, between) = rest(&created.account.stages);
    report.sample(&name("between stages"), "ms", between as f64 / 1e6);
    report.sample(&name(OUTSIDE), "ms", ms - end as f64 / 1e6);
}

/// From the client's call to thawd's first step, and from its last stage to the client's return: connecting, HTTP, JSON, the table of
/// sandboxes.
const OUTSIDE: &str = "before the stages and after them";

/// When the last stage ended, and for how long before that there was none, nanoseconds since the first step.
fn rest(stages: &[Stage]) -> (u64, u64) {
    let mut in_order: Vec<_> = stages
        .iter()
        .map(|stage| (stage.start_ns, stage.start_ns + stage.duration_ns))
        .collect();
    in_order.sort_unstable();
    in_order.into_iter().fold((0, 0), |(end, between), (from, to)| {
        (end.max(to), between + from.saturating_sub(end))
    })
}

/// Deletes all at once; milliseconds until each was gone, of the median one.
async fn delete(node: &Node, made: &[(f64, CreatedSandbox)]) -> Result<f64, String> {
    let mut deleting = JoinSet::new();
    let start = monotonic_ns();
    for (_, created) in made {
        let (client, id) = (node.client.clone(), created.sandbox.id.clone());
        deleting.spawn(async move {
            client.delete(&id).await.map_err(|e| e.to_string())?;
            Ok::<_, String>(us_since(start) / 1e3)
        });
    }
    let mut took = Vec::with_capacity(made.len());
    while let Some(one) = deleting.join_next().await {
        took.push(one.map_err(|e| e.to_string())??);
    }
    took.sort_by(f64::total_cmp);
    Ok(took.get(took.len() / 2).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::api::Reason;

    #[test]
    fn time_without_a_stage_is_counted_once() {
        let stage = |start_ns, duration_ns| Stage {
            name: String::new(),
            start_ns,
            duration_ns,
        };
        let stages = [stage(50, 10), stage(10, 20), stage(12, 3), stage(25, 5)];
        assert_eq!(rest(&stages), (60, 30));
        assert_eq!(rest(&[]), (0, 0));
    }

    #[test]
    fn every_named_miss_is_counted_for_its_readiness() {
        let account = |code: &str| Account {
            reasons: vec![Reason {
                code: code.into(),
                text: String::new(),
            }],
            ..Account::default()
        };
        for slow in Slow::ALL {
            let account = account(slow.code());
            for ready in [Ready::Nothing, Ready::Parts, Ready::Parked] {
                let parked_elsewhere = ready == Ready::Parts && *slow == Slow::NoParkedVm;
                let expected = slow.is_miss() && !parked_elsewhere;
                assert_eq!(missed(ready, &account), expected, "{slow:?} {ready:?}");
            }
        }
        assert!(!missed(Ready::Parked, &Account::default()));
    }
}
