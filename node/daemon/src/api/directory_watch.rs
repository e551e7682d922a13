//! The handler that watches a directory of a sandbox's container.
//!
//! Invariants: the watch has begun when the answer does, so nothing that happens after the answer's head is missed; events wait in the
//! guest, and thawd holds the guest's next answer at most, however slowly the caller reads; a caller that leaves ends the watch.

use std::sync::Arc;

use axum::body::{Body as Stream, Bytes};
use axum::extract::State;
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use thaw_protocol::agent::files::file_event::Kind;
use thaw_protocol::agent::files::{FileEvent as GuestEvent, NextEventsResponse};
use thaw_protocol::api::{ChangedFile, FileEvent, Problem, WatchEnd};
use tokio::sync::watch::Receiver;
use utoipa::IntoParams;

use super::check;
use super::daemon::Daemon;
use super::exec::piece;
use super::extract::Parameters;
use super::open_watch::OpenWatch;
use super::problem::{ApiCode, Refusal};
use super::sandboxes::LINES;
use super::scope::Wanted;

/// Which directory is watched.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WatchParameters {
    /// Absolute path in the container, without `..`.
    #[param(max_length = 1024, pattern = r"^/[^\x00]*$")]
    path: String,
    /// Also watch the directories below it, at most 4096, and those that appear later [default: false].
    recursive: Option<bool>,
}

/// Watches a directory of the sandbox's container, and sends what happens in it, for as long as the caller listens.
///
/// The watch has begun when the answer begins. Events wait in the guest until the caller reads them; if they are too many, `OVERFLOW` says
/// where some were lost.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/watch", operation_id = "watchDirectory", tag = "files",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), WatchParameters), responses(
    (status = 200, description = "One FileEvent per line", body = FileEvent, content_type = "application/x-ndjson"),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, container or directory", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, the directory has too many below it, or 16 watches of the sandbox are open already", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn watch(
    State(daemon): State<Arc<Daemon>>,
    uri: Uri,
    wanted: Wanted,
    Parameters(asked): Parameters<WatchParameters>,
) -> Result<Response, Refusal> {
    check::directory(&asked.path)?;
    let files = daemon.running(&wanted)?.files().await?;
    let watching = Watching {
        watch: OpenWatch::begin(files, asked.path, asked.recursive.unwrap_or(false)).await?,
        is_over: false,
        closing: daemon.closing(),
        instance: uri.path().to_owned(),
    };
    let lines = futures_util::stream::unfold(watching, async |mut watching| {
        let lines = watching.next().await?;
        Some((Ok::<_, std::convert::Infallible>(lines), watching))
    });
    Ok(([(header::CONTENT_TYPE, LINES)], Stream::from_stream(lines)).into_response())
}

/// The watch of one caller. Dropping it ends the watch.
struct Watching {
    watch: OpenWatch,
    /// The caller got the last line.
    is_over: bool,
    closing: Receiver<bool>,
    instance: String,
}

impl Watching {
    /// The next lines; `None` after the last.
    async fn next(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        let answer = tokio::select! {
            answer = self.watch.next() => answer,
            _ = self.closing.wait_for(|closing| *closing) => {
                Err(Refusal::new(ApiCode::Ending, "the directory is no longer watched"))
            }
        };
        let events = match answer {
            Ok(answer) => {
                self.is_over = !answer.ended.is_empty();
                file_events(answer)
            }
            Err(refusal) => {
                self.is_over = true;
                vec![FileEvent::Error(refusal.in_stream(self.instance.clone()))]
            }
        };
        Some(lines(&events))
    }
}

/// The events of a guest's answer, at least one. Any answer of a guest has some.
fn file_events(answer: NextEventsResponse) -> Vec<FileEvent> {
    let mut events: Vec<FileEvent> = answer.events.into_iter().filter_map(event).collect();
    if !answer.ended.is_empty() {
        events.push(FileEvent::End(WatchEnd { reason: answer.ended }));
    } else if events.is_empty() {
        events.push(FileEvent::Keepalive);
    }
    events
}

/// `None` for a kind that this version does not know.
fn event(of_guest: GuestEvent) -> Option<FileEvent> {
    let kind = of_guest.kind.enum_value().ok()?;
    if kind == Kind::OVERFLOW {
        return Some(FileEvent::Overflow);
    }
    let name = piece(of_guest.name);
    let file = ChangedFile {
        name: name.data,
        encoding: name.encoding,
    };
    match kind {
        Kind::CREATE => Some(FileEvent::Create(file)),
        Kind::WRITE => Some(FileEvent::Write(file)),
        Kind::REMOVE => Some(FileEvent::Remove(file)),
        Kind::RENAME => Some(FileEvent::Rename(file)),
        Kind::CHMOD => Some(FileEvent::Chmod(file)),
        Kind::UNKNOWN | Kind::OVERFLOW => None,
    }
}

fn lines(events: &[FileEvent]) -> Bytes {
    let mut lines = Vec::new();
    for event in events {
        lines.extend(serde_json::to_vec(event).expect("strings and numbers are JSON"));
        lines.push(b'\n');
    }
    lines.into()
}

#[cfg(test)]
#[path = "directory_watch_test.rs"]
mod tests;
