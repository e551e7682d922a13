//! Publishes task events to containerd: each in order, also when containerd is away for long.
//!
//! One task sends; publishers append to a bounded queue and do not wait. As long as the connection stands,
//! containerd has the event, and its answer is awaited without limit: containerd publishes each event that it
//! receives, so one that is sent again is published twice. Only if the connection breaks before the answer is
//! the event sent again. So an event arrives twice at most if containerd restarts, and is never lost.

use std::time::Duration;

use thaw_protocol::shim::event::Envelope;
use thaw_protocol::shim::events::ForwardRequest;
use thaw_protocol::shim::events_ttrpc::EventsClient;
use thaw_protocol::shim::task_events::*;
use thaw_protocol::shim::{Any, Message, MessageField, StringValue, Timestamp};
use tokio::sync::{mpsc, oneshot};
use ttrpc::context::Context;

use crate::warning;

/// Most queued events while containerd is away; enough for a thousand execs.
const MAX_QUEUED: usize = 4096;
/// Delay before reconnecting to containerd.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// An event of a task.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Create(TaskCreate),
    Start(TaskStart),
    ExecAdded(TaskExecAdded),
    ExecStarted(TaskExecStarted),
    Exit(TaskExit),
    Delete(TaskDelete),
    Oom(TaskOOM),
    Paused(TaskPaused),
    Resumed(TaskResumed),
    Checkpointed(TaskCheckpointed),
    /// Thaw's own: a part of a specification was ignored.
    Ignored(StringValue),
}

impl Event {
    /// The topic, and the message's name and encoding.
    fn parts(&self) -> (&'static str, &'static str, Option<Vec<u8>>) {
        let bytes = |message: &dyn Bytes| message.bytes();
        match self {
            Event::Create(m) => ("/tasks/create", "containerd.events.TaskCreate", bytes(m)),
            Event::Start(m) => ("/tasks/start", "containerd.events.TaskStart", bytes(m)),
            Event::ExecAdded(m) => ("/tasks/exec-added", "containerd.events.TaskExecAdded", bytes(m)),
            Event::ExecStarted(m) => (
                "/tasks/exec-started",
                "containerd.events.TaskExecStarted",
                bytes(m),
            ),
            Event::Exit(m) => ("/tasks/exit", "containerd.events.TaskExit", bytes(m)),
            Event::Delete(m) => ("/tasks/delete", "containerd.events.TaskDelete", bytes(m)),
            Event::Oom(m) => ("/tasks/oom", "containerd.events.TaskOOM", bytes(m)),
            Event::Paused(m) => ("/tasks/paused", "containerd.events.TaskPaused", bytes(m)),
            Event::Resumed(m) => ("/tasks/resumed", "containerd.events.TaskResumed", bytes(m)),
            Event::Checkpointed(m) => (
                "/tasks/checkpointed",
                "containerd.events.TaskCheckpointed",
                bytes(m),
            ),
            Event::Ignored(m) => ("/thaw/ignored", "google.protobuf.StringValue", bytes(m)),
        }
    }
}

/// Encodes a message. These messages have no required fields, so encoding does not fail.
trait Bytes {
    fn bytes(&self) -> Option<Vec<u8>>;
}

impl<M: Message> Bytes for M {
    fn bytes(&self) -> Option<Vec<u8>> {
        self.write_to_bytes().ok()
    }
}

enum Item {
    Event(Box<Envelope>),
    /// All earlier events have been sent.
    Flush(oneshot::Sender<()>),
}

/// Publishes events to containerd. Clones share one queue.
#[derive(Clone, Debug)]
pub struct Publisher {
    namespace: String,
    queue: mpsc::Sender<Item>,
}

impl Publisher {
    /// Connects to the containerd that serves ttrpc at the unix socket `address`. Must be called within a
    /// tokio runtime.
    pub fn new(namespace: &str, address: String) -> Publisher {
        let (queue, items) = mpsc::channel(MAX_QUEUED);
        tokio::spawn(send_all(address, items));
        Publisher {
            namespace: namespace.into(),
            queue,
        }
    }

    /// Queues an event. Does not wait; if the queue is full, the event is dropped and logged.
    pub fn publish(&self, event: &Event) {
        let (topic, name, Some(value)) = event.parts() else {
            return;
        };
        let envelope = Envelope {
            timestamp: MessageField::some(Timestamp::now()),
            namespace: self.namespace.clone(),
            topic: topic.into(),
            event: MessageField::some(Any {
                type_url: name.into(),
                value,
                ..Default::default()
            }),
            ..Default::default()
        };
        if self.queue.try_send(Item::Event(envelope.into())).is_err() {
            warning!("event {topic} is dropped: {MAX_QUEUED} others wait for containerd");
        }
    }

    /// Waits until all queued events have been sent, at most for `limit`.
    pub async fn flush(&self, limit: Duration) {
        let (done, flushed) = oneshot::channel();
        let flush = async {
            if self.queue.send(Item::Flush(done)).await.is_ok() {
                let _ = flushed.await;
            }
        };
        if tokio::time::timeout(limit, flush).await.is_err() {
            warning!("containerd did not take all events within {} s", limit.as_secs());
        }
    }
}

async fn send_all(address: String, mut items: mpsc::Receiver<Item>) {
    let path = address.strip_prefix("unix://").unwrap_or(&address).to_owned();
    let mut client = None;
    while let Some(item) = items.recv().await {
        match item {
            Item::Event(envelope) => {
                let request = ForwardRequest {
                    envelope: MessageField::some(*envelope),
                    ..Default::default()
                };
                while !forward(&path, &mut client, &request).await {
                    client = None;
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
            Item::Flush(done) => drop(done.send(())),
        }
    }
}

/// Sends an event, over a new connection if there is none. Returns whether containerd answered.
async fn forward(path: &str, client: &mut Option<EventsClient>, request: &ForwardRequest) -> bool {
    let connected = match client {
        Some(client) => client,
        None => match tokio::net::UnixStream::connect(path).await {
            Ok(stream) => {
                let socket = ttrpc::r#async::transport::Socket::from(stream);
                client.insert(EventsClient::new(ttrpc::r#async::Client::new(socket)))
            }
            Err(_) => return false,
        },
    };
    match connected.forward(Context::default(), request).await {
        Ok(_) => true,
        // containerd refused the event: do not send it again.
        Err(ttrpc::Error::RpcStatus(status)) => {
            warning!(
                "containerd refuses event {}: {}",
                request.envelope.topic,
                status.message()
            );
            true
        }
        Err(_) => false,
    }
}
