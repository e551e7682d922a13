//! The handlers for a container's output: reads what is kept of it, and begins to keep it.

use std::sync::Arc;

use axum::body::{Body as Stream, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use thaw_protocol::api::{LogEvent, LogStream, Problem};
use thaw_sandbox::agent_client::Output;
use utoipa::{IntoParams, ToSchema};

use super::daemon::Daemon;
use super::exec::piece;
use super::extract::Parameters;
use super::problem::{ApiCode, Refusal};
use super::sandboxes::LINES;
use super::scope::Wanted;

mod log_time;
mod reader;

pub use log_time::{format_moment, parse_moment};
pub use reader::{LogReader, Selection};

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
    /// Send only output that arrived at or after this time: RFC 3339, or seconds since the Unix epoch with up to nine decimals.
    #[param(
        pattern = r"^[0-9]{1,10}(\.[0-9]{1,9})?$|^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?Z$"
    )]
    since: Option<String>,
    /// `1` or `true`: put the time of arrival before each line, RFC 3339 in UTC with nine decimals.
    #[param(pattern = "^(0|1|true|false)$")]
    timestamps: Option<String>,
    /// Send only this stream [default: both, in order of arrival].
    #[param(inline)]
    stream: Option<LogStream>,
    /// How to send it [default: `bytes`].
    #[param(inline)]
    format: Option<LogFormat>,
}

/// How output is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum LogFormat {
    /// The bytes alone.
    #[default]
    Bytes,
    /// One LogEvent per line, with the stream of each piece.
    Events,
}

impl LogParameters {
    fn selection(&self) -> Result<Selection, Refusal> {
        let since = self.since.as_deref().map(|text| {
            let what = "since is a time of RFC 3339, or seconds since the Unix epoch";
            parse_moment(text).ok_or_else(|| Refusal::new(ApiCode::BadParameter, what))
        });
        Ok(Selection {
            only: self.stream.map(|stream| match stream {
                LogStream::Stdout => Output::Stdout,
                LogStream::Stderr => Output::Stderr,
            }),
            follow: flag("follow", self.follow.as_deref())?,
            tail: self.tail,
            since: since.transpose()?.unwrap_or(0),
            timestamps: flag("timestamps", self.timestamps.as_deref())?,
        })
    }
}

fn flag(name: &str, value: Option<&str>) -> Result<bool, Refusal> {
    match value {
        Some("1" | "true") => Ok(true),
        None | Some("0" | "false") => Ok(false),
        Some(_) => Err(Refusal::new(ApiCode::BadParameter, format!("{name} is 1 or 0"))),
    }
}

/// Returns the output of the container's process: all of it, or at least its last 1 MiB.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", operation_id = "getContainerLogs", tag = "processes",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), LogParameters), responses(
    (status = 200, description = "The bytes as they were written, or with `format=events` one LogEvent per line", content(
        (Vec<u8> = "application/octet-stream"), (LogEvent = "application/x-ndjson"))),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, or its container's output is not kept", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn logs(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<LogParameters>,
) -> Result<Response, Refusal> {
    let selection = asked.selection()?;
    let journal = daemon.journal(&wanted).await?;
    let broken = |e| Refusal::new(ApiCode::Broken, format!("cannot read the output: {e}"));
    let reader = LogReader::open(journal, selection, daemon.closing()).await;
    let format = asked.format.unwrap_or_default();
    let pieces = futures_util::stream::unfold(reader.map_err(broken)?, move |mut reader| async move {
        let pieces = reader.next().await?;
        Some((pieces.map(|pieces| encoded(pieces, format)), reader))
    });
    let kind = match format {
        LogFormat::Bytes => "application/octet-stream",
        LogFormat::Events => LINES,
    };
    Ok(([(header::CONTENT_TYPE, kind)], Stream::from_stream(pieces)).into_response())
}

fn encoded(pieces: Vec<(Output, Vec<u8>)>, format: LogFormat) -> Bytes {
    let mut body = Vec::new();
    for (output, data) in pieces {
        match format {
            LogFormat::Bytes => body.extend(data),
            LogFormat::Events => {
                let event = LogEvent {
                    stream: match output {
                        Output::Stdout => LogStream::Stdout,
                        Output::Stderr => LogStream::Stderr,
                    },
                    piece: piece(data),
                };
                body.extend(serde_json::to_vec(&event).unwrap_or_default());
                body.push(b'\n');
            }
        }
    }
    body.into()
}

/// Keeps the output and the exit status of the container that the caller started over the sandbox's vsock socket.
///
/// From then on no other reader gets the output.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/monitor", operation_id = "monitorContainer", tag = "processes",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The output is kept"),
    (status = 404, description = "There is no such sandbox, or it has no container", body = Problem, content_type = "application/problem+json"),
))]
pub async fn monitor(State(daemon): State<Arc<Daemon>>, wanted: Wanted) -> Result<StatusCode, Refusal> {
    daemon.monitor(&wanted)?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
#[path = "logs_test.rs"]
mod tests;
