//! What a creation and a deletion cost beside few sandboxes and beside many.

use thaw_protocol::api::CreateSandbox;
use tokio::task::JoinSet;

use super::{Node, cycle_cpu};
use crate::Report;
use crate::clock::{monotonic_ns, us_since};

/// Creations on their way at a time while sandboxes are made to stand by.
const OVERLAP: usize = 4;

/// What is timed, as rows name it.
const TIMED: [&str; 4] = ["create", "create with a name", "find by name", "delete"];
/// The processors' time for a creation, its deletion and the refill of the pools.
const CPU: &str = "cycle CPU";
/// Cycles whose processors' time is taken together, because the kernel counts it in steps of 10 ms.
const CYCLES: usize = 50;

/// Times each beside as many sandboxes as `few` and `many` say, and compares them.
pub async fn run(
    node: &Node,
    counts: (usize, usize),
    rounds: usize,
    report: &mut Report,
) -> Result<(), String> {
    let mut standing = Vec::new();
    let measured = measure(node, counts, rounds, &mut standing, report).await;
    // Also if measuring failed, because nothing else ends them.
    for id in standing {
        node.client.delete(&id).await.map_err(|e| e.to_string())?;
    }
    measured
}

async fn measure(
    node: &Node,
    (few, many): (usize, usize),
    rounds: usize,
    standing: &mut Vec<String>,
    report: &mut Report,
) -> Result<(), String> {
    for count in [few, many] {
        grow(node, standing, count).await?;
        for round in 0..=rounds {
            // The first warms up.
            let mut discarded = Report::new("warm-up");
            let report = if round == 0 { &mut discarded } else { &mut *report };
            beside(node, count, round, report).await?;
        }
        for _ in 0..rounds.div_ceil(10) {
            let used = cycle_cpu::of_one(node, CYCLES).await?;
            report.sample(&name(CPU, count), "ms", used);
        }
        eprintln!("bench-create: beside {count} sandboxes");
    }
    for what in TIMED.into_iter().chain([CPU]) {
        let ratio = format!("{}_at_{many}_over_{few}", what.to_lowercase().replace(' ', "_"));
        report.ratio(&ratio, &name(what, many), &name(what, few))?;
    }
    Ok(())
}

fn name(what: &str, beside: usize) -> String {
    format!("beside {beside} sandboxes: {what}")
}

/// One creation without a name and one with one, and the ends of both.
async fn beside(node: &Node, count: usize, round: usize, report: &mut Report) -> Result<(), String> {
    node.settle().await?;
    let [create, create_named, find, delete] = TIMED.map(|what| name(what, count));
    let called = format!("beside-{count}-{round}");
    let named = CreateSandbox {
        name: Some(called.clone()),
        ..node.request()
    };
    for (row, request) in [(create, node.request()), (create_named, named)] {
        let began = monotonic_ns();
        let made = node.client.create(&request).await.map_err(|e| e.to_string())?;
        report.sample(&row, "ms", us_since(began) / 1e3);
        if request.name.is_some() {
            let began = monotonic_ns();
            node.client.get(&called).await.map_err(|e| e.to_string())?;
            report.sample(&find, "ms", us_since(began) / 1e3);
        }
        let began = monotonic_ns();
        node.client
            .delete(&made.sandbox.id)
            .await
            .map_err(|e| e.to_string())?;
        report.sample(&delete, "ms", us_since(began) / 1e3);
    }
    Ok(())
}

/// Makes sandboxes that stand by until there are `count`.
async fn grow(node: &Node, standing: &mut Vec<String>, count: usize) -> Result<(), String> {
    while standing.len() < count {
        let mut making = JoinSet::new();
        for _ in (standing.len()..count).take(OVERLAP) {
            let (client, request) = (node.client.clone(), node.request());
            making.spawn(async move { client.create(&request).await });
        }
        for made in making.join_all().await {
            standing.push(made.map_err(|e| e.to_string())?.sandbox.id);
        }
    }
    Ok(())
}
