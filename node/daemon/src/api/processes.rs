//! The handlers for processes that outlive who started them: thawd lists them, passes on their output, input and signals.
//!
//! Invariant: the guest keeps the output, so a reader costs thawd one piece, and a new thawd finds every process again.

use std::sync::Arc;

use axum::Json;
use axum::body::{Body as Stream, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use thaw_protocol::agent::processes::ProcessInfo;
use thaw_protocol::api::{ExecEvent, Exit, KeptProcess, Problem, ProcessInput, ProcessList, ProcessSignal};
use tokio::sync::watch;
use utoipa::IntoParams;

use super::check;
use super::daemon::Daemon;
use super::exec::{event_line, piece};
use super::extract::{Body, Parameters};
use super::kept::{Processes, Said};
use super::problem::{ApiCode, Refusal};
use super::sandboxes::LINES;
use super::scope::Wanted;

/// Lists the processes that callers started in the sandbox's container. Ended ones are remembered for a while.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes", operation_id = "listProcesses", tag = "processes",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, description = "The processes, at most 200", body = ProcessList),
    (status = 404, description = "There is no such sandbox, or it has no container", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn list(State(daemon): State<Arc<Daemon>>, wanted: Wanted) -> Result<Json<ProcessList>, Refusal> {
    let processes = daemon.running(&wanted)?.processes().await?;
    let items = processes.list().await?.into_iter().map(kept_process).collect();
    Ok(Json(ProcessList { items }))
}

fn kept_process(info: ProcessInfo) -> KeptProcess {
    KeptProcess {
        id: info.exec_id,
        command: info.command,
        pid: (!info.ended).then_some(info.pid),
        keep: info.kept,
        exit_code: info.ended.then_some(info.exit_code),
    }
}

/// Which output is read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OutputParameters {
    /// The process's id.
    #[param(max_length = 128)]
    process: String,
    /// Bytes of output to skip, stdout and stderr together [default: 0].
    offset: Option<u64>,
}

/// Sends the output of a process that was started with `keep`, and its end.
///
/// Any number of callers may read it, at any time. The guest keeps the last 256 KiB: if a piece begins behind the end of the one before,
/// what is between them is lost.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes/output", operation_id = "readProcessOutput", tag = "processes",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), OutputParameters), responses(
    (status = 200, description = "One ExecEvent per line, until the process has ended", body = ExecEvent, content_type = "application/x-ndjson"),
    (status = 404, description = "There is no such sandbox, container or process", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the process was started without `keep`", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn output(
    State(daemon): State<Arc<Daemon>>,
    uri: Uri,
    wanted: Wanted,
    Parameters(asked): Parameters<OutputParameters>,
) -> Result<Response, Refusal> {
    let processes = daemon.running(&wanted)?.processes().await?;
    let list = processes.list().await?;
    match list.iter().find(|info| info.exec_id == asked.process) {
        Some(info) if info.kept => {}
        Some(_) => {
            return Err(Refusal::new(
                ApiCode::ProcessRefused,
                "the process was started without keep",
            ));
        }
        None => return Err(Refusal::new(ApiCode::NoProcess, &asked.process)),
    }
    let reading = Reading {
        processes,
        id: asked.process,
        at: asked.offset.unwrap_or(0),
        over: false,
        closing: daemon.closing(),
        instance: uri.path().to_owned(),
    };
    let lines = futures_util::stream::unfold(reading, async |mut reading| {
        let line = reading.next().await?;
        Some((Ok::<_, std::convert::Infallible>(line), reading))
    });
    Ok(([(header::CONTENT_TYPE, LINES)], Stream::from_stream(lines)).into_response())
}

/// The position of one reader.
struct Reading {
    processes: Arc<dyn Processes>,
    id: String,
    at: u64,
    over: bool,
    closing: watch::Receiver<bool>,
    instance: String,
}

impl Reading {
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        let said = tokio::select! {
            said = self.processes.output(&self.id, self.at) => said,
            _ = self.closing.wait_for(|closing| *closing) => {
                Err(Refusal::new(ApiCode::Ending, "the process goes on"))
            }
        };
        let event = match said {
            Ok(Said::Wrote {
                offset,
                is_stderr,
                data,
            }) => {
                self.at = offset + data.len() as u64;
                let mut piece = piece(data);
                piece.offset = Some(offset);
                match is_stderr {
                    true => ExecEvent::Stderr(piece),
                    false => ExecEvent::Stdout(piece),
                }
            }
            Ok(Said::Ended(exit_code)) => ExecEvent::Exit(Exit { exit_code }),
            Err(refusal) => ExecEvent::Error(refusal.in_stream(self.instance.clone())),
        };
        self.over = matches!(event, ExecEvent::Exit(_) | ExecEvent::Error(_));
        Some(event_line(&event))
    }
}

/// Writes to the input of a process, and closes it with `eof`. Answers when the process's pipe or terminal has the data.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes/input", operation_id = "writeProcessInput", tag = "processes", request_body = ProcessInput,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "It is written"),
    (status = 404, description = "There is no such sandbox, container or process", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the input is closed", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn input(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(request): Body<ProcessInput>,
) -> Result<StatusCode, Refusal> {
    let data = check::bytes(
        "data",
        request.data.as_deref().unwrap_or_default(),
        request.encoding,
    )?;
    let processes = daemon.running(&wanted)?.processes().await?;
    if !data.is_empty() {
        processes.write(&request.process, &data).await?;
    }
    if request.eof {
        processes.close_stdin(&request.process).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Sends a signal to a process.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes/signal", operation_id = "signalProcess", tag = "processes", request_body = ProcessSignal,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "It is sent"),
    (status = 404, description = "There is no such sandbox, container or process", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the process has ended", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn signal(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(request): Body<ProcessSignal>,
) -> Result<StatusCode, Refusal> {
    check::signal(request.signal)?;
    let processes = daemon.running(&wanted)?.processes().await?;
    processes.signal(&request.process, request.signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
#[path = "processes_test.rs"]
mod tests;
