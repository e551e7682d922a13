//! The handler for a container's output.
//!
//! Invariant: a caller costs a position in the journal and one frame, however slow it is; it misses output that is overwritten meanwhile.

use std::sync::Arc;

use axum::body::{Body as Stream, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use thaw_protocol::api::Problem;
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::journal::{Extent, Frames, Journal};
use tokio::sync::watch;
use utoipa::{IntoParams, ToSchema};

use super::daemon::Daemon;
use super::extract::Parameters;
use super::problem::{ApiCode, Refusal};
use super::scope::Wanted;

/// What of the output is asked for.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LogParameters {
    /// `1` or `true`: also send later output, until the process ends.
    #[param(pattern = "^(0|1|true|false)$")]
    follow: Option<String>,
    /// Of the existing output, send only this number of last lines.
    tail: Option<u64>,
    /// Send only this stream [default: both, in order of arrival].
    #[param(inline)]
    stream: Option<StreamName>,
}

/// An output stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum StreamName {
    Stdout,
    Stderr,
}

/// Returns the output of the container's process: all of it, or at least its last 1 MiB.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", operation_id = "getContainerLogs", tag = "processes",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), LogParameters), responses(
    (status = 200, description = "The bytes as they were written", body = Vec<u8>, content_type = "application/octet-stream"),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, or thawd does not keep its container's output", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn logs(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<LogParameters>,
) -> Result<Response, Refusal> {
    let follow = match asked.follow.as_deref() {
        Some("1" | "true") => true,
        None | Some("0" | "false") => false,
        Some(_) => return Err(Refusal::new(ApiCode::BadParameter, "follow is 1 or 0")),
    };
    let journal = daemon.journal(&wanted)?;
    let only = asked.stream.map(|stream| match stream {
        StreamName::Stdout => Output::Stdout,
        StreamName::Stderr => Output::Stderr,
    });
    let mut reader = Reader::new(journal, only, follow, daemon.closing());
    if let Some(lines) = asked.tail {
        let broken = |e| Refusal::new(ApiCode::Broken, format!("cannot read the output: {e}"));
        reader.skip_to_last(lines).await.map_err(broken)?;
    }
    let pieces = futures_util::stream::unfold(reader, async |mut reader| {
        reader.next().await.map(|piece| (piece, reader))
    });
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((kind, Stream::from_stream(pieces)).into_response())
}

/// The position of one caller.
struct Reader {
    journal: Arc<Journal>,
    extent: watch::Receiver<Extent>,
    closing: watch::Receiver<bool>,
    only: Option<Output>,
    follow: bool,
    at: u64,
    /// Where to end: without following, the end of the journal at the request.
    end: u64,
    /// Lines to skip first.
    skip: u64,
}

impl Reader {
    fn new(
        journal: Arc<Journal>,
        only: Option<Output>,
        follow: bool,
        closing: watch::Receiver<bool>,
    ) -> Reader {
        let extent = journal.extent();
        let end = extent.borrow().end;
        Reader {
            journal,
            extent,
            closing,
            only,
            follow,
            at: 0,
            end,
            skip: 0,
        }
    }

    async fn frames(&self) -> std::io::Result<Frames> {
        let (journal, at) = (self.journal.clone(), self.at);
        tokio::task::spawn_blocking(move || journal.read(at)).await?
    }

    fn wants(&self, output: Output) -> bool {
        self.only.is_none_or(|only| only == output)
    }

    /// Skips everything before the last `lines` lines.
    async fn skip_to_last(&mut self, lines: u64) -> std::io::Result<()> {
        let (mut all, mut open, mut first) = (0, false, None);
        while self.at < self.end {
            let read = self.frames().await?;
            if read.frames.is_empty() {
                break;
            }
            self.at = read.next;
            first.get_or_insert(read.start);
            for (_, data) in read.frames.iter().filter(|(output, _)| self.wants(*output)) {
                all += newlines(data);
                open = data.last() != Some(&b'\n');
            }
        }
        // Text after the last newline counts as a line.
        (self.at, self.skip) = (first.unwrap_or(0), (all + u64::from(open)).saturating_sub(lines));
        Ok(())
    }

    /// The next piece; `None` at the end.
    async fn next(&mut self) -> Option<std::io::Result<Bytes>> {
        loop {
            let extent = *self.extent.borrow_and_update();
            let end = if self.follow { extent.end } else { self.end };
            if self.at >= end {
                if !self.follow || extent.over || *self.closing.borrow() {
                    return None;
                }
                tokio::select! {
                    _ = self.extent.changed() => {}
                    _ = self.closing.changed() => {}
                }
                continue;
            }
            let read = match self.frames().await {
                Ok(read) if read.frames.is_empty() => return None,
                Ok(read) => read,
                Err(e) => return Some(Err(e)),
            };
            if read.start > self.at && self.at > 0 {
                // The lines to skip were overwritten.
                self.skip = 0;
            }
            self.at = read.next;
            let mut piece = Vec::new();
            for (output, data) in read.frames {
                if self.wants(output) {
                    piece.extend_from_slice(leave_out(&data, &mut self.skip));
                }
            }
            if !piece.is_empty() {
                return Some(Ok(piece.into()));
            }
        }
    }
}

fn newlines(data: &[u8]) -> u64 {
    data.iter().filter(|b| **b == b'\n').count() as u64
}

/// The rest of a text after `lines` lines. Subtracts the skipped lines from `lines`.
fn leave_out<'a>(mut data: &'a [u8], lines: &mut u64) -> &'a [u8] {
    while *lines > 0 {
        let Some(at) = data.iter().position(|b| *b == b'\n') else {
            return &[];
        };
        data = &data[at + 1..];
        *lines -= 1;
    }
    data
}

#[cfg(test)]
#[path = "logs_test.rs"]
mod tests;
