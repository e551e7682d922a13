//! Ingress queueing disciplines and filters of tc(8), by rtnetlink(7): redirects arriving frames, or passes them to a BPF program.
//!
//! Invariant: a later process recognises the redirects of this module without a record, because each carries [`COOKIE`]. Every change takes
//! RTNL.

use std::io;
use std::os::fd::RawFd;

use crate::netlink::{Attributes, CREATE, EXCLUSIVE, Message, Parsed, Socket};

// include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h, linux/tc_act/tc_mirred.h
const NEW_DISCIPLINE: u16 = 36;
const DELETE_DISCIPLINE: u16 = 37;
const GET_DISCIPLINE: u16 = 38;
const NEW_FILTER: u16 = 44;
const DELETE_FILTER: u16 = 45;
const GET_FILTER: u16 = 46;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
/// `TC_H_INGRESS` (the same number as `TC_H_CLSACT`), and the handle that either has.
const INGRESS: u32 = 0xffff_fff1;
const INGRESS_HANDLE: u32 = 0xffff_0000;
/// The parent of filters on arriving frames, of either.
const ARRIVING: u32 = 0xffff_fff2;
const U32_SELECTOR: u16 = 5;
const U32_ACTION: u16 = 7;
/// `struct tc_u32_sel` without keys: it matches every packet, and ends classification.
const EVERYTHING: [u8; 16] = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const BPF_CLASS: u16 = 3;
const BPF_FD: u16 = 6;
const BPF_NAME: u16 = 7;
const BPF_FLAGS: u16 = 8;
/// `TCA_BPF_FLAG_ACT_DIRECT`: the program's return value is the verdict.
const BPF_DECIDES: u32 = 1;
const FIRST_ACTION: u16 = 1;
const ACT_KIND: u16 = 1;
const ACT_OPTIONS: u16 = 2;
const ACT_COOKIE: u16 = 6;
const MIRRED_PARAMETERS: u16 = 2;
const STOLEN: i32 = 4;
const EGRESS_REDIRECT: i32 = 1;
/// The cookie of our redirects.
const COOKIE: &[u8] = b"thaw redirect";
const PRIORITY: u32 = 1;
/// `htons(ETH_P_ALL)`.
const EVERY_PROTOCOL: u32 = (libc::ETH_P_ALL as u16).to_be() as u32;
/// Bytes of `struct tcmsg`.
const BODY: usize = 20;

fn body(link: u32, handle: u32, parent: u32, info: u32) -> [u8; BODY] {
    let mut body = [0; BODY];
    for (to, field) in body[4..].chunks_exact_mut(4).zip([link, handle, parent, info]) {
        to.copy_from_slice(&field.to_ne_bytes());
    }
    body
}

fn field(body: &[u8; BODY], number: usize) -> u32 {
    let bytes = body.get(4 + 4 * number..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// Adds an ingress discipline to an interface, which filters can then be added to.
///
/// # Errors
/// `EEXIST`: it has one.
pub fn add_ingress(socket: &mut Socket, link: u32) -> io::Result<()> {
    let attributes = Attributes::default().text(TCA_KIND, "ingress");
    let body = body(link, INGRESS_HANDLE, INGRESS, 0);
    socket.request(&Message::new(
        NEW_DISCIPLINE,
        CREATE | EXCLUSIVE,
        &body,
        attributes,
    ))
}

/// Removes an interface's ingress discipline and all its filters.
///
/// # Errors
/// `ENOENT`, or `EINVAL` on older kernels: the interface has no ingress discipline.
pub fn delete_ingress(socket: &mut Socket, link: u32) -> io::Result<()> {
    let body = body(link, INGRESS_HANDLE, INGRESS, 0);
    socket.request(&Message::new(DELETE_DISCIPLINE, 0, &body, Attributes::default()))
}

/// The indices of interfaces that have an ingress discipline, of any origin.
pub fn with_ingress(socket: &mut Socket) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    let message = Message::new(GET_DISCIPLINE, 0, &body(0, 0, 0, 0), Attributes::default());
    socket.dump(&message, |kind, payload| {
        if let (NEW_DISCIPLINE, Some(body)) = (kind, payload.first_chunk())
            && field(body, 2) == INGRESS
        {
            found.push(field(body, 0));
        }
    })?;
    Ok(found)
}

/// Redirects every frame that arrives at interface `from` out of interface `to`.
pub fn redirect(socket: &mut Socket, from: u32, to: u32) -> io::Result<()> {
    redirect_as(COOKIE, socket, from, to)
}

/// The same with another cookie, of at most 16 bytes.
pub fn redirect_as(cookie: &[u8], socket: &mut Socket, from: u32, to: u32) -> io::Result<()> {
    // struct tc_mirred: index, capabilities, action, two counts, which kind, interface.
    let mut parameters = Vec::with_capacity(28);
    for number in [0, 0, STOLEN as u32, 0, 0, EGRESS_REDIRECT as u32, to] {
        parameters.extend_from_slice(&number.to_ne_bytes());
    }
    let mirred = Attributes::default().bytes(MIRRED_PARAMETERS, &parameters);
    let action = Attributes::default()
        .text(ACT_KIND, "mirred")
        .bytes(ACT_COOKIE, cookie)
        .nest(ACT_OPTIONS, mirred);
    let options = Attributes::default()
        .bytes(U32_SELECTOR, &EVERYTHING)
        .nest(U32_ACTION, Attributes::default().nest(FIRST_ACTION, action));
    let attributes = Attributes::default()
        .text(TCA_KIND, "u32")
        .nest(TCA_OPTIONS, options);
    let body = body(from, 0, ARRIVING, PRIORITY << 16 | EVERY_PROTOCOL);
    socket.request(&Message::new(NEW_FILTER, CREATE | EXCLUSIVE, &body, attributes))
}

/// Runs a BPF program on every frame that arrives at an interface, and takes its return value as the verdict. The program reads `class`
/// from `tc_classid`.
pub fn run(socket: &mut Socket, link: u32, program: RawFd, class: u16) -> io::Result<()> {
    let options = Attributes::default()
        .bytes(BPF_CLASS, &u32::from(class).to_ne_bytes())
        .bytes(BPF_FD, &program.to_ne_bytes())
        .text(BPF_NAME, "thaw")
        .bytes(BPF_FLAGS, &BPF_DECIDES.to_ne_bytes());
    let attributes = Attributes::default()
        .text(TCA_KIND, "bpf")
        .nest(TCA_OPTIONS, options);
    let body = body(link, 0, ARRIVING, PRIORITY << 16 | EVERY_PROTOCOL);
    socket.request(&Message::new(NEW_FILTER, CREATE | EXCLUSIVE, &body, attributes))
}

/// Which filters an interface has on arriving frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Filters {
    /// One added by [`redirect`].
    pub ours: bool,
    /// Another.
    pub others: bool,
}

/// Reads which filters an interface has.
pub fn filters(socket: &mut Socket, link: u32) -> io::Result<Filters> {
    let mut found = Filters::default();
    let message = Message::new(GET_FILTER, 0, &body(link, 0, ARRIVING, 0), Attributes::default());
    socket.dump(&message, |kind, payload| {
        if kind == NEW_FILTER && payload.len() >= BODY {
            match is_own_filter(Parsed(&payload[BODY..])) {
                Some(true) => found.ours = true,
                Some(false) => found.others = true,
                None => {}
            }
        }
    })?;
    Ok(found)
}

/// Whether a filter is ours. `None` if the entry is a hash table, not a filter.
fn is_own_filter(attributes: Parsed<'_>) -> Option<bool> {
    let kind = attributes.get(TCA_KIND);
    let options = attributes.nested(TCA_OPTIONS);
    if kind != Some(b"u32\0") {
        return Some(false);
    }
    options.and_then(|options| options.get(U32_SELECTOR))?;
    let action = options
        .and_then(|options| options.nested(U32_ACTION))
        .and_then(|actions| actions.nested(FIRST_ACTION));
    Some(action.and_then(|action| action.get(ACT_COOKIE)) == Some(COOKIE))
}

/// Removes what [`redirect`] added, and nothing else.
pub fn delete_redirect(socket: &mut Socket, link: u32) -> io::Result<()> {
    let body = body(link, 0, ARRIVING, PRIORITY << 16 | EVERY_PROTOCOL);
    let attributes = Attributes::default().text(TCA_KIND, "u32");
    socket.request(&Message::new(DELETE_FILTER, 0, &body, attributes))
}

#[cfg(test)]
#[path = "tc_test.rs"]
mod tests;
