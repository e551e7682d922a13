//! A FUSE message of the guest and its reply, in guest memory.
//!
//! The guest can change both at any time, so nothing here is relied on but for the guest's own sake.

use fuse_backend_rs::abi::fuse_abi::{InHeader, OutHeader};
use vm_memory::ByteValued;

use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::guest_io;

/// A request whose reply is due, or whose chain must be returned.
#[derive(Debug)]
pub struct Request {
    pub queue: usize,
    pub chain: Chain,
    /// Bytes of the message.
    pub length: u32,
    /// Most bytes of its reply; 0 if no reply is due.
    pub room: u32,
}

impl Request {
    /// The header of its message; zeros if the message is too short.
    pub fn header(&self, memory: &GuestMemory) -> InHeader {
        self.sent(memory, 0).unwrap_or_default()
    }

    /// The structure behind the header of its message, if all of it is there.
    pub fn body<T: ByteValued + Default>(&self, memory: &GuestMemory) -> Option<T> {
        self.sent(memory, size_of::<InHeader>())
    }

    /// The structure in its message at `at`.
    fn sent<T: ByteValued + Default>(&self, memory: &GuestMemory, at: usize) -> Option<T> {
        let mut value = T::default();
        let message = self.chain.readable(memory).ok()?;
        let copied = guest_io::copy_out(&message, at, value.as_mut_slice());
        (copied == size_of::<T>()).then_some(value)
    }

    /// Its whole message.
    pub fn whole(&self, memory: &GuestMemory) -> Vec<u8> {
        let mut bytes = vec![0; self.length as usize];
        if let Ok(message) = self.chain.readable(memory) {
            guest_io::copy_out(&message, 0, &mut bytes);
        }
        bytes
    }

    /// The header of its reply.
    pub fn reply_header(&self, memory: &GuestMemory) -> OutHeader {
        self.replied(memory, 0).unwrap_or_default()
    }

    /// The structure in its reply at `at`.
    pub fn replied<T: ByteValued + Default>(&self, memory: &GuestMemory, at: usize) -> Option<T> {
        let mut value = T::default();
        let reply = self.chain.writable(memory).ok()?;
        let copied = guest_io::copy_out(&reply, at, value.as_mut_slice());
        (copied == size_of::<T>()).then_some(value)
    }

    /// Writes an error as its reply, if it has room for one. Returns the bytes written.
    pub fn write_error(&self, memory: &GuestMemory, errno: i32) -> u32 {
        let Ok(reply) = self.chain.writable(memory) else {
            return 0;
        };
        if self.room == 0 {
            return 0;
        }
        let header = OutHeader {
            len: size_of::<OutHeader>() as u32,
            error: -errno,
            unique: self.header(memory).unique,
        };
        guest_io::copy_in(&reply, 0, header.as_slice());
        header.len
    }
}
