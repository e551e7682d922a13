//! The events of a process as a stream.

use std::collections::VecDeque;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use thaw_protocol::e2b::process::process_event::data_event::Output as Data;
use thaw_protocol::e2b::process::process_event::{DataEvent, EndEvent, Event, KeepAlive, StartEvent};
use thaw_protocol::e2b::process::{ConnectResponse, ProcessEvent, StartResponse};
use thaw_sandbox::agent_client::Output;

use super::super::call::{Patience, Waited};
use super::super::connect::outgoing::Outgoing;
use super::super::failure::Failure;
use super::super::relay::{self, Reader};

/// Most bytes of output of one event.
const PIECE: usize = 64 << 10;

/// An answer with an event.
pub trait OfEvent: Send + 'static {
    fn of(event: ProcessEvent) -> Self;
}

impl OfEvent for StartResponse {
    fn of(event: ProcessEvent) -> StartResponse {
        StartResponse { event: Some(event) }
    }
}

impl OfEvent for ConnectResponse {
    fn of(event: ProcessEvent) -> ConnectResponse {
        ConnectResponse { event: Some(event) }
    }
}

/// A reader, and its next event.
type Next = BoxFuture<'static, (Reader, relay::Event)>;

fn next(mut reader: Reader) -> Next {
    Box::pin(async move {
        let event = reader.next().await;
        (reader, event)
    })
}

/// A stream's position.
struct Stream {
    /// Kept while nothing happens, so that the guest is asked once for each event.
    next: Next,
    patience: Patience,
    has_terminal: bool,
    /// Events to send before the next one is read.
    ready: VecDeque<Event>,
    is_over: bool,
}

/// The events of a process: its start, its output, and its end.
pub fn stream<A: OfEvent>(pid: u32, reader: Reader, has_terminal: bool, patience: Patience) -> Outgoing<A> {
    let stream = Stream {
        next: next(reader),
        patience,
        has_terminal,
        ready: VecDeque::from([Event::Start(StartEvent { pid })]),
        is_over: false,
    };
    let answers = futures_util::stream::unfold(stream, async |mut stream| {
        let next = stream.next().await?;
        let answer = next.map(|event| A::of(ProcessEvent { event: Some(event) }));
        Some((answer, stream))
    });
    answers.boxed()
}

impl Stream {
    async fn next(&mut self) -> Option<Result<Event, Failure>> {
        if let Some(event) = self.ready.pop_front() {
            return Some(Ok(event));
        }
        if self.is_over {
            return None;
        }
        match self.patience.wait(&mut self.next).await {
            Waited::Silence => Some(Ok(Event::Keepalive(KeepAlive {}))),
            Waited::Over(failure) => self.fail(failure),
            Waited::Event((reader, relay::Event::Wrote(output, data))) => {
                self.next = next(reader);
                let pieces = data.chunks(PIECE).map(|piece| self.data(output, piece));
                self.ready = pieces.collect();
                self.ready.pop_front().map(Ok)
            }
            Waited::Event((_, relay::Event::Ended(Ok(code)))) => {
                self.is_over = true;
                Some(Ok(Event::End(end(code))))
            }
            Waited::Event((_, relay::Event::Ended(Err(failure)))) => self.fail(failure),
        }
    }

    fn fail(&mut self, failure: Failure) -> Option<Result<Event, Failure>> {
        self.is_over = true;
        Some(Err(failure))
    }

    fn data(&self, output: Output, piece: &[u8]) -> Event {
        let output = match output {
            _ if self.has_terminal => Data::Pty(piece.to_vec()),
            Output::Stdout => Data::Stdout(piece.to_vec()),
            Output::Stderr => Data::Stderr(piece.to_vec()),
        };
        Event::Data(DataEvent { output: Some(output) })
    }
}

fn end(code: i32) -> EndEvent {
    let status = format!("exit status {code}");
    EndEvent {
        exit_code: code,
        exited: true,
        error: (code != 0).then(|| status.clone()),
        status,
    }
}
