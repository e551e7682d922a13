//! Files that were found to have no capabilities (`security.capability`).
//!
//! Linux asks for a file's capabilities before a write(2). It remembers that a file has none (`S_NOSEC`) until it reads the file's attributes
//! again, and not at all in a mount that FUSE made itself, as each share is, if the guest's kernel has no patch for that. Here the answer
//! "none" is kept for as long as the guest may cache other attributes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fuse_backend_rs::abi::fuse_abi::InHeader;
use thaw_protocol::share::{FRESH_MS, GETXATTR};
use vm_memory::ByteValued;

use super::request::Request;
use crate::memory::GuestMemory;
use crate::virtio::guest_io;

/// The attribute's name, as it ends a message.
const NAME: &[u8] = b"security.capability\0";
/// Bytes of the GETXATTR for it: header, size and padding, name.
const ASKED: usize = size_of::<InHeader>() + 8 + NAME.len();
/// How long an answer is used.
const FRESH: Duration = Duration::from_millis(FRESH_MS);
/// Most files that are remembered.
const FILES: usize = 256;

/// The files, by node ID, each with the time of the answer.
#[derive(Default)]
pub struct WithoutCapabilities {
    found: HashMap<u64, Instant>,
}

impl WithoutCapabilities {
    /// Whether the file is known to have none.
    pub fn has(&self, node: u64, now: Instant) -> bool {
        self.found.get(&node).is_some_and(|found| is_fresh(*found, now))
    }

    /// The file was found to have none.
    pub fn add(&mut self, node: u64, now: Instant) {
        if self.found.len() >= FILES {
            self.found.retain(|_, found| is_fresh(*found, now));
        }
        if self.found.len() < FILES {
            self.found.insert(node, now);
        }
    }

    pub fn clear(&mut self) {
        self.found.clear();
    }
}

fn is_fresh(found: Instant, now: Instant) -> bool {
    now.saturating_duration_since(found) < FRESH
}

/// The node whose capabilities a request asks for, if it is such a request.
pub fn asked_for(request: &Request, memory: &GuestMemory) -> Option<u64> {
    if request.length as usize != ASKED {
        return None;
    }
    let mut message = [0; ASKED];
    guest_io::copy_out(&request.chain.readable(memory).ok()?, 0, &mut message);
    let mut header = InHeader::default();
    header
        .as_mut_slice()
        .copy_from_slice(&message[..size_of::<InHeader>()]);
    (header.opcode == GETXATTR && message.ends_with(NAME)).then_some(header.nodeid)
}

#[cfg(test)]
#[path = "capabilities_test.rs"]
mod tests;
