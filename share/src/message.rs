//! One FUSE message and its reply.
//!
//! virtiofsd's server reads descriptor chains in a guest's memory. Here the chain is in this process's own
//! memory, with the message in one buffer and the reply in another, so that neither changes while it is read
//! and neither is fragmented. This avoids known bugs of virtiofsd 1.14:
//!
//! - It panics if the reply's header does not fit. Here it always fits, wherever the reply is sent.
//! - It reads from a file, or writes to it, as many bytes as the buffers have, and then returns EIO if fewer
//!   were requested. Here buffers have the length that the message says.
//! - It sends no reply to a malformed message, to DESTROY and to some others, so that their sender would wait
//!   forever. Here each message whose sender waits is answered.
//! - It leaves a thread with the supplementary groups of the user who created a file, if that was root. Here
//!   they are removed again.
//!
//! If a guest finds another way to make it panic, the process ends, and with it only that guest's shared files.

use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use thaw_protocol::share::{MESSAGE, REPLY};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{DescriptorChain, Queue, QueueT};
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::filesystem::FileSystem;
use virtiofsd::fuse::{InHeader, Opcode, OutHeader, ReadIn, WriteIn};
use virtiofsd::server::Server;
use vm_memory::{Bytes, GuestAddress, GuestMemory, ReadVolatile, VolatileMemoryError, WriteVolatile};

type Memory = vm_memory::GuestMemoryMmap<BitmapMmapRegion>;

/// Descriptors in the chain: the message and its reply.
const DESCRIPTORS: u16 = 2;
const TABLE: u64 = 0;
const AVAILABLE: u64 = 64;
const USED: u64 = 128;
/// The message begins on a page, so that the data after the headers of a WRITE almost does.
const IN: u64 = 4096;
/// The reply. The relay's header is placed directly before it.
const OUT: u64 = (IN + *MESSAGE.end() as u64).next_multiple_of(4096) + 4096;
const SIZE: usize = OUT as usize + *REPLY.end() as usize;

const IN_HEADER: u32 = size_of::<InHeader>() as u32;
const OUT_HEADER: u32 = size_of::<OutHeader>() as u32;

/// Memory for one message at a time and its reply.
pub struct MessageBuffer {
    memory: Memory,
    queue: Queue,
}

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// The stream's own error.
fn of_stream(error: VolatileMemoryError) -> io::Error {
    match error {
        VolatileMemoryError::IOError(error) => error,
        error => other(error),
    }
}

impl MessageBuffer {
    pub fn new() -> io::Result<MessageBuffer> {
        let memory = Memory::from_ranges(&[(GuestAddress(0), SIZE)]).map_err(other)?;
        let mut queue = Queue::new(DESCRIPTORS).map_err(other)?;
        let place = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        let (low, high) = place(TABLE);
        queue.set_desc_table_address(low, high);
        let (low, high) = place(AVAILABLE);
        queue.set_avail_ring_address(low, high);
        let (low, high) = place(USED);
        queue.set_used_ring_address(low, high);
        queue.set_ready(true);
        // The only entry of the available ring is descriptor 0.
        memory
            .write_obj(1u16, GuestAddress(AVAILABLE + 2))
            .map_err(other)?;
        Ok(MessageBuffer { memory, queue })
    }

    /// Reads a message of `length` bytes, within [`MESSAGE`].
    pub fn read(&mut self, source: &mut impl ReadVolatile, length: u32) -> io::Result<()> {
        let mut whole = self
            .memory
            .get_slice(GuestAddress(IN), length as usize)
            .map_err(other)?;
        // This method of the slice continues after a short read.
        source.read_exact_volatile(&mut whole).map_err(of_stream)
    }

    /// The first `length` bytes of the message.
    #[cfg(test)]
    pub fn message(&self, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.read_slice(&mut bytes, GuestAddress(IN)).unwrap();
        bytes
    }

    /// Writes `header` and the first `length` bytes of the reply, at once.
    pub fn write(&self, sink: &mut impl WriteVolatile, header: &[u8], length: u32) -> io::Result<()> {
        let from = GuestAddress(OUT - header.len() as u64);
        self.memory.write_slice(header, from).map_err(other)?;
        let whole = self
            .memory
            .get_slice(from, header.len() + length as usize)
            .map_err(other)?;
        sink.write_all_volatile(&whole).map_err(of_stream)
    }

    /// As [`Self::write`], with a descriptor if the kernel takes it.
    pub fn write_with(
        &self,
        socket: &mut UnixStream,
        header: &[u8],
        length: u32,
        file: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let mut whole = header.to_vec();
        whole.resize(header.len() + length as usize, 0);
        self.memory
            .read_slice(&mut whole[header.len()..], GuestAddress(OUT))
            .map_err(other)?;
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let bytes = [IoSlice::new(&whole)];
        let sent = retry_on_intr(|| sendmsg(&*socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL));
        // It may refuse a descriptor that it would not refuse the bytes of, as too many are on their way.
        socket.write_all(&whole[sent.unwrap_or(0)..])
    }

    /// Serves the message of `length` bytes that was read. Returns the length of its reply, at most `room`;
    /// without room there is no reply. Both arguments are within their limits.
    pub fn serve<F: FileSystem + Sync>(
        &mut self,
        server: &Server<F>,
        length: u32,
        room: u32,
    ) -> io::Result<u32> {
        let mut header: InHeader = self.memory.read_obj(GuestAddress(IN)).map_err(other)?;
        header.len = length;
        self.memory.write_obj(header, GuestAddress(IN)).map_err(other)?;
        let opcode = Opcode::try_from(header.opcode).ok();
        let (length, reply) = match (opcode, room) {
            // No sender waits, so a reply of the server is dropped.
            (_, 0) => (Some(length), *REPLY.end()),
            (Some(Opcode::Read), room) => {
                let size = self.body::<ReadIn>(length, |body| body.size);
                let whole = (room - OUT_HEADER).min(size.unwrap_or_default());
                (size.map(|_| length), OUT_HEADER + whole)
            }
            (Some(Opcode::Write), room) => {
                let ahead = IN_HEADER + size_of::<WriteIn>() as u32;
                let size = self.body::<WriteIn>(length, |body| body.size);
                let whole = size.and_then(|size| ahead.checked_add(size));
                (whole.filter(|whole| *whole <= length), room)
            }
            (_, room) => (Some(length), room),
        };
        let written = match length {
            Some(length) => self.handle(server, length, reply),
            None => Err(libc::EINVAL),
        };
        if matches!(
            opcode,
            Some(Opcode::Mkdir | Opcode::Mknod | Opcode::Symlink | Opcode::Create)
        ) {
            // Fails only if this thread may not have groups anyway.
            let _ = rustix::thread::set_thread_groups(&[]);
        }
        if room == 0 {
            return Ok(0);
        }
        match written {
            Ok(written) if (OUT_HEADER..=room).contains(&written) => Ok(written),
            Ok(_) => {
                let done = matches!(
                    opcode,
                    Some(Opcode::Destroy | Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt)
                );
                self.set_status(&header, if done { 0 } else { libc::ENOSYS })
            }
            Err(errno) => self.set_status(&header, errno),
        }
    }

    /// Reads a field of the message's body, if the message contains the whole body.
    fn body<T: vm_memory::ByteValued>(&self, length: u32, get: impl Fn(&T) -> u32) -> Option<u32> {
        let has_it = length >= IN_HEADER + size_of::<T>() as u32;
        let body = GuestAddress(IN + u64::from(IN_HEADER));
        has_it
            .then(|| self.memory.read_obj::<T>(body).ok())
            .flatten()
            .map(|body| get(&body))
    }

    /// Makes the reply an error, or a success without contents.
    fn set_status(&mut self, header: &InHeader, errno: i32) -> io::Result<u32> {
        let reply = OutHeader {
            len: OUT_HEADER,
            error: -errno,
            unique: header.unique,
        };
        self.memory.write_obj(reply, GuestAddress(OUT)).map_err(other)?;
        Ok(OUT_HEADER)
    }

    /// Passes the message to the server. Returns the length of its reply, or the error for a malformed message.
    fn handle<F: FileSystem + Sync>(
        &mut self,
        server: &Server<F>,
        length: u32,
        room: u32,
    ) -> Result<u32, i32> {
        let MessageBuffer { memory, queue } = self;
        let memory = &*memory;
        let chain = chain(memory, queue, length, room).map_err(|_| libc::EIO)?;
        let (Ok(reader), Ok(writer)) = (Reader::new(memory, chain.clone()), Writer::new(memory, chain))
        else {
            return Err(libc::EIO);
        };
        match server.handle_message::<()>(reader, writer, None) {
            Ok(written) => u32::try_from(written).map_err(|_| libc::EIO),
            Err(error) => {
                tracing::debug!(%error, "a malformed FUSE message");
                Err(libc::EINVAL)
            }
        }
    }
}

/// The chain of the message and the room for its reply, as a driver would make it.
fn chain<'m>(
    memory: &'m Memory,
    queue: &mut Queue,
    length: u32,
    room: u32,
) -> io::Result<DescriptorChain<&'m Memory>> {
    let (next, write) = (VRING_DESC_F_NEXT as u16, VRING_DESC_F_WRITE as u16);
    let message = Descriptor::new(IN, length, next, 1);
    let reply = Descriptor::new(OUT, room, write, 0);
    for (address, descriptor) in [(TABLE, message), (TABLE + 16, reply)] {
        memory
            .write_obj(RawDescriptor::from(descriptor), GuestAddress(address))
            .map_err(other)?;
    }
    queue.set_next_avail(0);
    queue
        .pop_descriptor_chain(memory)
        .ok_or_else(|| other("the chain is not in memory"))
}

#[cfg(test)]
#[path = "message_test.rs"]
mod tests;
