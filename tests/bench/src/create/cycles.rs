//! Creations and deletions by the thousand: what thawd and the kernel have before, meanwhile and after.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use thaw_daemon::api::client::Client;
use thaw_tiny_node::kernel::{Cost, objects};
use tokio::task::JoinSet;

use super::Node;
use crate::Report;
use crate::clock::{monotonic_ns, us_since};

/// Creations on their way at a time.
const OVERLAP: usize = 4;

/// What there is at a moment at which nothing happens.
#[derive(Clone, Debug)]
pub struct Moment {
    cost: Cost,
    objects: BTreeMap<&'static str, u64>,
}

async fn moment(node: &Node) -> Result<Moment, String> {
    node.settle().await?;
    let cost = Cost::of(node.thawd.record().pid).ok_or("thawd has ended")?;
    Ok(Moment {
        cost,
        objects: objects(),
    })
}

/// Runs `count` of them, and adds what grew to the report. Beforehand it warms up for `warm_up` at least, with a tenth of them at a time.
pub async fn run(node: &Node, count: usize, warm_up: Duration, report: &mut Report) -> Result<(), String> {
    let began = Instant::now();
    loop {
        many(node, (count / 10).max(1)).await?;
        if began.elapsed() >= warm_up {
            break;
        }
    }
    let before = moment(node).await?;
    let parts = count.clamp(1, 20);
    for part in 0..parts {
        let start = monotonic_ns();
        let these = count / parts + usize::from(part < count % parts);
        many(node, these).await?;
        let seconds = us_since(start) / 1e6;
        report.sample(
            "cycles: create and delete, 4 on their way",
            "1/s",
            these as f64 / seconds,
        );
        let now = moment(node).await?;
        report.sample("cycles: thawd's RSS", "KiB", now.cost.rss_kib as f64);
        eprintln!("bench-create: cycles {} of {parts}", part + 1);
    }
    let after = moment(node).await?;
    let over = |after: u64, before: u64| after as f64 / before.max(1) as f64;
    let rows = [
        ("rss", before.cost.rss_kib, after.cost.rss_kib, "KiB"),
        ("descriptors", before.cost.descriptors, after.cost.descriptors, ""),
        ("threads", before.cost.threads, after.cost.threads, ""),
    ];
    for (what, first, last, unit) in rows {
        report.sample(
            &format!("{count} cycles: thawd's {what}, before and after"),
            unit,
            first as f64,
        );
        report.sample(
            &format!("{count} cycles: thawd's {what}, before and after"),
            unit,
            last as f64,
        );
        report
            .ratios
            .insert(format!("{what}_after_over_before_10k"), over(last, first));
    }
    for (kind, first) in &before.objects {
        let Some(last) = after.objects.get(kind) else {
            continue;
        };
        for value in [*first, *last] {
            report.sample(
                &format!("{count} cycles: kernel's {kind}, before and after"),
                "",
                value as f64,
            );
        }
    }
    Ok(())
}

/// Makes `count` and deletes each.
pub(super) async fn many(node: &Node, count: usize) -> Result<(), String> {
    // Of its own: the connections that it keeps end with it.
    let client = Client::connect(&node.place.socket()).ok_or("thawd does not answer")?;
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..OVERLAP {
        let (client, request, next) = (client.clone(), node.request(), next.clone());
        workers.spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < count {
                let made = client.create(&request).await.map_err(|e| e.to_string())?;
                client.delete(&made.sandbox.id).await.map_err(|e| e.to_string())?;
            }
            Ok::<_, String>(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.map_err(|e| e.to_string())??;
    }
    Ok(())
}
