//! Waits until a container is ready, before the caller of its creation gets an answer.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use thaw_protocol::api::{Account, Readiness, ReadinessProbe};
use thaw_sandbox::Sandbox;
use thaw_sandbox::agent_client::{AgentClient, OUTPUT_LINGERS};
use thaw_sandbox::container::ready::{self, Unready};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::journal::Journal;
use thaw_sandbox::trace::Trace;

use super::container_monitor::ContainerMonitor;

/// Number of output lines that a failure contains, the number of last bytes searched for them, and the maximum length of a line.
const LINES: usize = 10;
const TAIL: u64 = 8 << 10;
const LONGEST_LINE: usize = 200;

/// Waits until a container is ready, and returns where the time went.
pub struct ReadinessWait(pub BoxFuture<'static, Result<Account, Error>>);

impl std::fmt::Debug for ReadinessWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReadinessWait")
    }
}

impl ReadinessWait {
    /// Begins to wait for a sandbox's container, which was started and is monitored.
    pub fn begin(
        sandbox: &Sandbox,
        monitor: &ContainerMonitor,
        agent: AgentClient,
        probe: ReadinessProbe,
        trace: &Trace,
    ) -> ReadinessWait {
        let (directory, end, trace) = (sandbox.directory(), sandbox.wait_end(), trace.clone());
        let (journal, mut exit) = (monitor.journal.clone(), monitor.exit.clone());
        let container = sandbox.record().id.clone();
        ReadinessWait(Box::pin(async move {
            let waited = {
                let _stage = trace.stage("ready");
                tokio::select! {
                    waited = ready::wait(&agent, &container, &probe) => waited?,
                    reason = end => return Err(Error::new(ErrorKind::GuestEnded, reason)),
                }
            };
            if let Err(unready) = waited {
                if let Unready::Exited(_) = unready {
                    // The last output may not have arrived yet.
                    let _ = tokio::time::timeout(OUTPUT_LINGERS, exit.wait_for(Option::is_some)).await;
                }
                return Err(with_output(unready.failure(&probe), journal).await);
            }
            ready::note(&directory, Readiness::Ready)?;
            Ok(trace.account())
        }))
    }
}

/// Adds the last lines that the container wrote to a failure.
async fn with_output(failure: Error, journal: Arc<Journal>) -> Error {
    let lines = tokio::task::spawn_blocking(move || last_lines(&journal)).await;
    Error {
        context: lines.unwrap_or_default(),
        ..failure
    }
}

/// The last lines of output. Unreadable lines are left out. Blocks.
fn last_lines(journal: &Journal) -> Vec<String> {
    let tail = journal.tail(TAIL).unwrap_or_default();
    let text = String::from_utf8_lossy(&tail);
    let shown = |line: &str| -> String {
        let plain = line.chars().map(|c| if c.is_control() { ' ' } else { c });
        plain.take(LONGEST_LINE).collect()
    };
    let lines: Vec<String> = text.lines().map(shown).collect();
    lines[lines.len().saturating_sub(LINES)..].to_vec()
}

#[cfg(test)]
mod tests {
    use thaw_sandbox::agent_client::Output;

    use super::*;

    #[test]
    fn the_last_lines_are_shown_however_much_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(directory.path()).unwrap();
        assert!(last_lines(&journal).is_empty());
        for n in 0..30_000 {
            journal
                .append(Output::Stdout, format!("line {n}\n").as_bytes())
                .unwrap();
        }
        journal.append(Output::Stderr, b"\x1b[31mbad\xff\n").unwrap();
        let lines = last_lines(&journal);
        assert_eq!((lines.len(), lines[0].as_str()), (LINES, "line 29991"));
        assert_eq!(lines[LINES - 1], " [31mbad\u{fffd}");
        journal.append(Output::Stdout, &[b'x'; 100_000]).unwrap();
        let lines = last_lines(&journal);
        assert_eq!((lines.len(), lines[0].len()), (1, LONGEST_LINE));
    }
}
