//! A client of the API at thawd's unix socket.

use std::path::{Path, PathBuf};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use serde::de::DeserializeOwned;
use thaw_pools::vmm;
use thaw_protocol::api::{
    ChangeSandbox, ChangeSnapshot, ContainerExit, CreateSandbox, CreatedSandbox, Drain, FreezeSandbox,
    FrozenSandbox, Health, MAX_BODY, NetworkPolicy, NodeUsage, PauseSandbox, Problem, PullSnapshot,
    PushSnapshot, PushedSnapshot, Sandbox, SandboxList, SignalContainer, Snapshot, SnapshotList,
    StopContainer, ThawSandbox, VerifiedSnapshot,
};
use thaw_sandbox::error::{Error, ErrorKind};

use super::daemon::Keep;
use super::logs::{Selection, format_moment};

mod changes;
mod connection;
mod lines;
mod logs;

pub use changes::Changes;
pub use logs::Logs;

use connection::{Connection, Connections};

/// Sandboxes in one page of a list, so that an answer has at most [`MAX_ANSWER`] bytes.
const PIECE: usize = 16;
/// Stored snapshots in one page of a list: they are described briefly.
const SNAPSHOTS_PIECE: usize = 512;
/// Largest answer that is read, bytes: some sandboxes, each with its command.
const MAX_ANSWER: usize = 32 * MAX_BODY;

/// A client of a thawd, or of a `thaw run` that owns its sandbox.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    connections: Connections,
}

impl Client {
    /// A client of the process that listens at a socket, if there is one.
    pub fn connect(socket: &Path) -> Option<Client> {
        vmm::is_served(socket).then(|| Client {
            socket: socket.to_owned(),
            connections: Connections::default(),
        })
    }

    /// Checks that it answers.
    pub async fn health(&self) -> Result<Health, Error> {
        self.ask(Method::GET, "/v1/health", None).await
    }

    /// The resource usage of its sandboxes and pools.
    pub async fn usage(&self) -> Result<NodeUsage, Error> {
        self.ask(Method::GET, "/v1/node/usage", None).await
    }

    /// Drains it: it refuses creations; this waits until none is under way.
    pub async fn drain(&self) -> Result<Drain, Error> {
        self.ask(Method::POST, "/v1/node/drain", None).await
    }

    /// Lets it create sandboxes again.
    pub async fn undrain(&self) -> Result<Drain, Error> {
        self.ask(Method::DELETE, "/v1/node/drain", None).await
    }

    /// Creates a sandbox.
    pub async fn create(&self, request: &CreateSandbox) -> Result<CreatedSandbox, Error> {
        let body = serde_json::to_vec(request).map_err(|e| self.broken(&e))?;
        self.ask(Method::POST, "/v1/sandboxes", Some(body)).await
    }

    /// All sandboxes, as they were at one moment.
    pub async fn list(&self) -> Result<Vec<Sandbox>, Error> {
        let parts = |list: SandboxList| (list.items, list.continue_token);
        self.pages(&format!("/v1/sandboxes?limit={PIECE}"), parts).await
    }

    /// One sandbox, by id or name.
    pub async fn get(&self, id: &str) -> Result<Sandbox, Error> {
        self.ask(Method::GET, &format!("/v1/sandboxes/{}", escape(id)), None)
            .await
    }

    /// Deletes a sandbox.
    pub async fn delete(&self, id: &str) -> Result<(), Error> {
        self.exchange(Method::DELETE, &format!("/v1/sandboxes/{}", escape(id)), None)
            .await
            .map(drop)
    }

    /// Deletes a sandbox, except that the records that `keep` names stay listed.
    pub async fn delete_keeping(&self, id: &str, keep: Keep) -> Result<(), Error> {
        let mut path = format!("/v1/sandboxes/{}?", escape(id));
        for (name, is_kept) in [("failed", keep.failed), ("exited", keep.exited)] {
            if is_kept {
                path.push_str(&format!("{name}=keep&"));
            }
        }
        let path = path.trim_end_matches(['?', '&']);
        self.exchange(Method::DELETE, path, None).await.map(drop)
    }

    /// Lets the owner keep the output and the exit status of the container that this process started.
    pub async fn monitor(&self, id: &str) -> Result<(), Error> {
        let path = format!("/v1/sandboxes/{}/monitor", escape(id));
        self.exchange(Method::POST, &path, None).await.map(drop)
    }

    /// The kept output of a sandbox's container.
    pub async fn logs(&self, id: &str, selection: &Selection) -> Result<Logs, Error> {
        let mut path = format!("/v1/sandboxes/{}/logs?format=events", escape(id));
        if selection.follow {
            path.push_str("&follow=1");
        }
        if selection.timestamps {
            path.push_str("&timestamps=1");
        }
        if let Some(lines) = selection.tail {
            path.push_str(&format!("&tail={lines}"));
        }
        if selection.since > 0 {
            path.push_str(&format!("&since={}", format_moment(selection.since)));
        }
        let (body, connection) = self.stream(&path).await?;
        Ok(Logs::new(body, connection))
    }

    /// The changes of sandboxes from now on, or from a time on, in nanoseconds since the Unix epoch.
    pub async fn changes(&self, since: Option<u64>) -> Result<Changes, Error> {
        let mut path = "/v1/sandboxes?watch=1".to_owned();
        if let Some(since) = since {
            path.push_str(&format!("&since={}", format_moment(since)));
        }
        let (body, connection) = self.stream(&path).await?;
        Ok(Changes::new(body, connection))
    }

    /// An answer that arrives in pieces.
    async fn stream(&self, path: &str) -> Result<(Incoming, Connection), Error> {
        let (response, mut connection) = self.send(Method::GET, path, None).await?;
        let status = response.status();
        if status.is_success() {
            return Ok((response.into_body(), connection));
        }
        let body = self.whole(response, &mut connection).await?;
        Err(self.failure(status, &body))
    }

    /// Stops a sandbox's CPUs.
    pub async fn pause(&self, id: &str) -> Result<(), Error> {
        self.pause_as(id, &PauseSandbox::default()).await
    }

    /// Pauses a sandbox, with its memory kept or released.
    pub async fn pause_as(&self, id: &str, how: &PauseSandbox) -> Result<(), Error> {
        let body = serde_json::to_vec(how).map_err(|e| self.broken(&e))?;
        let path = format!("/v1/sandboxes/{}/pause", escape(id));
        self.exchange(Method::POST, &path, Some(body)).await.map(drop)
    }

    /// Lets a paused sandbox run again.
    pub async fn resume(&self, id: &str) -> Result<(), Error> {
        let path = format!("/v1/sandboxes/{}/resume", escape(id));
        self.exchange(Method::POST, &path, None).await.map(drop)
    }

    /// Sends a signal to the process of a sandbox's container.
    pub async fn signal(&self, id: &str, signal: u8) -> Result<(), Error> {
        let body = serde_json::to_vec(&SignalContainer { signal }).map_err(|e| self.broken(&e))?;
        let path = format!("/v1/sandboxes/{}/signal", escape(id));
        self.exchange(Method::POST, &path, Some(body)).await.map(drop)
    }

    /// Stops the process of a sandbox's container, and returns when it has ended.
    pub async fn stop(&self, id: &str, how: &StopContainer) -> Result<(), Error> {
        let body = serde_json::to_vec(how).map_err(|e| self.broken(&e))?;
        let path = format!("/v1/sandboxes/{}/stop", escape(id));
        self.exchange(Method::POST, &path, Some(body)).await.map(drop)
    }

    /// Stops the process of a sandbox's container and starts its program again.
    pub async fn restart(&self, id: &str, how: &StopContainer) -> Result<(), Error> {
        let body = serde_json::to_vec(how).map_err(|e| self.broken(&e))?;
        let path = format!("/v1/sandboxes/{}/restart", escape(id));
        self.exchange(Method::POST, &path, Some(body)).await.map(drop)
    }

    /// Waits until the container of a sandbox has ended and is not started again.
    pub async fn exit(&self, id: &str) -> Result<i32, Error> {
        let path = format!("/v1/sandboxes/{}/exit", escape(id));
        let exit: ContainerExit = self.ask(Method::GET, &path, None).await?;
        Ok(exit.exit_code)
    }

    /// Freezes a sandbox.
    pub async fn freeze(&self, id: &str, request: &FreezeSandbox) -> Result<FrozenSandbox, Error> {
        let body = serde_json::to_vec(request).map_err(|e| self.broken(&e))?;
        let path = format!("/v1/sandboxes/{}/freeze", escape(id));
        self.ask(Method::POST, &path, Some(body)).await
    }

    /// All stored snapshots.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>, Error> {
        let parts = |list: SnapshotList| (list.items, list.continue_token);
        self.pages(&format!("/v1/snapshots?limit={SNAPSHOTS_PIECE}"), parts)
            .await
    }

    /// One stored snapshot, by id, name, or the beginning of an id.
    pub async fn snapshot(&self, wanted: &str) -> Result<Snapshot, Error> {
        self.ask(Method::GET, &snapshot(wanted), None).await
    }

    /// Changes the name and the labels of a stored snapshot.
    pub async fn change_snapshot(&self, wanted: &str, change: &ChangeSnapshot) -> Result<Snapshot, Error> {
        let body = serde_json::to_vec(change).map_err(|e| self.broken(&e))?;
        self.ask(Method::PATCH, &snapshot(wanted), Some(body)).await
    }

    /// Compares every byte of a stored snapshot with its manifest.
    pub async fn verify_snapshot(&self, wanted: &str) -> Result<VerifiedSnapshot, Error> {
        let path = format!("{}/verify", snapshot(wanted));
        self.ask(Method::POST, &path, None).await
    }

    /// Pushes a stored snapshot to a registry.
    pub async fn push_snapshot(&self, wanted: &str, request: &PushSnapshot) -> Result<PushedSnapshot, Error> {
        let body = serde_json::to_vec(request).map_err(|e| self.broken(&e))?;
        let path = format!("{}/push", snapshot(wanted));
        self.ask(Method::POST, &path, Some(body)).await
    }

    /// Pulls a snapshot from a registry into the store.
    pub async fn pull_snapshot(&self, request: &PullSnapshot) -> Result<Snapshot, Error> {
        let body = serde_json::to_vec(request).map_err(|e| self.broken(&e))?;
        self.ask(Method::POST, "/v1/snapshots", Some(body)).await
    }

    /// Removes a stored snapshot.
    pub async fn remove_snapshot(&self, wanted: &str, force: bool) -> Result<(), Error> {
        let path = format!("{}?force={force}", snapshot(wanted));
        self.exchange(Method::DELETE, &path, None).await.map(drop)
    }

    /// Changes where a sandbox may connect to.
    pub async fn set_network_policy(&self, id: &str, policy: &NetworkPolicy) -> Result<Sandbox, Error> {
        let body = serde_json::to_vec(policy).map_err(|e| self.broken(&e))?;
        let path = format!("/v1/sandboxes/{}/network", escape(id));
        self.ask(Method::PATCH, &path, Some(body)).await
    }

    /// Changes a sandbox while it runs.
    pub async fn change(&self, id: &str, change: &ChangeSandbox) -> Result<Sandbox, Error> {
        let body = serde_json::to_vec(change).map_err(|e| self.broken(&e))?;
        let path = format!("/v1/sandboxes/{}", escape(id));
        self.ask(Method::PATCH, &path, Some(body)).await
    }

    /// Thaws a sandbox from a snapshot.
    pub async fn thaw(&self, request: &ThawSandbox) -> Result<CreatedSandbox, Error> {
        let body = serde_json::to_vec(request).map_err(|e| self.broken(&e))?;
        self.ask(Method::POST, "/v1/thaws", Some(body)).await
    }

    /// All items of a list. `parts` takes a page apart into its items and the token of the next page.
    async fn pages<L: DeserializeOwned, T>(
        &self,
        path: &str,
        parts: impl Fn(L) -> (Vec<T>, Option<String>),
    ) -> Result<Vec<T>, Error> {
        let mut all = Vec::new();
        let mut next = Some(path.to_owned());
        while let Some(page) = next {
            let (mut items, token) = parts(self.ask(Method::GET, &page, None).await?);
            all.append(&mut items);
            next = token.map(|token| format!("{path}&continue={}", escape(&token)));
        }
        Ok(all)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<T, Error> {
        let answer = self.exchange(method, path, body).await?;
        serde_json::from_slice(&answer).map_err(|e| self.broken(&e))
    }

    async fn exchange(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> Result<Bytes, Error> {
        let (response, mut connection) = self.send(method, path, body).await?;
        let status = response.status();
        let body = self.whole(response, &mut connection).await?;
        self.connections.keep(connection);
        match status.is_success() {
            true => Ok(body),
            false => Err(self.failure(status, &body)),
        }
    }

    async fn whole(&self, response: Response<Incoming>, connection: &mut Connection) -> Result<Bytes, Error> {
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect();
        let body = connection.receive(body).await.map_err(|e| self.broken(&e))?;
        Ok(body.to_bytes())
    }

    /// Sends a request. The rest of the answer comes over the connection.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(Response<Incoming>, Connection), Error> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "thawd")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|e| self.broken(&e))?;
        let sent = self.connections.send(&self.socket, request).await;
        sent.map_err(|e| self.broken(&e))
    }

    fn failure(&self, status: StatusCode, body: &[u8]) -> Error {
        let Ok(problem) = serde_json::from_slice::<Problem>(body) else {
            return self.broken(&format!("it answers {status}"));
        };
        let kind = ErrorKind::ALL
            .iter()
            .copied()
            .find(|c| c.slug() == problem.code)
            .unwrap_or(ErrorKind::Runtime);
        Error {
            context: problem.context,
            ..Error::new(kind, problem.detail).remedy(problem.remedy)
        }
    }

    fn broken(&self, error: &dyn std::fmt::Display) -> Error {
        Error::new(
            ErrorKind::DaemonUnreachable,
            format!("thawd at {}: {error}", self.socket.display()),
        )
    }
}

/// The path of a stored snapshot.
fn snapshot(wanted: &str) -> String {
    format!("/v1/snapshots/{}", escape(wanted))
}

/// A path segment, percent-encoded.
fn escape(segment: &str) -> String {
    segment
        .bytes()
        .map(|b| match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(b).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_stays_one_segment() {
        assert_eq!(escape("a-b_c.1"), "a-b_c.1");
        assert_eq!(escape("../x y"), "..%2Fx%20y");
    }

    #[test]
    fn an_error_keeps_its_code_and_its_remedy() {
        let client = Client {
            socket: "/s".into(),
            connections: Connections::default(),
        };
        let body =
            br#"{"type":"urn:thaw:problem:disk-full","title":"t","status":507,"detail":"no room; at all: /x",
            "instance":"/v1/sandboxes","code":"disk-full","remedy":"free space","exit":73,"context":["a"]}"#;
        let failure = client.failure(StatusCode::INSUFFICIENT_STORAGE, body);
        assert_eq!(failure.kind, ErrorKind::DiskFull);
        assert_eq!(failure.to_string(), "no room; at all: /x; free space");
        assert_eq!(failure.context, ["a"]);
        assert_eq!(
            client.failure(StatusCode::BAD_GATEWAY, b"x").kind,
            ErrorKind::DaemonUnreachable
        );
    }
}
