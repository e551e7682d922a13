//! Whether a sandbox runs, its resource usage, and its environment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use thaw_protocol::api::Usage;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sys::lock::Lock;

use super::super::call::Call;
use super::super::failure::Failure;
use super::super::open_sandbox::OpenSandboxes;

/// The sandbox runs: requests for one that does not were answered before.
pub async fn health() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// The resource usage of a sandbox.
#[derive(Debug, Serialize)]
struct Metrics {
    /// Seconds since 1970.
    ts: u64,
    cpu_count: u8,
    /// Percent of one CPU since the last question; 0 at the first.
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
}

/// Its resource usage, as the host measures it.
pub async fn metrics(State(open): State<Arc<OpenSandboxes>>, request: Request) -> Response {
    answer(&open, request, async |call| {
        let machine = call.machine()?;
        let measure = move || {
            Ok::<_, Error>((
                machine.usage(),
                machine.record().vcpus,
                machine.record().memory_mib,
            ))
        };
        let (usage, vcpus, memory_mib) = blocking(measure).await?;
        Ok(Metrics {
            ts: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            cpu_count: vcpus,
            cpu_used_pct: cpu_percent(&call, &usage),
            mem_total: u64::from(memory_mib) << 20,
            mem_used: usage.memory_bytes.unwrap_or(0),
        })
    })
    .await
}

fn cpu_percent(call: &Call, usage: &Usage) -> f64 {
    let now = (usage.at_ns, usage.cpu_ns.unwrap_or(0));
    let Some(last) = call.sandbox.last_cpu.locked().replace(now) else {
        return 0.0;
    };
    let passed = now.0.saturating_sub(last.0).max(1) as f64;
    100.0 * now.1.saturating_sub(last.1) as f64 / passed
}

/// The environment that its processes start with: that of the container's first process, and the variables of the sandbox's creation.
pub async fn environment(State(open): State<Arc<OpenSandboxes>>, request: Request) -> Response {
    answer(&open, request, async |call| {
        let piece = call.files().await?.read("/proc/1/environ", 0, 0).await?;
        let entries = piece
            .data
            .split(|byte| *byte == 0)
            .filter(|entry| !entry.is_empty());
        let pairs = entries.map(|entry| {
            let text = String::from_utf8_lossy(entry).into_owned();
            match text.split_once('=') {
                Some((name, value)) => (name.to_owned(), value.to_owned()),
                None => (text, String::new()),
            }
        });
        let mut environment: BTreeMap<_, _> = pairs.collect();
        environment.extend(call.environment()?);
        Ok(environment)
    })
    .await
}

async fn answer<T: Serialize>(
    open: &OpenSandboxes,
    request: Request,
    work: impl AsyncFnOnce(Call) -> Result<T, Failure>,
) -> Response {
    let (parts, _) = request.into_parts();
    let answer = async { work(Call::of(open, &parts, None)?).await };
    match answer.await {
        Ok(answer) => Json(answer).into_response(),
        Err(failure) => failure.into_plain(),
    }
}
