//! Waits until a container is ready by its probe, and records the wait for a later owner.
//!
//! Invariant: from before a container with a probe starts until it is ready, a note in its sandbox's directory records that a caller waits
//! for it. The caller gets its answer only afterwards, so a later owner that finds the note removes the sandbox.

use std::io;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::readiness::wait_ready_response::Outcome as Told;
use thaw_protocol::agent::readiness::{ExpectReadyRequest, HttpProbe, WaitReadyRequest};
use thaw_protocol::api::{
    MOST_PROBE_HOST, MOST_PROBE_PATH, READY_PERIOD_MS, READY_TIMEOUT_S, Readiness, ReadinessProbe,
};

use crate::agent_client::AgentClient;
use crate::error::{Error, ErrorKind};

/// File in a sandbox's directory that records whether its container is ready; missing without a probe.
pub(crate) const READINESS_FILE: &str = "readiness";
const READY: &str = "ready";
/// How long the agent may take beyond a probe's time limit to report that the limit has passed: the guest may be paused.
const LATE: Duration = Duration::from_secs(10);

/// Why a container did not become ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unready {
    /// Its process ended first, with this exit code.
    Exited(i32),
    /// The time limit passed; the probe's last result.
    TimedOut(String),
}

/// Checks that a probe is valid.
///
/// # Errors
/// What is invalid, in words.
pub fn check(probe: &ReadinessProbe) -> Result<(), String> {
    let port = match (&probe.tcp, &probe.http) {
        (Some(tcp), None) => tcp.port,
        (None, Some(http)) => {
            let word = |text: &str| text.bytes().all(|b| b.is_ascii_graphic());
            if !http.path.starts_with('/') || !word(&http.path) || http.path.len() > MOST_PROBE_PATH {
                return Err(format!(
                    "path begins with / and is of printable ASCII, at most {MOST_PROBE_PATH} characters"
                ));
            }
            let host = http.host.as_deref();
            if host.is_some_and(|host| host.is_empty() || !word(host) || host.len() > MOST_PROBE_HOST) {
                return Err(format!(
                    "host is of printable ASCII, 1 to {MOST_PROBE_HOST} characters"
                ));
            }
            http.port
        }
        _ => return Err("it has exactly one of tcp and http".into()),
    };
    if port == 0 {
        return Err("port is 0; it may be 1 to 65535".into());
    }
    let within = |name: &str, value: u32, range: RangeInclusive<u32>| match range.contains(&value) {
        true => Ok(()),
        false => Err(format!(
            "{name} is {value}; it may be {} to {}",
            range.start(),
            range.end()
        )),
    };
    within("timeout_s", probe.timeout_s, READY_TIMEOUT_S)?;
    within("period_ms", probe.period_ms, READY_PERIOD_MS)
}

/// Makes the agent watch for the readiness of a container that is created but not started.
///
/// # Errors
/// [`ErrorKind::AgentFailed`] if the agent refuses.
pub async fn expect(agent: &AgentClient, container: &str, probe: &ReadinessProbe) -> Result<(), Error> {
    let ports = [
        probe.tcp.as_ref().map(|tcp| tcp.port),
        probe.http.as_ref().map(|http| http.port),
    ];
    let port = ports.into_iter().flatten().next().unwrap_or(0);
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
    let failed = |e| {
        Error::new(
            ErrorKind::AgentFailed,
            format!("cannot see what the container listens on: {e}"),
        )
    };
    agent.expect_ready(&request).await.map_err(failed)
}

/// Waits until a started container is ready, or for the reason why it is not.
///
/// # Errors
/// [`ErrorKind::GuestEnded`] if the guest ends first, [`ErrorKind::AgentFailed`] if the agent fails.
pub async fn wait(
    agent: &AgentClient,
    container: &str,
    probe: &ReadinessProbe,
) -> Result<Result<(), Unready>, Error> {
    let request = WaitReadyRequest {
        container_id: container.into(),
        timeout_ms: probe.timeout_s.saturating_mul(1000),
        ..Default::default()
    };
    let limit = Duration::from_secs(probe.timeout_s.into()) + LATE;
    let told = match tokio::time::timeout(limit, agent.wait_ready(&request)).await {
        Ok(Ok(told)) => told,
        Ok(Err(ttrpc::Error::RpcStatus(status))) => {
            let what = format!(
                "nobody tells whether the container is ready: {}",
                status.message()
            );
            return Err(Error::new(ErrorKind::AgentFailed, what));
        }
        Ok(Err(e)) => return Err(Error::new(ErrorKind::GuestEnded, format!("lost the guest: {e}"))),
        // A paused guest does not know the time.
        Err(_) => return Ok(Err(Unready::TimedOut("the guest does not answer".into()))),
    };
    match told.outcome.enum_value() {
        Ok(Told::READY) => Ok(Ok(())),
        Ok(Told::EXITED) => Ok(Err(Unready::Exited(told.exit_code))),
        Ok(Told::TIMED_OUT) => Ok(Err(Unready::TimedOut(told.seen))),
        other => {
            let what = format!("the guest's agent says of the container's readiness: {other:?}");
            Err(Error::new(ErrorKind::AgentFailed, what))
        }
    }
}

impl Unready {
    /// The error for the caller: [`ErrorKind::NotReady`].
    pub fn failure(self, probe: &ReadinessProbe) -> Error {
        let what = match self {
            Unready::Exited(code) => {
                format!("the container ended before it was ready: it exited with {code}")
            }
            Unready::TimedOut(seen) => {
                format!("the container was not ready after {} s: {seen}", probe.timeout_s)
            }
        };
        Error::new(ErrorKind::NotReady, what)
    }
}

/// Records that a container is awaited, or is ready.
pub fn note(directory: &Path, readiness: Readiness) -> Result<(), Error> {
    let path = directory.join(READINESS_FILE);
    let text = match readiness {
        Readiness::Ready => READY,
        Readiness::Waiting | Readiness::Failed => "waiting",
    };
    std::fs::write(&path, text).map_err(|e| Error::system(format!("cannot write {}", path.display()), &e))
}

/// The recorded readiness; `None` without a probe.
pub fn noted(directory: &Path) -> Option<Readiness> {
    match std::fs::read_to_string(directory.join(READINESS_FILE)) {
        Ok(text) if text == READY => Some(Readiness::Ready),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        // The note is incomplete or unreadable: no caller got an answer.
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
            std::fs::write(place.join(READINESS_FILE), half).unwrap();
            assert_eq!(noted(place), Some(Readiness::Waiting), "{half:?}");
        }
    }

    #[test]
    fn a_probe_is_one_question_with_bounds() {
        let check = |text: &str| check(&serde_json::from_str(text).unwrap());
        for good in [
            r#"{"tcp":{"port":1}}"#,
            r#"{"tcp":{"port":65535},"timeout_s":3600,"period_ms":10}"#,
            r#"{"http":{"port":80}}"#,
            r#"{"http":{"port":80,"path":"/a?b=c%20d","host":"app.example:81"}}"#,
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, word) in [
            ("{}", "exactly one"),
            (r#"{"tcp":{"port":1},"http":{"port":1}}"#, "exactly one"),
            (r#"{"tcp":{"port":0}}"#, "port"),
            (r#"{"tcp":{"port":1},"timeout_s":0}"#, "timeout_s"),
            (r#"{"tcp":{"port":1},"timeout_s":3601}"#, "timeout_s"),
            (r#"{"tcp":{"port":1},"period_ms":9}"#, "period_ms"),
            (r#"{"http":{"port":80,"path":"a"}}"#, "path"),
            (r#"{"http":{"port":80,"path":"/a\r\nX: y"}}"#, "path"),
            (r#"{"http":{"port":80,"host":""}}"#, "host"),
            (r#"{"http":{"port":80,"host":"a b"}}"#, "host"),
        ] {
            let said = check(bad).unwrap_err();
            assert!(said.contains(word), "{bad}: {said}");
        }
    }

    #[test]
    fn what_was_seen_last_is_said() {
        let probe: ReadinessProbe = serde_json::from_str(r#"{"tcp": {"port": 8080}}"#).unwrap();
        assert_eq!((probe.timeout_s, probe.period_ms), (30, 100));
        let late = Unready::TimedOut("nothing listens on port 8080".into()).failure(&probe);
        assert_eq!(late.kind, ErrorKind::NotReady);
        assert_eq!(
            late.what,
            "the container was not ready after 30 s: nothing listens on port 8080"
        );
        let ended = Unready::Exited(3).failure(&probe);
        assert!(ended.what.ends_with("it exited with 3"), "{}", ended.what);
    }
}
