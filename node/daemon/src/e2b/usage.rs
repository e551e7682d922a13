//! The handler for a sandbox's resource usage: one measurement, of now. thawd keeps none of the past.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use thaw_protocol::api::{Sandbox, Usage};

use super::extract::{Addressed, Query};
use super::failure::Failure;
use super::moment::{now_s, of_seconds};
use super::service::Service;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Wanted;

/// How long CPU time is counted for its rate.
const PERIOD: Duration = Duration::from_millis(100);

/// A measurement.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    timestamp: String,
    timestamp_unix: u64,
    cpu_count: u8,
    /// 100 is one CPU.
    cpu_used_pct: f64,
    /// Bytes.
    mem_used: u64,
    mem_total: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

/// `GET /sandboxes/{id}/metrics`.
pub async fn measure(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    query: Query,
) -> Result<Json<Vec<Measured>>, Failure> {
    query.only(&["start", "end"])?;
    let sandbox = service.living(&wanted)?;
    let now = now_s();
    let (start, end) = (query.number("start")?, query.number("end")?);
    if start.is_some_and(|start| start > now) || end.is_some_and(|end| end < now) {
        return Ok(Json(Vec::new()));
    }
    let before = read(&service, &wanted).await?;
    tokio::time::sleep(PERIOD).await;
    let after = read(&service, &wanted).await?;
    let disk_mib = service.notes(&sandbox).disk_mib.unwrap_or_default();
    Ok(Json(vec![measured(&sandbox, (before, after), disk_mib, now)]))
}

fn measured(sandbox: &Sandbox, (before, after): (Usage, Usage), disk_mib: u32, now: u64) -> Measured {
    let elapsed = after.at_ns.saturating_sub(before.at_ns).max(1);
    let used = after
        .cpu_ns
        .unwrap_or(0)
        .saturating_sub(before.cpu_ns.unwrap_or(0));
    Measured {
        timestamp: of_seconds(now),
        timestamp_unix: now,
        cpu_count: sandbox.cpus,
        cpu_used_pct: used as f64 * 100.0 / elapsed as f64,
        mem_used: after.memory_bytes.unwrap_or_default(),
        mem_total: u64::from(sandbox.memory_mib) << 20,
        mem_cache: 0,
        disk_used: 0,
        disk_total: u64::from(disk_mib) << 20,
    }
}

/// Reads the counters on a blocking thread, because the kernel collects them. It holds the machine, so a release waits for it.
async fn read(service: &Service, wanted: &Wanted) -> Result<Usage, Failure> {
    let (daemon, wanted) = (service.daemon.clone(), wanted.clone());
    let done = async move {
        let done = tokio::task::spawn_blocking(move || daemon.usage(&wanted)).await;
        Ok::<_, Refusal>(done.map_err(|e| Refusal::new(ApiCode::Broken, e))??)
    };
    Ok(service.daemon.finish(done).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_of_cpu_time_is_per_cpu() {
        let at = |at_ns, cpu_ns| Usage {
            at_ns,
            cpu_ns: Some(cpu_ns),
            ..Usage::default()
        };
        let sandbox = Sandbox {
            cpus: 2,
            memory_mib: 512,
            ..Sandbox::default()
        };
        let measured = measured(&sandbox, (at(1000, 50), at(2000, 1550)), 64, 0);
        assert_eq!(measured.cpu_used_pct, 150.0);
        assert_eq!((measured.mem_total, measured.disk_total), (512 << 20, 64 << 20));
    }
}
