//! Reads that wait for bytes, and the questions asked about them.
//!
//! Invariant: a parked request is owned by its question's answer and by nothing else, so it is answered once; a question
//! lives until it is answered, over as many sockets as that takes. Requests are bounded by the queues' sizes (a head can
//! be parked once), questions by what one request may read.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use thaw_imagefs::fs::MissingRange;
use thaw_protocol::miss::{Filled, Miss};

use crate::virtio::chain::Chain;

/// Most bytes of one [`Miss`].
const MAX_MISS: u64 = 1 << 20;

/// A request: the queue it came by and its chain, which names it by its head.
#[derive(Debug)]
pub struct Request {
    pub queue: usize,
    pub chain: Chain,
    /// How often its bytes were said to be there.
    pub rounds: u32,
}

/// A parked request whose answers are in.
#[derive(Debug)]
pub struct Resumed {
    pub request: Request,
    /// Why the node cannot get its bytes: a sentence that names them.
    pub failure: Option<String>,
}

struct Waiting {
    request: Request,
    /// Questions not answered yet.
    left: usize,
}

/// Numbers requests, which heads cannot: a head is used again.
type Ticket = u64;

struct Question {
    miss: Miss,
    waiters: Vec<Ticket>,
}

/// A range in parts that one question may be about: blob, offset, bytes.
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
    /// Questions not yet sent over the present socket.
    unsent: BTreeSet<u64>,
}

impl ParkedReads {
    /// Whether a request with this head waits already: the driver made a descriptor available that is in use.
    pub fn has(&self, queue: usize, head: u16) -> bool {
        self.heads.contains(&(queue, head))
    }

    /// The heads that wait, by queue and index.
    pub fn heads(&self) -> Vec<(usize, u16)> {
        let mut heads: Vec<_> = self.heads.iter().copied().collect();
        heads.sort_unstable();
        heads
    }

    /// One that no question or request had.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Parks a request until all ranges, of which there is at least one, are answered for.
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

    /// Whether any answer is due.
    pub fn has_questions(&self) -> bool {
        !self.questions.is_empty()
    }

    /// The oldest question to send.
    pub fn next_unsent(&self) -> Option<&Miss> {
        self.unsent
            .first()
            .and_then(|id| self.questions.get(id))
            .map(|question| &question.miss)
    }

    pub fn sent(&mut self, id: u64) {
        self.unsent.remove(&id);
    }

    /// The socket is gone, or another has come: every open question is to be sent again.
    pub fn ask_again(&mut self) {
        self.unsent.extend(self.questions.keys());
    }

    /// An answer; the requests that need no other. One to no question is ignored: it may be late.
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

    /// Forgets everything: the driver has reset the device.
    pub fn clear(&mut self) {
        let next = self.next;
        *self = ParkedReads {
            next,
            ..ParkedReads::default()
        };
    }
}
