//! Waiting until a container is ready, as its probe says; and what is written down of that for a later owner.
//!
//! Invariant: from before a container with a probe is started until it is ready, its sandbox's directory says that it is
//! waited for. Whoever asked is answered only afterwards, so a later owner that finds it so removes the sandbox.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::readiness::wait_ready_response::Outcome as Told;
use thaw_protocol::agent::readiness::{ExpectReadyRequest, HttpProbe, WaitReadyRequest};
use thaw_protocol::api::{Readiness, ReadinessProbe};

use crate::agent_client::AgentClient;
use crate::exit::{ExitCode, Failure};

/// The file in a sandbox's directory that says whether its container is ready; there is none where nobody asked.
const FILE: &str = "readiness";
const READY: &str = "ready";
/// How long the guest's agent may take beyond a probe's time to say that it is over: the guest may be paused.
const LATE: Duration = Duration::from_secs(10);

/// What became of a container that was to become ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ready,
    /// Its process ended before, with this.
    Exited(i32),
    /// The time is over; what was seen last.
    TimedOut(String),
}

/// Has a container that is made, but not started, expected to become ready.
///
/// # Errors
/// [`ExitCode::AgentFailed`]: the guest cannot tell.
pub async fn expect(agent: &AgentClient, container: &str, probe: &ReadinessProbe) -> Result<(), Failure> {
    let port = match (&probe.tcp, &probe.http) {
        (Some(tcp), None) => tcp.port,
        (None, Some(http)) => http.port,
        _ => {
            let what = "a readiness probe is exactly one of tcp and http";
            return Err(Failure::new(ExitCode::Runtime, what));
        }
    };
    let http = probe.http.as_ref().map(|http| HttpProbe {
        path: http.path.clone(),
        host: http.host.clone().unwrap_or_default(),
        ..Default::default()
    });
    let request = ExpectReadyRequest {
        container_id: container.into(),
        port: port.into(),
        http: http.map_or_else(MessageField::none, MessageField::some),
        period_ms: probe.period_ms,
        ..Default::default()
    };
    let failed = |e| Failure::new(ExitCode::AgentFailed, format!("cannot see what the container listens on: {e}"));
    agent.expect_ready(&request).await.map_err(failed)
}

/// Waits for what becomes of it, once it is started.
///
/// # Errors
/// [`ExitCode::GuestEnded`] when the guest ends first, [`ExitCode::AgentFailed`] when it does not say.
pub async fn wait(agent: &AgentClient, container: &str, probe: &ReadinessProbe) -> Result<Outcome, Failure> {
    let request = WaitReadyRequest {
        container_id: container.into(),
        timeout_ms: probe.timeout_s.saturating_mul(1000),
        ..Default::default()
    };
    let limit = Duration::from_secs(probe.timeout_s.into()) + LATE;
    let told = match tokio::time::timeout(limit, agent.wait_ready(&request)).await {
        Ok(Ok(told)) => told,
        Ok(Err(ttrpc::Error::RpcStatus(status))) => {
            let what = format!("nobody tells whether the container is ready: {}", status.message());
            return Err(Failure::new(ExitCode::AgentFailed, what));
        }
        Ok(Err(e)) => return Err(Failure::new(ExitCode::GuestEnded, format!("lost the guest: {e}"))),
        // A guest that stands still does not know the time.
        Err(_) => return Ok(Outcome::TimedOut("the guest does not answer".into())),
    };
    match told.outcome.enum_value() {
        Ok(Told::READY) => Ok(Outcome::Ready),
        Ok(Told::EXITED) => Ok(Outcome::Exited(told.exit_code)),
        Ok(Told::TIMED_OUT) => Ok(Outcome::TimedOut(told.seen)),
        other => {
            let what = format!("the guest's agent says of the container's readiness: {other:?}");
            Err(Failure::new(ExitCode::AgentFailed, what))
        }
    }
}

impl Outcome {
    /// Why it is not ready, if it is not.
    ///
    /// # Errors
    /// [`ExitCode::NotReady`].
    pub fn held(self, probe: &ReadinessProbe) -> Result<(), Failure> {
        let what = match self {
            Outcome::Ready => return Ok(()),
            Outcome::Exited(code) => format!("the container ended before it was ready: it exited with {code}"),
            Outcome::TimedOut(seen) => {
                format!("the container was not ready after {} s: {seen}", probe.timeout_s)
            }
        };
        Err(Failure::new(ExitCode::NotReady, what))
    }
}

/// Writes down that a container is waited for, or is ready.
pub fn note(directory: &Path, readiness: Readiness) -> Result<(), Failure> {
    let path = directory.join(FILE);
    let text = match readiness {
        Readiness::Ready => READY,
        Readiness::Waiting | Readiness::Failed => "waiting",
    };
    std::fs::write(&path, text).map_err(|e| Failure::system(format!("cannot write {}", path.display()), &e))
}

/// What was written down.
pub fn noted(directory: &Path) -> Option<Readiness> {
    match std::fs::read_to_string(directory.join(FILE)) {
        Ok(text) if text == READY => Some(Readiness::Ready),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        // Half written, or not to be read: nobody was told that it is ready.
        _ => Some(Readiness::Waiting),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_surely_ready_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        assert_eq!(noted(place), None);
        for readiness in [Readiness::Waiting, Readiness::Ready] {
            note(place, readiness).unwrap();
            assert_eq!(noted(place), Some(readiness));
        }
        for half in ["", "rea", "ready?"] {
            std::fs::write(place.join(FILE), half).unwrap();
            assert_eq!(noted(place), Some(Readiness::Waiting), "{half:?}");
        }
    }

    #[test]
    fn what_was_seen_last_is_said() {
        let probe: ReadinessProbe = serde_json::from_str(r#"{"tcp": {"port": 8080}}"#).unwrap();
        assert_eq!((probe.timeout_s, probe.period_ms), (30, 100));
        assert!(Outcome::Ready.held(&probe).is_ok());
        let late = Outcome::TimedOut("nothing listens on port 8080".into()).held(&probe).unwrap_err();
        assert_eq!(late.code, ExitCode::NotReady);
        assert_eq!(
            late.what,
            "the container was not ready after 30 s: nothing listens on port 8080"
        );
        let ended = Outcome::Exited(3).held(&probe).unwrap_err();
        assert!(ended.what.ends_with("it exited with 3"), "{}", ended.what);
    }
}
