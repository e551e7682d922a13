//! A containerd that records events.

use async_trait::async_trait;
use thaw_protocol::shim::events::ForwardRequest;
use thaw_protocol::shim::events_ttrpc::Events;
use thaw_protocol::shim::task_events::*;
use thaw_protocol::shim::{Empty, Message};
use tokio::sync::watch;
use ttrpc::r#async::TtrpcContext;

use super::Answer;

/// A containerd that records events.
#[derive(Default)]
pub struct FakeContainerd {
    received: watch::Sender<Vec<String>>,
    /// Whether it answers later.
    pub holds_on: watch::Sender<bool>,
}

impl FakeContainerd {
    /// Waits until `count` events were received, and returns all of them.
    pub async fn events(&self, count: usize) -> Vec<String> {
        let mut events = self.received.subscribe();
        events
            .wait_for(|events| events.len() >= count)
            .await
            .unwrap()
            .clone()
    }
}

fn line(topic: &str, event: &[u8]) -> String {
    let name = topic.rsplit_once('/').unwrap().1;
    let named = |text: &dyn std::fmt::Display| format!("{name} {text}");
    match topic {
        "/tasks/exit" => {
            let exit = TaskExit::parse_from_bytes(event).unwrap();
            named(&format!("{} {}", exit.id, exit.exit_status))
        }
        "/tasks/exec-added" => named(&TaskExecAdded::parse_from_bytes(event).unwrap().exec_id),
        "/tasks/exec-started" => named(&TaskExecStarted::parse_from_bytes(event).unwrap().exec_id),
        // In every other event, the first field is the container's id.
        _ => named(&TaskOOM::parse_from_bytes(event).unwrap().container_id),
    }
}

#[async_trait]
impl Events for FakeContainerd {
    async fn forward(&self, _: &TtrpcContext, r: ForwardRequest) -> Answer<Empty> {
        let envelope = r.envelope;
        assert_eq!(envelope.namespace, "ns");
        self.received
            .send_modify(|received| received.push(line(&envelope.topic, &envelope.event.value)));
        let _ = self.holds_on.subscribe().wait_for(|holds| !holds).await;
        Ok(Empty::new())
    }
}
