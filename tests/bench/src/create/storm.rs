//! Many creations at once, each timed from one start to the answer that its guest runs.

use std::sync::Arc;

use thaw_protocol::api::CreatedSandbox;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Node;
use crate::Report;
use crate::clock::{monotonic_ns, us_since};

/// Reasons of a start's account that say that a pool had nothing.
const MISSES: [&str; 4] = ["disk-made", "network-made", "cgroup-made", "no-shell"];

/// The series of a quantity of `count` creations at once.
pub fn name(count: usize, missed: bool, what: &str) -> String {
    match missed {
        true => format!("{count} at once, a pool missed: {what}"),
        false => format!("{count} at once: {what}"),
    }
}

/// From the start to the answer.
pub const CREATED: &str = "create to guest running";

/// One round: makes `count` sandboxes, adds what that took to the report unless it is a warm-up, deletes them and waits until
/// the pools are full again.
pub async fn round(node: &Node, count: usize, report: Option<&mut Report>) -> Result<(), String> {
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
            sample(report, count, *ms, created);
        }
        let unpooled = node.shells == 0;
        report.sample(&name(count, unpooled, "delete"), "ms", deleted);
        report.sample(&name(count, unpooled, "rate"), "1/s", count as f64 / seconds);
    }
    node.settle().await
}

fn sample(report: &mut Report, count: usize, ms: f64, created: &CreatedSandbox) {
    let reasons = &created.account.reasons;
    let missed = reasons.iter().any(|r| MISSES.contains(&r.code.as_str()));
    report.sample(&name(count, missed, CREATED), "ms", ms);
    for stage in &created.account.stages {
        let what = format!("stage {}", stage.name);
        report.sample(&name(count, missed, &what), "ms", stage.duration_ns as f64 / 1e6);
    }
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
