//! Handlers for processes in a sandbox's container: run to the end, streamed, or over a WebSocket.
//!
//! Invariants: at most [`MOST_OUTPUT`] of each stream is held of output that is not streamed; a process ends with its caller's connection
//! or lease, unless it is to outlive it ([`super::processes`]).

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body as Stream, Bytes};
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use thaw_protocol::api::{
    Encoding, ExecEvent, ExecInput, ExecProcess, ExecResult, Exit, KeptProcess, Piece, Problem,
    STDERR_CHANNEL, STDOUT_CHANNEL,
};
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::container::Options;
use tokio::sync::mpsc;

use super::daemon::Daemon;
use super::extract::{BODY_LIMIT, Body};
use super::lease::{Expired, Lease};
use super::peer::Peer;
use super::problem::{ApiCode, Refusal};
use super::process::Process;
use super::request_gate::Permit;
use super::sandboxes::LINES;
use super::scope::Wanted;
use super::session::{Said, Session};
use super::{check, extract, lease, reserved};

/// Most bytes of each stream in an answer that is not streamed.
const MOST_OUTPUT: usize = 256 << 10;
/// Largest piece of input that is sent to the agent, bytes.
const INPUT_PIECE: usize = 64 << 10;
/// Largest WebSocket message of a caller, bytes.
const MAX_MESSAGE: usize = 256 << 10;
/// How often a caller is pinged, and the maximum silence allowed.
const ASKED: Duration = Duration::from_secs(30);
const SILENT: Duration = Duration::from_secs(90);
/// How long to wait for the caller's close frame.
const FAREWELL: Duration = Duration::from_secs(2);

/// Runs a process in a sandbox's container until it ends.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", operation_id = "execInContainer", tag = "processes", request_body = ExecProcess,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, description = "The result, or with `stream` one ExecEvent per line", content(
        (ExecResult = "application/json"), (ExecEvent = "application/x-ndjson"))),
    (status = 201, description = "With `keep`: the process runs", body = KeptProcess),
    (status = 404, description = "There is no such sandbox, or it has no container", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "There is no such command in the container, or the body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn run(
    State(daemon): State<Arc<Daemon>>,
    uri: Uri,
    wanted: Wanted,
    Extension(permit): Extension<Arc<Permit>>,
    Body(request): Body<ExecProcess>,
) -> Result<Response, Refusal> {
    let (options, stdin) = check::exec(&request)?;
    if request.keep {
        let stdin = request.stdin.is_some().then_some(stdin);
        let started = daemon.start_kept(&wanted, options, stdin).await?;
        return Ok((StatusCode::CREATED, Json(started)).into_response());
    }
    let mut session = daemon.exec(&wanted, options, permit).await?;
    if let Some(input) = session.input() {
        tokio::spawn(give(stdin, input));
    }
    if !request.stream {
        return Ok(Json(collect(session).await?).into_response());
    }
    let instance = uri.path().to_owned();
    let lines = futures_util::stream::unfold(Some(session), move |session| {
        let instance = instance.clone();
        async move {
            let mut session = session?;
            let event = exec_event(session.next().await, instance);
            let last = matches!(event, ExecEvent::Exit(_) | ExecEvent::Error(_));
            Some((
                Ok::<_, std::convert::Infallible>(event_line(&event)),
                (!last).then_some(session),
            ))
        }
    });
    Ok(([(header::CONTENT_TYPE, LINES)], Stream::from_stream(lines)).into_response())
}

/// Writes all input of a process. Ends with the session at the latest.
async fn give(stdin: Vec<u8>, input: mpsc::Sender<Vec<u8>>) {
    for piece in stdin.chunks(INPUT_PIECE) {
        if input.send(piece.to_vec()).await.is_err() {
            return;
        }
    }
}

async fn collect(mut session: Session) -> Result<ExecResult, Refusal> {
    let (mut stdout, mut stderr) = (Kept::default(), Kept::default());
    loop {
        match session.next().await.ok_or_else(ending)? {
            Said::Wrote(Output::Stdout, data) => stdout.keep(&data),
            Said::Wrote(Output::Stderr, data) => stderr.keep(&data),
            Said::Ended(status) => return Ok(result(status?, stdout, stderr)),
        }
    }
}

/// The first bytes of a stream.
#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
    more: bool,
}

impl Kept {
    fn keep(&mut self, data: &[u8]) {
        if self.more {
            return;
        }
        let room = MOST_OUTPUT - self.bytes.len();
        self.bytes.extend_from_slice(&data[..data.len().min(room)]);
        if data.len() > room {
            self.more = true;
            // Does not cut a character.
            if let Err(e) = std::str::from_utf8(&self.bytes)
                && e.error_len().is_none()
            {
                self.bytes.truncate(e.valid_up_to());
            }
        }
    }
}

fn result(exit_code: i32, stdout: Kept, stderr: Kept) -> ExecResult {
    let truncated = stdout.more || stderr.more;
    let texts = (String::from_utf8(stdout.bytes), String::from_utf8(stderr.bytes));
    let (stdout, stderr, encoding) = match texts {
        (Ok(stdout), Ok(stderr)) => (stdout, stderr, Encoding::Utf8),
        (stdout, stderr) => {
            let bytes = |text: Result<String, std::string::FromUtf8Error>| {
                STANDARD.encode(text.map_or_else(|e| e.into_bytes(), String::into_bytes))
            };
            (bytes(stdout), bytes(stderr), Encoding::Base64)
        }
    };
    ExecResult {
        exit_code,
        stdout,
        stderr,
        encoding,
        truncated,
    }
}

fn ending() -> Refusal {
    Refusal::new(ApiCode::Ending, "the process was ended with it")
}

/// The event as a line, for the request with this path.
fn exec_event(said: Option<Said>, instance: String) -> ExecEvent {
    match said {
        Some(Said::Wrote(Output::Stdout, data)) => ExecEvent::Stdout(piece(data)),
        Some(Said::Wrote(Output::Stderr, data)) => ExecEvent::Stderr(piece(data)),
        Some(Said::Ended(Ok(exit_code))) => ExecEvent::Exit(Exit { exit_code }),
        Some(Said::Ended(Err(failure))) => ExecEvent::Error(Refusal::from(failure).in_stream(instance)),
        None => ExecEvent::Error(ending().in_stream(instance)),
    }
}

/// A piece of output, as text if it is.
pub(super) fn piece(data: Vec<u8>) -> Piece {
    match String::from_utf8(data) {
        Ok(data) => Piece {
            data,
            encoding: Encoding::Utf8,
            offset: None,
        },
        Err(e) => Piece {
            data: STANDARD.encode(e.into_bytes()),
            encoding: Encoding::Base64,
            offset: None,
        },
    }
}

/// An event as one line.
pub fn event_line(event: &ExecEvent) -> Bytes {
    let mut line = json(event);
    line.push('\n');
    line.into()
}

fn json(event: &ExecEvent) -> String {
    serde_json::to_string(event).expect("numbers and strings are JSON")
}

/// Runs a process in a sandbox's container over a WebSocket.
///
/// The first message is an ExecProcess as text. After it, binary messages are the process's input, and each text message is an
/// ExecInput. thawd sends binary messages of output, whose first byte is 1 for stdout or 2 for stderr, and at the end one
/// ExecEvent as text.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/exec", operation_id = "openExecSession", tag = "processes",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 101, description = "A WebSocket"),
    (status = 403, description = "The request comes from a web page of another site", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running", body = Problem, content_type = "application/problem+json"),
    (status = 426, description = "The request is not a WebSocket handshake", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn open_session(
    State(daemon): State<Arc<Daemon>>,
    uri: Uri,
    wanted: Wanted,
    (Extension(peer), Extension(permit)): (Extension<Peer>, Extension<Arc<Permit>>),
    lease: Option<Extension<Arc<Lease>>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    same_site(&headers)?;
    let upgrade = upgrade.map_err(|e| Refusal::new(ApiCode::UpgradeRequired, e.body_text()))?;
    daemon.running(&wanted)?;
    let instance = uri.path().to_owned();
    let upgrade = upgrade.max_message_size(MAX_MESSAGE).max_frame_size(MAX_MESSAGE);
    let over = lease::expired(lease.map(|Extension(lease)| lease));
    Ok(upgrade.on_upgrade(async move |mut socket| {
        let mut over = Box::pin(over);
        let begin = async {
            match first(&mut socket, &peer).await? {
                Some(options) => daemon.exec(&wanted, options, permit).await.map(Some),
                None => Ok(None),
            }
        };
        let last = tokio::select! {
            begun = begin => match begun {
                Ok(Some(session)) => return converse(socket, session, instance, over).await,
                Ok(None) => return,
                Err(refusal) => event(&ExecEvent::Error(refusal.in_stream(instance))),
            },
            () = &mut over => dismissal(),
        };
        let (sender, receiver) = socket.split();
        part(sender, receiver, last).await;
    }))
}

/// Refuses requests that a browser sends on behalf of another site than this server's.
fn same_site(headers: &HeaderMap) -> Result<(), Refusal> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let authority = origin
        .to_str()
        .ok()
        .and_then(|o| o.split_once("://"))
        .map(|o| o.1);
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok());
    match authority.is_some() && authority == host {
        true => Ok(()),
        false => Err(Refusal::new(
            ApiCode::NotAllowed,
            "a page of another site asks for a WebSocket",
        )),
    }
}

/// Reads what to run. `None` if the caller disconnects.
async fn first(socket: &mut WebSocket, peer: &Peer) -> Result<Option<Options>, Refusal> {
    let message = async {
        loop {
            match socket.recv().await {
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                other => return other,
            }
        }
    };
    let late = |_| {
        let what = format!("no message came within {} s", BODY_LIMIT.as_secs());
        Refusal::new(ApiCode::TooSlow, what)
    };
    let text = match tokio::time::timeout(BODY_LIMIT, message).await.map_err(late)? {
        Some(Ok(Message::Text(text))) => text,
        Some(Ok(Message::Binary(_))) => {
            return Err(Refusal::new(
                ApiCode::Malformed,
                "the first message is text: what to run",
            ));
        }
        Some(Ok(_) | Err(_)) | None => return Ok(None),
    };
    let request: ExecProcess = extract::parse(text.as_bytes())?;
    reserved::check(peer, &request)?;
    if request.stdin.is_some() || request.stream || request.keep {
        let what = "over a WebSocket input comes in messages, all is streamed, and the process ends with its caller: leave out \
                    stdin, stream and keep";
        return Err(Refusal::new(ApiCode::Invalid, what));
    }
    check::exec(&request).map(|(options, _)| Some(options))
}

/// Passes messages until the process has ended, the caller has disconnected, or its lease has expired (`over`).
async fn converse(socket: WebSocket, mut session: Session, instance: String, over: impl Future<Output = ()>) {
    let (mut sender, mut receiver) = socket.split();
    let (process, input) = (session.process(), session.input());
    let last = tokio::select! {
        last = write(&mut sender, &mut session, instance.clone()) => last.map(|last| event(&last)),
        wrong = hear(&mut receiver, process.as_ref(), input) => {
            wrong.map(|refusal| event(&ExecEvent::Error(refusal.in_stream(instance))))
        }
        () = over => Some(dismissal()),
    };
    // Release the process first: a caller that sees its end may ask for another at once.
    drop(session);
    if let Some(last) = last {
        part(sender, receiver, last).await;
    }
}

fn event(event: &ExecEvent) -> Message {
    Message::Text(json(event).into())
}

/// The close frame for a caller whose lease has expired.
fn dismissal() -> Message {
    Message::Close(Some(CloseFrame {
        code: close_code::POLICY,
        reason: Expired.to_string().into(),
    }))
}

/// Sends the process's output to the caller. Returns the last message, or `None` if the caller has disconnected.
async fn write(
    sender: &mut SplitSink<WebSocket, Message>,
    session: &mut Session,
    instance: String,
) -> Option<ExecEvent> {
    let mut asks = tokio::time::interval(ASKED);
    loop {
        let message = tokio::select! {
            said = session.next() => match said {
                Some(Said::Wrote(Output::Stdout, data)) => channel(STDOUT_CHANNEL, &data),
                Some(Said::Wrote(Output::Stderr, data)) => channel(STDERR_CHANNEL, &data),
                last => return Some(exec_event(last, instance)),
            },
            _ = asks.tick() => Message::Ping(Bytes::new()),
        };
        sender.send(message).await.ok()?;
    }
}

fn channel(number: u8, data: &[u8]) -> Message {
    Message::Binary([&[number], data].concat().into())
}

/// Passes the caller's messages to the process. Returns if the caller disconnects, or with the error of an invalid message.
async fn hear(
    receiver: &mut SplitStream<WebSocket>,
    process: &dyn Process,
    mut input: Option<mpsc::Sender<Vec<u8>>>,
) -> Option<Refusal> {
    loop {
        let message = match tokio::time::timeout(SILENT, receiver.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(e))) => {
                tracing::debug!("a WebSocket broke: {e}");
                return None;
            }
            Ok(None) | Err(_) => return None,
        };
        match message {
            Message::Binary(data) => {
                // If the process reads no more, or ends, its output is still passed on.
                if let Some(input) = &input {
                    let _ = input.send(data.into()).await;
                }
            }
            Message::Text(text) => match instruction(&text) {
                Ok(ExecInput::Resize(size)) => process.resize(size.rows, size.columns).await,
                Ok(ExecInput::Signal(number)) => process.signal(number).await,
                Ok(ExecInput::Eof) => input = None,
                Err(refusal) => return Some(refusal),
            },
            Message::Close(_) => return None,
            Message::Ping(_) | Message::Pong(_) => {}
        }
    }
}

fn instruction(text: &Utf8Bytes) -> Result<ExecInput, Refusal> {
    let instruction = extract::parse(text.as_bytes())?;
    match instruction {
        ExecInput::Resize(size) => check::size(size)?,
        ExecInput::Signal(number) => check::signal(number)?,
        ExecInput::Eof => {}
    }
    Ok(instruction)
}

/// Sends the last message, and waits for the caller's close frame: if its bytes stayed unread, the kernel would discard ours.
async fn part(
    mut sender: SplitSink<WebSocket, Message>,
    mut receiver: SplitStream<WebSocket>,
    last: Message,
) {
    let farewell = async {
        if sender.send(last).await.is_ok() && sender.close().await.is_ok() {
            while let Some(Ok(_)) = receiver.next().await {}
        }
    };
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
}

#[cfg(test)]
#[path = "exec_test.rs"]
mod tests;
