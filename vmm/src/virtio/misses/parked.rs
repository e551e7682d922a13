//! Reads that wait for bytes, and the questions asked about them.
//!
//! Invariant: only the answers to its questions can resume a parked request, so it is answered once. A question lives until it is answered,
//! over as many sockets as that takes. Requests are bounded by the queues' sizes (a head can be parked once), questions by the bytes that
//! one request may read.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use thaw_imagefs::fs::MissingRange;
use thaw_protocol::miss::{Filled, Miss};

use crate::virtio::chain::Chain;

/// Most bytes of one [`Miss`].
const MAX_MISS: u64 = 1 << 20;

/// A request: its queue and its chain, whose head identifies it.
#[derive(Debug)]
pub struct Request {
    pub queue: usize,
    pub chain: Chain,
    /// How often its bytes were reported as present.
    pub rounds: u32,
}

/// A parked request whose answers have all come.
#[derive(Debug)]
pub struct Resumed {
    pub request: Request,
    /// Why the node cannot get its bytes, as a sentence that names them; `None` if they are there.
    pub failure: Option<String>,
}

struct Waiting {
    request: Request,
    /// Number of unanswered questions.
    left: usize,
}

/// Number of a request. Its head would not do, because heads are reused.
type Ticket = u64;

struct Question {
    miss: Miss,
    waiters: Vec<Ticket>,
}

/// Divides a range into the parts that single questions ask about: blob, offset, bytes.
pub fn pieces(range: &MissingRange) -> impl Iterator<Item = ([u8; 32], u64, u32)> + use<> {
    let (blob, end) = (range.blob, range.offset + range.length);
    (range.offset..end)
        .step_by(MAX_MISS as usize)
        .map(move |offset| (blob, offset, (end - offset).min(MAX_MISS) as u32))
}

#[derive(Default)]
pub struct ParkedReads {
    next: u64,
    requests: HashMap<Ticket, Waiting>,
    heads: HashSet<(usize, u16)>,
    questions: BTreeMap<u64, Question>,
    by_range: HashMap<([u8; 32], u64, u32), u64>,
    /// Questions not sent over the present socket yet.
    unsent: BTreeSet<u64>,
}

impl ParkedReads {
    /// Whether a request with this head waits already. If so, the driver made a descriptor available that is in use.
    pub fn has(&self, queue: usize, head: u16) -> bool {
        self.heads.contains(&(queue, head))
    }

    /// The heads of the waiting requests, by queue and index.
    pub fn heads(&self) -> Vec<(usize, u16)> {
        let mut heads: Vec<_> = self.heads.iter().copied().collect();
        heads.sort_unstable();
        heads
    }

    /// A new number, for a question or a request.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Parks a request until all `ranges`, of which there must be at least one, are answered.
    pub fn park(&mut self, request: Request, ranges: &[MissingRange]) {
        let ticket = self.number();
        let mut left = 0;
        for (blob, offset, length) in ranges.iter().flat_map(pieces) {
            self.ask(ticket, blob, offset, length);
            left += 1;
        }
        self.heads.insert((request.queue, request.chain.head()));
        self.requests.insert(ticket, Waiting { request, left });
    }

    fn ask(&mut self, ticket: Ticket, blob: [u8; 32], offset: u64, length: u32) {
        let key = (blob, offset, length);
        if let Some(question) = self.by_range.get(&key).and_then(|id| self.questions.get_mut(id)) {
            question.waiters.push(ticket);
            return;
        }
        let id = self.number();
        self.by_range.insert(key, id);
        self.questions.insert(
            id,
            Question {
                miss: Miss {
                    id,
                    blob,
                    offset,
                    length,
                },
                waiters: vec![ticket],
            },
        );
        self.unsent.insert(id);
    }

    /// Whether there are unanswered questions.
    pub fn has_questions(&self) -> bool {
        !self.questions.is_empty()
    }

    /// The oldest question that must be sent.
    pub fn next_unsent(&self) -> Option<&Miss> {
        self.unsent
            .first()
            .and_then(|id| self.questions.get(id))
            .map(|question| &question.miss)
    }

    pub fn sent(&mut self, id: u64) {
        self.unsent.remove(&id);
    }

    /// The socket is gone, or another has come: every unanswered question must be sent again.
    pub fn ask_again(&mut self) {
        self.unsent.extend(self.questions.keys());
    }

    /// Takes an answer. Returns the requests that need no further one. An answer without a question is ignored: it may be late.
    pub fn answered(&mut self, filled: Filled) -> Vec<Resumed> {
        let Some(question) = self.questions.remove(&filled.id) else {
            return Vec::new();
        };
        self.unsent.remove(&filled.id);
        self.by_range
            .remove(&(question.miss.blob, question.miss.offset, question.miss.length));
        let failure = filled
            .result
            .err()
            .map(|reason| super::describe(&question.miss, &reason));
        let mut resumed = Vec::new();
        for ticket in question.waiters {
            let Some(waiting) = self.requests.get_mut(&ticket) else {
                continue;
            };
            waiting.left -= 1;
            if (waiting.left == 0 || failure.is_some())
                && let Some(mut waiting) = self.requests.remove(&ticket)
            {
                waiting.request.rounds += 1;
                self.heads
                    .remove(&(waiting.request.queue, waiting.request.chain.head()));
                resumed.push(Resumed {
                    request: waiting.request,
                    failure: failure.clone(),
                });
            }
        }
        resumed
    }

    /// Drops everything, because the driver has reset the device.
    pub fn clear(&mut self) {
        let next = self.next;
        *self = ParkedReads {
            next,
            ..ParkedReads::default()
        };
    }
}
