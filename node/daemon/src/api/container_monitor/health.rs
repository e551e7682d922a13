//! Checks a container's health: runs a command in it again and again.
//!
//! Invariants: one check runs at a time; of its output [`MOST_OUTPUT`] bytes are kept and the rest is read, so that it does not block; the
//! last [`RESULTS`] results are kept. A guest that does not answer, because it is paused, is not checked.

use std::path::Path;
use std::pin::pin;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::{Either, select};
use thaw_protocol::api::{ContainerHealth, HealthCheck, HealthResult, HealthStatus};
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client::{self, OUTPUT_LINGERS, Output};
use thaw_sandbox::container::{self, Options, Running};
use thaw_sandbox::error::Error;
use thaw_sys::lock::Lock;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::api::process::{GuestProcess, Process};

/// Results that are kept.
const RESULTS: usize = 5;
/// Bytes of a check's output that are kept.
const MOST_OUTPUT: usize = 4096;
/// Longest time between two checks during the start period.
const START_INTERVAL: Duration = Duration::from_secs(5);
/// The exit code of a check that did not end in time or could not be run.
const NO_EXIT: i32 = -1;

/// Checks the health of one container from its start on. Never completes.
pub(super) async fn check(vsock: &Path, running: &Running, shown: &watch::Sender<Option<ContainerHealth>>) {
    let Some(check) = &running.health else {
        return std::future::pending().await;
    };
    shown.send_modify(|health| {
        let log = health.take().map(|health| health.log).unwrap_or_default();
        *health = Some(ContainerHealth {
            log,
            ..ContainerHealth::default()
        });
    });
    let began = Instant::now();
    let start_period = Duration::from_millis(check.start_period_ms);
    loop {
        let is_starting = || began.elapsed() < start_period;
        let interval = Duration::from_millis(check.interval_ms);
        tokio::time::sleep(match is_starting() {
            true => interval.min(START_INTERVAL),
            false => interval,
        })
        .await;
        match run(vsock, running, check).await {
            Ok(result) => {
                let counts = !is_starting();
                shown.send_modify(|health| {
                    note(health.get_or_insert_default(), result, check.retries, counts)
                });
            }
            Err(e) => tracing::debug!("a container's health was not checked: {e}"),
        }
    }
}

/// Adds a result. A failure that does not count leaves the container starting.
fn note(health: &mut ContainerHealth, result: HealthResult, retries: u32, counts: bool) {
    match result.exit_code {
        0 => (health.status, health.failing_streak) = (HealthStatus::Healthy, 0),
        _ if counts || health.status != HealthStatus::Starting => {
            health.failing_streak = health.failing_streak.saturating_add(1);
            if health.failing_streak >= retries {
                health.status = HealthStatus::Unhealthy;
            }
        }
        _ => {}
    }
    if health.log.len() >= RESULTS {
        health.log.remove(0);
    }
    health.log.push(result);
}

/// Makes one check.
///
/// # Errors
/// The guest does not answer.
async fn run(vsock: &Path, running: &Running, check: &HealthCheck) -> Result<HealthResult, Error> {
    let agent = agent_client::connect(vsock, READY_LIMIT).await?;
    let options = Options {
        command: check.command.clone(),
        ..Options::default()
    };
    let start_ns = now();
    let limit = Duration::from_millis(check.timeout_ms);
    let ended = tokio::time::timeout(limit, async {
        let id = container::exec(&agent, running, &options).await?;
        Ok::<_, Error>(GuestProcess {
            agent: agent.clone(),
            id,
        })
    });
    let (exit_code, output) = match ended.await {
        Ok(Ok(process)) => outcome(&process, limit).await?,
        Ok(Err(e)) => (NO_EXIT, e.to_string()),
        Err(_) => (NO_EXIT, late(limit)),
    };
    Ok(HealthResult {
        start_ns,
        end_ns: now(),
        exit_code,
        output,
    })
}

/// The exit code of a check's process, and what it wrote. Kills a process that takes too long.
///
/// # Errors
/// The guest is lost.
async fn outcome(process: &dyn Process, limit: Duration) -> Result<(i32, String), Error> {
    let kept = Mutex::new(Vec::new());
    let read = async |output| {
        while let Some(data) = process.read(output).await {
            let mut kept = kept.locked();
            let room = MOST_OUTPUT.saturating_sub(kept.len());
            kept.extend_from_slice(&data[..data.len().min(room)]);
        }
    };
    let reading = pin!(async { tokio::join!(read(Output::Stdout), read(Output::Stderr)) });
    let ended = pin!(tokio::time::timeout(limit, process.wait()));
    let (status, rest) = match select(ended, reading).await {
        Either::Left((status, reading)) => (status, Some(reading)),
        Either::Right((_, ended)) => (ended.await, None),
    };
    let Ok(status) = status else {
        process.signal(libc::SIGKILL as u8).await;
        return Ok((NO_EXIT, late(limit)));
    };
    if let Some(rest) = rest {
        // Another process may hold the streams open.
        let _ = tokio::time::timeout(OUTPUT_LINGERS, rest).await;
    }
    let text = String::from_utf8_lossy(&kept.locked()).into_owned();
    Ok((status?, text))
}

fn late(limit: Duration) -> String {
    format!("the health check took longer than {limit:?}")
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::api::fake::{Counts, FakeProcess};

    fn result(exit_code: i32) -> HealthResult {
        HealthResult {
            start_ns: 1,
            end_ns: 2,
            exit_code,
            output: exit_code.to_string(),
        }
    }

    #[test]
    fn failures_in_a_row_make_it_unhealthy_and_a_success_healthy() {
        let mut health = ContainerHealth::default();
        let mut after = |code, counts| {
            note(&mut health, result(code), 2, counts);
            (health.status, health.failing_streak)
        };
        assert_eq!(after(1, false), (HealthStatus::Starting, 0), "start period");
        assert_eq!(after(1, true), (HealthStatus::Starting, 1));
        assert_eq!(after(0, true), (HealthStatus::Healthy, 0));
        assert_eq!(after(1, false), (HealthStatus::Healthy, 1), "it had started");
        assert_eq!(after(NO_EXIT, true), (HealthStatus::Unhealthy, 2));
        assert_eq!(after(0, true), (HealthStatus::Healthy, 0));
        let codes: Vec<i32> = health.log.iter().map(|result| result.exit_code).collect();
        assert_eq!(codes, [1, 0, 1, NO_EXIT, 0], "the last five");
    }

    #[tokio::test]
    async fn check_has_the_exit_code_and_the_first_output() {
        let process = FakeProcess::start("bytes", Arc::<Counts>::default());
        let (code, output) = outcome(&process, Duration::from_secs(5)).await.unwrap();
        assert_eq!(code, 3);
        assert!(
            output.contains("err") && output.len() <= 3 * MOST_OUTPUT,
            "{output:?}"
        );
    }
}
