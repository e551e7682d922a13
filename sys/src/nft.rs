//! nftables, by netlink messages to the kernel (nfnetlink).
//!
//! Hand-written: the crate `nftables` runs nft(8), which must then be installed and costs a process per transaction, which would delay a
//! creation that publishes ports. libnftnl is a C library, which a static binary would have to link.
//!
//! Invariants: a [`Transaction`] is applied as a whole or not at all, and packets see the rules either from before or from after it. It
//! changes one IPv4 table. It takes the lock of its network namespace's rules, and neither RTNL nor any lock of the whole host, as long as
//! it adds no chain to a hook.

use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

pub mod rule;

use crate::netlink::{APPEND, Attributes, CREATE, EXCLUSIVE, Message, Parsed, Socket};
use rule::Rule;

// include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const DELETE_RULE: u16 = 8;
const NEW_SET: u16 = 9;
const DELETE_SET: u16 = 11;
const NEW_ELEMENT: u16 = 12;
const GET_ELEMENT: u16 = 13;
const DELETE_ELEMENT: u16 = 14;
const SET_IS_MAP: u32 = 8;
const SET_HAS_TIMEOUTS: u32 = 16;
const LIST_ELEM: u16 = 1;
const DATA_VALUE: u16 = 1;
const ELEMENT_KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const ELEMENT_TIMEOUT: u16 = 4;
const ELEMENTS: u16 = 3;
/// Bytes of `struct nfgenmsg`.
pub const GENERIC: usize = 4;
/// nft(8)'s numbers of types, with which nft(8) displays a map correctly.
const TYPE_ADDRESS: u32 = 7;
const TYPE_PROTOCOL: u32 = 12;
const TYPE_SERVICE: u32 = 13;
const TYPE_BITS: u32 = 6;

/// The hook of a chain: the point in a packet's path at which it is evaluated.
#[derive(Clone, Copy, Debug)]
pub enum Hook {
    /// `type nat hook prerouting priority dstnat`.
    NatBefore,
    /// `type nat hook output priority dstnat`.
    NatOutput,
    /// `type nat hook postrouting priority srcnat`.
    NatAfter,
    /// `type filter hook input priority filter`.
    Input,
    /// `type filter hook forward priority filter`.
    Forward,
}

impl Hook {
    /// Kind, hook number, priority.
    fn numbers(self) -> (&'static str, u32, i32) {
        match self {
            Hook::NatBefore => ("nat", 0, -100),
            Hook::NatOutput => ("nat", 3, -100),
            Hook::NatAfter => ("nat", 4, 100),
            Hook::Input => ("filter", 1, 0),
            Hook::Forward => ("filter", 2, 0),
        }
    }
}

/// A field of a map's keys: four bytes, padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Address(Ipv4Addr),
    Protocol(u8),
    Port(u16),
}

impl Field {
    fn bytes(self) -> [u8; 4] {
        match self {
            Field::Address(address) => address.octets(),
            Field::Protocol(number) => [number, 0, 0, 0],
            Field::Port(port) => {
                let [a, b] = port.to_be_bytes();
                [a, b, 0, 0]
            }
        }
    }

    fn kind(self) -> u32 {
        match self {
            Field::Address(_) => TYPE_ADDRESS,
            Field::Protocol(_) => TYPE_PROTOCOL,
            Field::Port(_) => TYPE_SERVICE,
        }
    }
}

fn concatenated(fields: &[Field]) -> Vec<u8> {
    fields.iter().flat_map(|field| field.bytes()).collect()
}

/// The type of a concatenation, and its bytes.
fn shape(fields: &[Field]) -> (u32, u32) {
    let kind = fields
        .iter()
        .fold(0, |all, field| all << TYPE_BITS | field.kind());
    (kind, fields.len() as u32 * 4)
}

/// The target of a map's element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub address: Ipv4Addr,
    pub port: u16,
}

impl Target {
    fn fields(self) -> [Field; 2] {
        [Field::Address(self.address), Field::Port(self.port)]
    }
}

/// Changes of one table.
#[derive(Clone, Debug)]
pub struct Transaction<'a> {
    table: &'a str,
    messages: Vec<Message>,
}

/// `struct nfgenmsg`: family, version, resource.
fn generic(family: u8, resource: u16) -> [u8; GENERIC] {
    let [a, b] = resource.to_be_bytes();
    [family, 0, a, b]
}

impl<'a> Transaction<'a> {
    /// A transaction on this table, which it creates if it does not exist.
    pub fn new(table: &'a str) -> Transaction<'a> {
        let begin = Message::new(
            BATCH_BEGIN,
            0,
            &generic(libc::AF_UNSPEC as u8, SUBSYSTEM),
            Attributes::default(),
        );
        let mut transaction = Transaction {
            table,
            messages: vec![begin],
        };
        let attributes = Attributes::default().text(1, table);
        transaction.push(NEW_TABLE, CREATE, attributes);
        transaction
    }

    fn push(&mut self, kind: u16, flags: u16, attributes: Attributes) {
        let body = generic(libc::AF_INET as u8, 0);
        let message = Message::new(SUBSYSTEM << 8 | kind, flags, &body, attributes);
        self.messages.push(message);
    }

    /// Adds a chain that others jump to, or empties it.
    pub fn chain(&mut self, name: &str) {
        let attributes = Attributes::default().text(1, self.table).text(3, name);
        self.push(NEW_CHAIN, CREATE, attributes);
        self.flush(name);
    }

    /// Adds a chain at a hook, or empties it. A packet that none of its rules decides is accepted or dropped.
    pub fn hooked(&mut self, name: &str, hook: Hook, accept: bool) {
        let (kind, number, priority) = hook.numbers();
        let hook = Attributes::default()
            .be32(1, number)
            .bytes(2, &priority.to_be_bytes());
        let attributes = Attributes::default()
            .text(1, self.table)
            .text(3, name)
            .nest(4, hook)
            .be32(5, accept.into())
            .text(7, kind);
        self.push(NEW_CHAIN, CREATE, attributes);
        self.flush(name);
    }

    /// Removes the table with everything in it.
    pub fn delete(&mut self) {
        let attributes = Attributes::default().text(1, self.table);
        self.push(DELETE_TABLE, 0, attributes);
    }

    /// Removes a chain's rules.
    pub fn flush(&mut self, chain: &str) {
        let attributes = Attributes::default().text(1, self.table).text(2, chain);
        self.push(DELETE_RULE, 0, attributes);
    }

    /// Adds a rule to the end of a chain.
    pub fn rule(&mut self, chain: &str, rule: Rule) {
        let attributes = Attributes::default()
            .text(1, self.table)
            .text(2, chain)
            .nest(4, rule.expressions);
        self.push(NEW_RULE, CREATE | APPEND, attributes);
    }

    /// Adds a map from keys shaped like this one to [`Target`]s, if it is not there.
    pub fn map(&mut self, name: &str, like: &[Field]) {
        let target = Target {
            address: Ipv4Addr::UNSPECIFIED,
            port: 0,
        };
        let ((key, key_length), (data, data_length)) = (shape(like), shape(&target.fields()));
        let attributes = Attributes::default()
            .text(1, self.table)
            .text(2, name)
            .be32(3, SET_IS_MAP)
            .be32(4, key)
            .be32(5, key_length)
            .be32(6, data)
            .be32(7, data_length)
            // Unique within the transaction.
            .be32(10, self.messages.len() as u32);
        self.push(NEW_SET, CREATE, attributes);
    }

    /// Adds a set of addresses, each of which the kernel removes after a time of its own, if the set is not there.
    pub fn addresses(&mut self, name: &str) {
        let (key, key_length) = shape(&[Field::Address(Ipv4Addr::UNSPECIFIED)]);
        let attributes = Attributes::default()
            .text(1, self.table)
            .text(2, name)
            .be32(3, SET_HAS_TIMEOUTS)
            .be32(4, key)
            .be32(5, key_length)
            .be32(10, self.messages.len() as u32);
        self.push(NEW_SET, CREATE, attributes);
    }

    /// Removes a set that no rule uses. The transaction fails (`ENOENT`) if it is not there.
    pub fn delete_set(&mut self, name: &str) {
        let attributes = Attributes::default().text(1, self.table).text(2, name);
        self.push(DELETE_SET, 0, attributes);
    }

    /// Adds an address to such a set, for a time. One that is there keeps its time.
    pub fn add_address(&mut self, set: &str, address: Ipv4Addr, time: Duration) {
        let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
        let key = Attributes::default().bytes(DATA_VALUE, &address.octets());
        let element = Attributes::default()
            .nest(ELEMENT_KEY, key)
            .bytes(ELEMENT_TIMEOUT, &milliseconds.to_be_bytes());
        let attributes = self.listed(set, element);
        self.push(NEW_ELEMENT, CREATE, attributes);
    }

    /// Attributes of a message about one element.
    fn listed(&self, set: &str, element: Attributes) -> Attributes {
        Attributes::default()
            .text(1, self.table)
            .text(2, set)
            .nest(ELEMENTS, Attributes::default().nest(LIST_ELEM, element))
    }

    fn element(&self, map: &str, key: &[Field], target: Option<Target>) -> Attributes {
        let value = |fields: &[Field]| Attributes::default().bytes(DATA_VALUE, &concatenated(fields));
        let mut element = Attributes::default().nest(ELEMENT_KEY, value(key));
        if let Some(target) = target {
            element = element.nest(ELEMENT_DATA, value(&target.fields()));
        }
        self.listed(map, element)
    }

    /// Adds an element. The transaction fails (`EEXIST`) if the map has the key.
    pub fn insert(&mut self, map: &str, key: &[Field], target: Target) {
        let attributes = self.element(map, key, Some(target));
        self.push(NEW_ELEMENT, CREATE | EXCLUSIVE, attributes);
    }

    /// Removes an element. The transaction fails (`ENOENT`) if it is not there.
    pub fn remove(&mut self, map: &str, key: &[Field]) {
        let attributes = self.element(map, key, None);
        self.push(DELETE_ELEMENT, 0, attributes);
    }

    /// Applies it.
    pub fn commit(mut self, socket: &mut Socket) -> io::Result<()> {
        let last = self.messages.len() - 1;
        let end = Message::new(
            BATCH_END,
            0,
            &generic(libc::AF_UNSPEC as u8, SUBSYSTEM),
            Attributes::default(),
        );
        self.messages.push(end);
        socket.batch_until(&self.messages, last)
    }
}

/// The elements of a map: each key's bytes, four to a field, and its target. Empty if the map does not exist.
pub fn elements(socket: &mut Socket, table: &str, map: &str) -> io::Result<Vec<(Vec<u8>, Target)>> {
    let mut found = Vec::new();
    let dumped = dump(socket, table, map, |key, data| {
        if let Some([a, b, c, d, e, f, ..]) = data.and_then(|data| data.first_chunk::<8>()) {
            let target = Target {
                address: Ipv4Addr::new(*a, *b, *c, *d),
                port: u16::from_be_bytes([*e, *f]),
            };
            found.push((key.to_vec(), target));
        }
    });
    dumped.map(|_| found)
}

/// The addresses in a set ([`Transaction::addresses`]). `None` if it does not exist.
pub fn addresses(socket: &mut Socket, table: &str, set: &str) -> io::Result<Option<Vec<Ipv4Addr>>> {
    let mut found = Vec::new();
    let is_there = dump(socket, table, set, |key, _| {
        if let Ok(octets) = <[u8; 4]>::try_from(key) {
            found.push(Ipv4Addr::from(octets));
        }
    })?;
    Ok(is_there.then_some(found))
}

/// Calls `each` with the key and the data of every element. Returns whether the set exists.
fn dump(
    socket: &mut Socket,
    table: &str,
    set: &str,
    mut each: impl FnMut(&[u8], Option<&[u8]>),
) -> io::Result<bool> {
    let attributes = Attributes::default().text(1, table).text(2, set);
    let body = generic(libc::AF_INET as u8, 0);
    let message = Message::new(SUBSYSTEM << 8 | GET_ELEMENT, 0, &body, attributes);
    let dumped = socket.dump(&message, |_, payload| {
        let all = payload
            .get(GENERIC..)
            .map(Parsed)
            .and_then(|p| p.nested(ELEMENTS));
        for (_, element) in all.into_iter().flatten() {
            let value = |kind| Parsed(element).nested(kind)?.get(DATA_VALUE);
            if let Some(key) = value(ELEMENT_KEY) {
                each(key, value(ELEMENT_DATA));
            }
        }
    });
    match dumped {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        dumped => dumped.map(|()| true),
    }
}

/// Removes elements by their keys' bytes, as [`elements`] returns them. A missing element is not an error.
pub fn remove_raw(socket: &mut Socket, table: &str, map: &str, key: &[u8]) -> io::Result<()> {
    let mut transaction = Transaction::new(table);
    let value = Attributes::default().bytes(DATA_VALUE, key);
    let element = Attributes::default().nest(ELEMENT_KEY, value);
    let attributes = transaction.listed(map, element);
    transaction.push(DELETE_ELEMENT, 0, attributes);
    match transaction.commit(socket) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
#[path = "nft_test.rs"]
mod tests;
