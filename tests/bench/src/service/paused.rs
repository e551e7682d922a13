//! What thawd has in its own memory for sandboxes that are paused with their memory released.

use thaw_protocol::api::{PauseSandbox, PausedMemory};
use thaw_tiny_node::kernel::Cost;
use tokio::task::JoinSet;

use crate::Report;
use crate::clock::progress;
use crate::create::Node;
use crate::snapshot::server::failed;

/// Creations and pauses on their way at a time.
const OVERLAP: usize = 4;
/// Of the paused sandboxes so many are resumed at the end.
const RESUMED: usize = 10;

/// Pauses a tenth of `count` sandboxes, which fill thawd's caches, and `count` more, for which its memory is measured.
///
/// # Errors
/// A request failed, or a sandbox is not as it must be.
pub async fn run(node: &Node, count: usize, report: &mut Report) -> Result<(), String> {
    let mut paused = Vec::new();
    grow(node, &mut paused, (count / 10).max(1)).await?;
    let before = cost(node, &paused, report).await?;
    let all = paused.len() + count;
    grow(node, &mut paused, all).await?;
    let after = cost(node, &paused, report).await?;
    check(node, paused.len()).await?;
    let each = |after: u64, before: u64| (after as f64 - before as f64) / count as f64;
    let kib = each(after.rss_kib, before.rss_kib);
    report.sample("thawd's RSS for each paused sandbox", "KiB", kib);
    let descriptors = each(after.descriptors, before.descriptors);
    report.sample("thawd's descriptors for each paused sandbox", "", descriptors);
    report.ratios.insert("paused_kib_each".into(), kib);
    for id in paused.iter().step_by((paused.len() / RESUMED).max(1)) {
        node.client.resume(id).await.map_err(failed)?;
        let resumed = node.client.get(id).await.map_err(failed)?;
        if resumed.state != "running" {
            return Err(format!("sandbox {id} was resumed and is {}", resumed.state));
        }
    }
    for id in &paused {
        node.client.delete(id).await.map_err(failed)?;
    }
    Ok(())
}

/// Makes sandboxes and pauses each, until there are `count`.
async fn grow(node: &Node, paused: &mut Vec<String>, count: usize) -> Result<(), String> {
    while paused.len() < count {
        let mut making = JoinSet::new();
        for _ in (paused.len()..count).take(OVERLAP) {
            let (client, request) = (node.client.clone(), node.request());
            making.spawn(async move {
                let id = client.create(&request).await?.sandbox.id;
                let release = PauseSandbox {
                    memory: PausedMemory::Release,
                };
                client.pause_as(&id, &release).await.map(|()| id)
            });
        }
        for made in making.join_all().await {
            paused.push(made.map_err(failed)?);
        }
        if paused.len().is_multiple_of(100) {
            progress("bench-service", format!("{} paused", paused.len()));
        }
    }
    Ok(())
}

/// What thawd costs beside these, once it does nothing.
async fn cost(node: &Node, paused: &[String], report: &mut Report) -> Result<Cost, String> {
    node.settle().await?;
    let cost = Cost::of(node.thawd.record().pid).ok_or("thawd has ended")?;
    let count = paused.len();
    report.sample(
        &format!("thawd's RSS beside {count} paused sandboxes"),
        "KiB",
        cost.rss_kib as f64,
    );
    Ok(cost)
}

/// Checks that thawd has so many sandboxes, and all are paused without a process.
async fn check(node: &Node, count: usize) -> Result<(), String> {
    let listed = node.client.list().await.map_err(failed)?;
    let released = listed
        .iter()
        .filter(|sandbox| sandbox.state == "paused" && sandbox.memory_released && sandbox.vmm_pid.is_none());
    match (released.count(), listed.len()) {
        (released, all) if released == count && all == count => Ok(()),
        (released, all) => Err(format!(
            "{count} sandboxes were paused; {all} are listed, {released} of them paused with their memory released"
        )),
    }
}
