//! One FUSE message, from its bytes to its reply's.
//!
//! virtiofsd's server reads descriptor chains of a guest's memory. Here a chain is made of this process's own: the message in one
//! buffer, its reply in another, so that neither changes while it is looked at and neither is in odd pieces. Known bugs of
//! virtiofsd 1.14 are kept from it:
//!
//! * it panics where the reply's header does not fit: here it always does, whoever is to get the reply;
//! * it reads, and writes to the file, as many bytes as there are buffers and then answers EIO when fewer were asked for: buffers
//!   are as long as the message says;
//! * it answers a malformed message, DESTROY and some others with nothing at all, and their sender would wait for ever: each
//!   message whose sender waits is answered;
//! * it leaves a thread with the groups of whoever made a file, if that was root: they are taken away again.
//!
//! Should a guest find another way to make it panic, the process ends, and only that guest's files with it.

use std::io;

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

/// Descriptors of the chain: the message and its reply.
const DESCRIPTORS: u16 = 2;
const TABLE: u64 = 0;
const AVAILABLE: u64 = 64;
const USED: u64 = 128;
/// The message begins on a page, and so does the data behind the headers of a WRITE, nearly.
const IN: u64 = 4096;
/// The reply. What is sent before it has its place before it.
const OUT: u64 = (IN + *MESSAGE.end() as u64).next_multiple_of(4096) + 4096;
const SIZE: usize = OUT as usize + *REPLY.end() as usize;

const IN_HEADER: u32 = size_of::<InHeader>() as u32;
const OUT_HEADER: u32 = size_of::<OutHeader>() as u32;

/// Memory for one message at a time, and its reply.
pub struct Slate {
    memory: Memory,
    queue: Queue,
}

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// What the stream said.
fn of_stream(error: VolatileMemoryError) -> io::Error {
    match error {
        VolatileMemoryError::IOError(error) => error,
        error => other(error),
    }
}

impl Slate {
    pub fn new() -> io::Result<Slate> {
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
        Ok(Slate { memory, queue })
    }

    /// Reads a message of `length` bytes, within [`MESSAGE`].
    pub fn read(&mut self, source: &mut impl ReadVolatile, length: u32) -> io::Result<()> {
        let mut whole = self
            .memory
            .get_slice(GuestAddress(IN), length as usize)
            .map_err(other)?;
        // The slice's own, which reads on: a stream gives what it has.
        source.read_exact_volatile(&mut whole).map_err(of_stream)
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

    /// Has the message of `length` bytes that was read served; the bytes of its reply, at most `room`. Without room there is none.
    /// Both are within their bounds.
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
            // Nobody waits for it; what the server says all the same is thrown away.
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
            Some(length) => self.hand_over(server, length, reply),
            None => Err(libc::EINVAL),
        };
        if matches!(
            opcode,
            Some(Opcode::Mkdir | Opcode::Mknod | Opcode::Symlink | Opcode::Create)
        ) {
            // Fails only where this thread may have none anyway.
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
                self.say(&header, if done { 0 } else { libc::ENOSYS })
            }
            Err(errno) => self.say(&header, errno),
        }
    }

    /// Something of the body of a message that has all of it.
    fn body<T: vm_memory::ByteValued>(&self, length: u32, get: impl Fn(&T) -> u32) -> Option<u32> {
        let has_it = length >= IN_HEADER + size_of::<T>() as u32;
        let body = GuestAddress(IN + u64::from(IN_HEADER));
        has_it
            .then(|| self.memory.read_obj::<T>(body).ok())
            .flatten()
            .map(|body| get(&body))
    }

    /// Makes the reply an error, or a success that has nothing to say.
    fn say(&mut self, header: &InHeader, errno: i32) -> io::Result<u32> {
        let reply = OutHeader {
            len: OUT_HEADER,
            error: -errno,
            unique: header.unique,
        };
        self.memory.write_obj(reply, GuestAddress(OUT)).map_err(other)?;
        Ok(OUT_HEADER)
    }

    /// The bytes the server wrote, or with which error to answer what it found malformed.
    fn hand_over<F: FileSystem + Sync>(
        &mut self,
        server: &Server<F>,
        length: u32,
        room: u32,
    ) -> Result<u32, i32> {
        let Slate { memory, queue } = self;
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

/// The message and the room for its reply, as a driver would have them.
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
