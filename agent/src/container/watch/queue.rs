//! The events of a watch that the host has not read yet.
//!
//! Invariant: their names and kinds have at most [`CAPACITY`] bytes. If there are more, later ones are dropped, and one OVERFLOW says so.

use std::collections::VecDeque;

use thaw_protocol::agent::files::FileEvent;
use thaw_protocol::agent::files::file_event::Kind;

/// Most bytes of queued events.
const CAPACITY: usize = 1 << 20;
/// Most bytes of one answer: the host takes no larger one.
const MAX_ANSWER: usize = 200 << 10;
/// Bytes of an event besides its name, at most.
const FIXED: usize = 16;

/// Events in order.
#[derive(Debug, Default)]
pub struct Queue {
    events: VecDeque<FileEvent>,
    bytes: usize,
}

impl Queue {
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Adds an event, or an OVERFLOW if there is no room.
    pub fn push(&mut self, kind: Kind, name: Vec<u8>) {
        if self.bytes + FIXED + name.len() > CAPACITY {
            return self.overflow();
        }
        self.bytes += FIXED + name.len();
        self.events.push_back(event(kind, name));
    }

    /// Records that events were lost here.
    pub fn overflow(&mut self) {
        let is_last = |event: &FileEvent| event.kind == Kind::OVERFLOW.into();
        if !self.events.back().is_some_and(is_last) {
            self.events.push_back(event(Kind::OVERFLOW, Vec::new()));
        }
    }

    /// Takes as many events as an answer may have.
    pub fn take(&mut self) -> Vec<FileEvent> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while let Some(event) = self.events.front() {
            bytes += FIXED + event.name.len();
            if bytes > MAX_ANSWER {
                break;
            }
            taken.extend(self.events.pop_front());
        }
        if self.events.is_empty() {
            self.bytes = 0;
        }
        taken
    }
}

fn event(kind: Kind, name: Vec<u8>) -> FileEvent {
    FileEvent {
        kind: kind.into(),
        name,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::agent::Message;
    use thaw_protocol::agent::files::NextEventsResponse;

    #[test]
    fn full_queue_says_once_that_events_were_lost() {
        let mut queue = Queue::default();
        for n in 0..5000 {
            queue.push(Kind::CREATE, format!("{n:0300}").into_bytes());
        }
        let mut all = Vec::new();
        while !queue.is_empty() {
            let events = queue.take();
            assert!(!events.is_empty());
            let answer = NextEventsResponse {
                events: events.clone(),
                ..Default::default()
            };
            let most = thaw_protocol::agent::answers::MAX_RESPONSE;
            assert!(answer.compute_size() < most.into());
            all.extend(events);
        }
        let lost = all.pop().unwrap();
        assert_eq!(lost.kind, Kind::OVERFLOW.into());
        assert_eq!(all.len(), CAPACITY / (300 + FIXED));
        assert!(all.iter().all(|event| event.kind == Kind::CREATE.into()));
        // After it was read there is room again.
        queue.push(Kind::WRITE, b"a".to_vec());
        assert_eq!(queue.take().len(), 1);
    }
}
