//! What happens in a directory: as a stream, or collected until a caller asks.

use std::collections::VecDeque;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use thaw_protocol::agent::files::file_event::Kind;
use thaw_protocol::agent::files::{FileEvent, NextEventsResponse};
use thaw_protocol::connect::Code;
use thaw_protocol::e2b::filesystem::watch_dir_response::{Event, KeepAlive, StartEvent};
use thaw_protocol::e2b::filesystem::{
    CreateWatcherRequest, CreateWatcherResponse, EventType, FilesystemEvent, GetWatcherEventsRequest,
    GetWatcherEventsResponse, RemoveWatcherRequest, RemoveWatcherResponse, WatchDirRequest, WatchDirResponse,
};

use super::super::call::{Call, Patience, Waited};
use super::super::connect::outgoing::Outgoing;
use super::super::failure::Failure;
use super::super::paths;
use super::super::watcher::Waiting;
use super::entry::Looker;
use crate::api::open_watch::OpenWatch;

/// A directory that is watched, and what is said of its events.
struct Watched {
    watch: OpenWatch,
    directory: String,
    /// With entries: looks at the files of events.
    looker: Option<Looker>,
}

impl Watched {
    async fn begin(
        call: &Call,
        path: &str,
        is_recursive: bool,
        include_entry: bool,
    ) -> Result<Watched, Failure> {
        let files = call.files().await?;
        let directory = paths::absolute(&files, call.user.as_deref(), path).await?;
        let looker = match include_entry {
            true => Some(Looker::new(files.clone()).await),
            false => None,
        };
        let watch = OpenWatch::begin(files, directory.clone(), is_recursive).await?;
        Ok(Watched {
            watch,
            directory,
            looker,
        })
    }

    /// The next events, and why there are no more of them.
    async fn next(&mut self) -> (Vec<FilesystemEvent>, Option<Failure>) {
        match self.watch.next().await {
            Ok(answer) => self.said(answer).await,
            Err(refusal) => (Vec::new(), Some(refusal.into())),
        }
    }

    async fn said(&self, answer: NextEventsResponse) -> (Vec<FilesystemEvent>, Option<Failure>) {
        let mut events = Vec::new();
        for event in answer.events {
            let kind = event.kind.enum_value_or_default();
            if kind == Kind::OVERFLOW {
                return (events, Some(overflow()));
            }
            if let Some(kind) = event_type(kind) {
                events.push(self.event(kind, event).await);
            }
        }
        let end = (!answer.ended.is_empty())
            .then(|| Failure::new(Code::NotFound, format!("the watch is over: {}", answer.ended)));
        (events, end)
    }

    async fn event(&self, kind: EventType, event: FileEvent) -> FilesystemEvent {
        let name = String::from_utf8_lossy(&event.name).into_owned();
        let is_there = !matches!(kind, EventType::Remove | EventType::Rename);
        let entry = match &self.looker {
            Some(looker) if is_there => {
                let path = match name.as_str() {
                    "." => self.directory.clone(),
                    name => paths::join(&self.directory, name),
                };
                looker.look(&path).await.ok()
            }
            _ => None,
        };
        FilesystemEvent {
            name,
            r#type: kind.into(),
            entry,
        }
    }
}

/// The protocol has no event for lost ones, so the watch ends.
fn overflow() -> Failure {
    Failure::new(
        Code::DataLoss,
        "there were more events than the guest holds, and some are lost; watch again and list the directory",
    )
}

fn event_type(kind: Kind) -> Option<EventType> {
    match kind {
        Kind::CREATE => Some(EventType::Create),
        Kind::WRITE => Some(EventType::Write),
        Kind::REMOVE => Some(EventType::Remove),
        Kind::RENAME => Some(EventType::Rename),
        Kind::CHMOD => Some(EventType::Chmod),
        Kind::UNKNOWN | Kind::OVERFLOW => None,
    }
}

/// Sends what happens in a directory, for as long as the caller listens.
pub async fn watch(call: Call, request: WatchDirRequest) -> Result<Outgoing<WatchDirResponse>, Failure> {
    let watched = Watched::begin(&call, &request.path, request.recursive, request.include_entry).await?;
    let stream = Stream {
        next: next(watched),
        patience: call.patience(),
        ready: VecDeque::from([Ok(Event::Start(StartEvent {}))]),
        is_over: false,
    };
    let answers = futures_util::stream::unfold(stream, async |mut stream| {
        let next = stream.next().await?;
        Some((next.map(|event| WatchDirResponse { event: Some(event) }), stream))
    });
    Ok(answers.boxed())
}

/// The watch, its next events, and why there are no more.
type Next = BoxFuture<'static, (Watched, Vec<FilesystemEvent>, Option<Failure>)>;

fn next(mut watched: Watched) -> Next {
    Box::pin(async move {
        let (events, end) = watched.next().await;
        (watched, events, end)
    })
}

/// The position of a caller in its watch.
struct Stream {
    /// Kept while nothing happens: if an answer is dropped, the guest has forgotten its events.
    next: Next,
    patience: Patience,
    ready: VecDeque<Result<Event, Failure>>,
    is_over: bool,
}

impl Stream {
    async fn next(&mut self) -> Option<Result<Event, Failure>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.is_over {
                return None;
            }
            match self.patience.wait(&mut self.next).await {
                Waited::Silence => return Some(Ok(Event::Keepalive(KeepAlive {}))),
                Waited::Over(failure) => self.end(failure),
                Waited::Event((watched, events, end)) => {
                    // The guest answers without events now and then, which also shows that the stream is alive.
                    if events.is_empty() && end.is_none() {
                        self.ready.push_back(Ok(Event::Keepalive(KeepAlive {})));
                    }
                    self.ready
                        .extend(events.into_iter().map(|event| Ok(Event::Filesystem(event))));
                    match end {
                        Some(failure) => self.end(failure),
                        None => self.next = next(watched),
                    }
                }
            }
        }
    }

    fn end(&mut self, failure: Failure) {
        self.ready.push_back(Err(failure));
        self.is_over = true;
    }
}

/// Begins a watch whose events the caller asks for.
pub async fn create(call: Call, request: CreateWatcherRequest) -> Result<CreateWatcherResponse, Failure> {
    let watched = Watched::begin(&call, &request.path, request.recursive, request.include_entry).await?;
    let closing = call.daemon.closing();
    let collect = |waiting: Arc<Waiting>| async move {
        let mut closing = closing;
        tokio::select! {
            () = gather(watched, &waiting) => {}
            _ = closing.wait_for(|closing| *closing) => {}
        }
    };
    let watcher_id = call.sandbox.watchers.add(collect)?;
    Ok(CreateWatcherResponse { watcher_id })
}

async fn gather(mut watched: Watched, waiting: &Waiting) {
    loop {
        let (events, end) = watched.next().await;
        for event in events {
            waiting.push(event).await;
        }
        if let Some(failure) = end {
            return waiting.end(failure);
        }
    }
}

/// The events of a watcher since it was last asked.
pub async fn events(
    call: Call,
    request: GetWatcherEventsRequest,
) -> Result<GetWatcherEventsResponse, Failure> {
    let events = call.sandbox.watchers.take(&request.watcher_id)?;
    Ok(GetWatcherEventsResponse { events })
}

/// Ends a watcher.
pub async fn remove(call: Call, request: RemoveWatcherRequest) -> Result<RemoveWatcherResponse, Failure> {
    call.sandbox.watchers.remove(&request.watcher_id)?;
    Ok(RemoveWatcherResponse {})
}
