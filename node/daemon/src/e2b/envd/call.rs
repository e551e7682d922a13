//! One call: the sandbox it is for, its user, and how long it may take.
//!
//! Invariant: a call holds no machine, only what reaches the guest, so a stream does not keep a machine that its owner releases.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::sync::watch;
use tokio::time::Instant;

use super::failure::Failure;
use super::open_sandbox::{OpenSandbox, OpenSandboxes};
use crate::api::daemon::Daemon;
use crate::api::files::Files;
use crate::api::kept::Processes;
use crate::api::machine::Machine;
use crate::api::scope::Wanted;
use crate::e2b::notes::Notes;

/// The header with the seconds after which a silent stream gets a keepalive message.
const KEEPALIVE: &str = "keepalive-ping-interval";
/// The same without that header.
const KEEPALIVE_S: u64 = 90;
/// The most that a caller may ask for.
const MOST_KEEPALIVE_S: u64 = 3600;
/// Longest user name, bytes.
const MAX_USER: usize = 253;

/// A call.
#[derive(Debug)]
pub struct Call {
    pub daemon: Arc<Daemon>,
    pub sandbox: Arc<OpenSandbox>,
    /// The user that the caller names, or else that of the sandbox's template.
    pub user: Option<String>,
    /// When the caller stops waiting.
    pub deadline: Option<Instant>,
    /// How long a stream may be silent.
    pub keepalive: Duration,
}

impl Call {
    /// The call of a request that was admitted.
    ///
    /// # Errors
    /// A header is invalid.
    pub fn of(open: &OpenSandboxes, parts: &Parts, timeout: Option<Duration>) -> Result<Call, Failure> {
        let sandbox = parts.extensions.get::<Arc<OpenSandbox>>().cloned();
        let sandbox = sandbox.ok_or_else(|| Failure::not_running("none", "the request was not admitted"))?;
        Ok(Call {
            daemon: open.daemon.clone(),
            user: user(&parts.headers)?.or_else(|| sandbox.context.user.clone()),
            sandbox,
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            keepalive: keepalive(&parts.headers)?,
        })
    }

    /// The machine of the sandbox.
    ///
    /// # Errors
    /// It does not run.
    pub fn machine(&self) -> Result<Arc<dyn Machine>, Failure> {
        let running = self.daemon.running(&Wanted::on_node(&self.sandbox.id));
        running.map_err(|why| Failure::not_running(&self.sandbox.id, why))
    }

    /// The variables of the sandbox's template, and over them those that it was created with, by name. One that was thawed from a snapshot
    /// has others in its container.
    ///
    /// # Errors
    /// It does not run.
    pub fn environment(&self) -> Result<BTreeMap<String, String>, Failure> {
        let machine = self.machine()?;
        let notes = Notes::of(&machine.record().terms);
        let mut variables = self.sandbox.context.env.clone();
        variables.extend(notes.map(|notes| notes.env).unwrap_or_default());
        Ok(variables)
    }

    /// The files of its container.
    ///
    /// # Errors
    /// It does not run, or has no container.
    pub async fn files(&self) -> Result<Arc<dyn Files>, Failure> {
        Ok(self.machine()?.files().await?)
    }

    /// The processes of its container.
    ///
    /// # Errors
    /// It does not run, or has no container.
    pub async fn processes(&self) -> Result<Arc<dyn Processes>, Failure> {
        Ok(self.machine()?.processes().await?)
    }

    /// The waits of a stream.
    pub fn patience(&self) -> Patience {
        Patience {
            deadline: self.deadline,
            keepalive: self.keepalive,
            closing: self.daemon.closing(),
        }
    }
}

/// What a stream waits for besides its events.
#[derive(Debug)]
pub struct Patience {
    deadline: Option<Instant>,
    keepalive: Duration,
    closing: watch::Receiver<bool>,
}

/// What happened first.
#[derive(Debug)]
pub enum Waited<T> {
    Event(T),
    /// Nothing, for so long that the caller must be told that the stream is alive.
    Silence,
    /// The stream is over.
    Over(Failure),
}

impl Patience {
    /// Waits for an event. After a silence, wait for the same `event` again: give a reference to it.
    pub async fn wait<T>(&mut self, event: impl Future<Output = T>) -> Waited<T> {
        let (deadline, keepalive) = (self.deadline, self.keepalive);
        let deadline = async move {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The deadline first: what it causes is not to be seen as an event.
            biased;
            () = deadline => Waited::Over(Failure::late()),
            _ = self.closing.wait_for(|closing| *closing) => Waited::Over(Failure::ending()),
            event = event => Waited::Event(event),
            () = tokio::time::sleep(keepalive) => Waited::Silence,
        }
    }
}

/// The user of `Authorization: Basic`, whose password is not used. Another kind of authorization names no user.
fn user(headers: &HeaderMap) -> Result<Option<String>, Failure> {
    let Some(text) = headers.get(header::AUTHORIZATION) else {
        return Ok(None);
    };
    let text = text.to_str().unwrap_or_default();
    let Some(encoded) = text.strip_prefix("Basic ") else {
        return Ok(None);
    };
    let decoded = STANDARD
        .decode(encoded.trim())
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let pair = decoded.ok_or_else(|| Failure::invalid("Authorization: Basic is not base64 of USER:"))?;
    user_name(pair.split(':').next().unwrap_or_default())
}

/// A user's name; `None` if it is empty.
///
/// # Errors
/// It cannot be a user's name.
pub fn user_name(name: &str) -> Result<Option<String>, Failure> {
    match name.len() <= MAX_USER && !name.chars().any(|c| c.is_control() || c == ':') {
        true => Ok((!name.is_empty()).then(|| name.to_owned())),
        false => Err(Failure::invalid(format!(
            "a user's name has at most {MAX_USER} bytes, and neither ':' nor control characters"
        ))),
    }
}

fn keepalive(headers: &HeaderMap) -> Result<Duration, Failure> {
    let Some(text) = headers.get(KEEPALIVE) else {
        return Ok(Duration::from_secs(KEEPALIVE_S));
    };
    let seconds = text
        .to_str()
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok());
    match seconds {
        Some(seconds @ 1..=MOST_KEEPALIVE_S) => Ok(Duration::from_secs(seconds)),
        _ => Err(Failure::invalid(format!(
            "Keepalive-Ping-Interval is 1 to {MOST_KEEPALIVE_S} seconds"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn basic_authorization_names_a_user() {
        let named = |value: &str| user(&with("authorization", value)).map_err(|failure| failure.code);
        assert_eq!(named("Basic dXNlcjo="), Ok(Some("user".into())));
        assert_eq!(named("Basic dXNlcjpwYXNz"), Ok(Some("user".into())));
        assert_eq!(named("Basic Og=="), Ok(None));
        assert_eq!(named("Bearer x"), Ok(None));
        assert!(named("Basic !").is_err() && named("Basic dQBzZXI6").is_err());
        assert_eq!(user(&HeaderMap::new()), Ok(None));
    }

    #[test]
    fn keepalives_have_bounds() {
        let asked = |value: &str| keepalive(&with("keepalive-ping-interval", value)).ok();
        assert_eq!(asked("50"), Some(Duration::from_secs(50)));
        for bad in ["0", "3601", "-1", "x", ""] {
            assert_eq!(asked(bad), None, "{bad}");
        }
        assert_eq!(keepalive(&HeaderMap::new()), Ok(Duration::from_secs(90)));
    }
}
