//! DNS messages (RFC 1035): a guest's query, and the answer to it.
//!
//! Invariant: an answer has the question of its query, and no record but addresses of the name in the question.

use std::net::Ipv4Addr;
use std::time::Duration;

use hickory_resolver::proto::op::{Edns, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::{DNSClass, Name, RData, Record, RecordType, rdata};

/// Most bytes of an answer that the proxy says it takes in a query.
const PAYLOAD: u16 = 1232;

/// Why a query has no addresses in its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// The policy does not allow the name.
    Refused,
    NoName,
    /// The name has no such records, or none that the guest may be told.
    NoData,
    Failed,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// IPv4 addresses.
    Address,
    /// Anything else. Guests have no IPv6, and other records could name addresses that no policy saw.
    Other,
}

/// A message that is no question.
#[derive(Debug)]
pub(super) enum Unanswerable {
    /// It cannot be read, or is an answer itself.
    Silent,
    Refused(Box<Reply>),
}

/// A query with one question.
#[derive(Debug)]
pub(super) struct Question {
    metadata: Metadata,
    query: Query,
    has_edns: bool,
    /// In lower case, without a dot at its end.
    name: String,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Reply(Message);

/// Reads a guest's query.
pub(super) fn read(bytes: &[u8]) -> Result<Question, Unanswerable> {
    let message = Message::from_vec(bytes).map_err(|_| Unanswerable::Silent)?;
    let metadata = message.metadata;
    if metadata.message_type != MessageType::Query {
        return Err(Unanswerable::Silent);
    }
    let refuse = |code| {
        let mut reply = Message::error_msg(metadata.id, metadata.op_code, code);
        reply.metadata.recursion_desired = metadata.recursion_desired;
        Err(Unanswerable::Refused(Box::new(Reply(reply))))
    };
    if metadata.op_code != OpCode::Query {
        return refuse(ResponseCode::NotImp);
    }
    let [query] = message.queries.as_slice() else {
        return refuse(ResponseCode::FormErr);
    };
    let name = host(&query.name).filter(|_| query.query_class == DNSClass::IN);
    match name {
        Some(name) => Ok(Question {
            metadata,
            query: query.clone(),
            has_edns: message.edns.is_some(),
            name,
        }),
        None => refuse(ResponseCode::Refused),
    }
}

/// The text of a name whose labels have only characters of hosts and services.
fn host(name: &Name) -> Option<String> {
    let is_plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_".contains(b);
    let labels = name.iter().map(|label| {
        let text = std::str::from_utf8(label).ok()?;
        label.iter().all(is_plain).then(|| text.to_ascii_lowercase())
    });
    let labels: Option<Vec<String>> = labels.collect();
    labels
        .map(|labels| labels.join("."))
        .filter(|name| !name.is_empty())
}

impl Question {
    /// In lower case, without a dot at its end.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn kind(&self) -> Kind {
        match self.query.query_type {
            RecordType::A => Kind::Address,
            _ => Kind::Other,
        }
    }

    /// The answer with these addresses.
    pub fn addresses(&self, addresses: &[Ipv4Addr], ttl: Duration) -> Reply {
        let mut reply = self.reply(ResponseCode::NoError);
        let ttl = u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX);
        for address in addresses {
            let data = RData::A(rdata::A(*address));
            let record = Record::from_rdata(self.query.name.clone(), ttl, data);
            reply.add_answer(record);
        }
        Reply(reply)
    }

    /// The answer that there are none.
    pub fn without_addresses(&self, code: Code) -> Reply {
        Reply(self.reply(match code {
            Code::Refused => ResponseCode::Refused,
            Code::NoName => ResponseCode::NXDomain,
            Code::NoData => ResponseCode::NoError,
            Code::Failed => ResponseCode::ServFail,
        }))
    }

    fn reply(&self, code: ResponseCode) -> Message {
        let mut reply = Message::error_msg(self.metadata.id, OpCode::Query, code);
        reply.metadata.recursion_desired = self.metadata.recursion_desired;
        reply.metadata.recursion_available = true;
        reply.add_query(self.query.clone());
        if self.has_edns {
            let mut edns = Edns::new();
            edns.set_max_payload(PAYLOAD);
            reply.set_edns(edns);
        }
        reply
    }
}

impl Reply {
    /// Its bytes; `None` if it cannot be encoded.
    pub fn encode(&self) -> Option<Vec<u8>> {
        self.0.to_vec().ok()
    }
}
