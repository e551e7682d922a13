//! One FUSE message: from a chain to the server and back.
//!
//! Invariant: the server reads a message from memory the guest cannot touch. The message's bytes, and a descriptor table
//! made of the chain's checked buffers, are copied to a *scratch* region that only this process has; so what was checked
//! is what is served, however the guest changes its memory meanwhile. Only replies are written to guest memory.

use std::sync::Arc;

use fuse_backend_rs::abi::fuse_abi::{AttrOut, InHeader, Opcode, OutHeader, ReadIn};
use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::transport::{Reader, VirtioFsWriter, Writer};
use thaw_imagefs::fs::{MissingRange, RootFs};
use thaw_imagefs::guarded::metadata_lost;
use thaw_log::LogLimit;
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestRegionMmap, MmapRegion, VolatileSlice};

use super::dax::Dax;
use crate::memory::GuestMemory;
use crate::virtio::accesses::AccessLog;
use crate::virtio::chain::Chain;
use crate::virtio::guest_io;

/// Where the scratch region is in this process's view: beyond any guest address.
const SCRATCH: u64 = 1 << 60;
/// Descriptors in the scratch table, of which the first is the message.
const DESCRIPTORS: u16 = 1024;
/// Longest message. Names and xattr names are short; only WRITE, which is refused unread, has much to say.
const MAX_MESSAGE: usize = 128 << 10;
/// Longest read: what INIT promises (`max_pages`).
const MAX_READ: u32 = 1 << 20;

const TABLE_BYTES: u64 = DESCRIPTORS as u64 * 16;
const AVAIL: u64 = SCRATCH + TABLE_BYTES;
const AVAIL_BYTES: u64 = 8192;
const USED: u64 = AVAIL + AVAIL_BYTES;
const USED_BYTES: u64 = 16384;
const MESSAGE: u64 = USED + USED_BYTES;

const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();
/// Where `fuse_attr.flags` is in the answer to GETATTR: its last field.
const ATTRIBUTE_FLAGS: usize = OUT_HEADER + size_of::<AttrOut>() - size_of::<u32>();

/// What became of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Answered with so many bytes; 0 where no answer is due or there is no place for one.
    Done(u32),
    /// A read of bytes that are not there yet. Nothing was answered.
    Wait(Vec<MissingRange>),
}

/// Hands messages to the server.
pub struct Messenger {
    images: Arc<RootFs>,
    server: Server<Arc<RootFs>>,
    guest: GuestMemory,
    /// Guest memory and the scratch region.
    memory: GuestMemory,
    /// A queue in the scratch region, the one form the server's transport takes a message in.
    queue: Queue,
    log: Arc<LogLimit>,
}

impl Messenger {
    pub fn new(images: Arc<RootFs>, guest: GuestMemory, log: Arc<LogLimit>) -> std::io::Result<Messenger> {
        let invalid = |error: &dyn std::fmt::Display| std::io::Error::other(error.to_string());
        let size = (MESSAGE - SCRATCH) as usize + MAX_MESSAGE;
        let mapping = MmapRegion::new(size).map_err(|error| invalid(&error))?;
        let region =
            GuestRegionMmap::new(mapping, GuestAddress(SCRATCH)).ok_or(invalid(&"scratch address"))?;
        let memory = guest
            .insert_region(Arc::new(region))
            .map_err(|error| invalid(&error))?;
        let mut queue = Queue::new(DESCRIPTORS).map_err(|error| invalid(&error))?;
        let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        let (low, high) = halves(SCRATCH);
        queue.set_desc_table_address(low, high);
        let (low, high) = halves(AVAIL);
        queue.set_avail_ring_address(low, high);
        let (low, high) = halves(USED);
        queue.set_used_ring_address(low, high);
        queue.set_ready(true);
        // The only entry of the available ring is descriptor 0.
        memory
            .write_obj(1u16, GuestAddress(AVAIL + 2))
            .map_err(|error| invalid(&error))?;
        Ok(Messenger {
            server: Server::new(images.clone()),
            images,
            guest,
            memory,
            queue,
            log,
        })
    }

    /// Answers a message, unless it must wait.
    ///
    /// `dax` is the window files are mapped into; `accesses` is told what is asked for.
    pub fn handle(&mut self, chain: &Chain, dax: &mut Dax, accesses: Option<&mut AccessLog>) -> Verdict {
        let readable = chain.readable_len();
        let Ok(buffers) = chain.readable(&self.guest) else {
            return Verdict::Done(0);
        };
        if readable < IN_HEADER as u64 {
            return Verdict::Done(0);
        }
        let message = copy(&buffers, MAX_MESSAGE);
        let header: InHeader = decode(&message[..IN_HEADER]);
        let opcode = header.opcode;
        let is_any = |opcodes: &[Opcode]| opcodes.iter().any(|one| *one as u32 == opcode);
        // These have no reply. Nothing is remembered of what they speak of.
        if is_any(&[Opcode::Forget, Opcode::BatchForget, Opcode::Interrupt]) {
            return Verdict::Done(0);
        }
        // The reply's header is in one descriptor; a shorter one is a broken driver's, and would break the server.
        let has_room = chain
            .writable_buffers()
            .first()
            .is_some_and(|first| first.length as usize >= OUT_HEADER);
        if !has_room || chain.writable(&self.guest).is_err() {
            tracing::debug!(opcode, "a FUSE message without room for an answer");
            return Verdict::Done(0);
        }
        if is_any(&[Opcode::Write]) {
            return Verdict::Done(self.reply_error(chain, libc::EROFS));
        }
        if readable > MAX_MESSAGE as u64 || chain.writable_buffers().len() >= usize::from(DESCRIPTORS) {
            return Verdict::Done(self.reply_error(chain, libc::E2BIG));
        }
        if is_any(&[Opcode::Read]) {
            let body = message.get(IN_HEADER..IN_HEADER + size_of::<ReadIn>());
            let Some(read) = body.map(decode::<ReadIn>) else {
                return Verdict::Done(self.reply_error(chain, libc::EINVAL));
            };
            let room = (chain.writable_len() - OUT_HEADER as u64).min(u64::from(MAX_READ)) as u32;
            if read.size > MAX_READ {
                return Verdict::Done(self.reply_error(chain, libc::EINVAL));
            }
            let size = read.size.min(room);
            self.tell(accesses, header.nodeid, Some((read.offset, u64::from(size))));
            let missing = self.images.missing(header.nodeid, read.offset, size);
            if !missing.is_empty() {
                return Verdict::Wait(missing);
            }
        } else if is_any(&[Opcode::SetupMapping, Opcode::RemoveMapping]) {
            let body = &message[IN_HEADER..];
            let done = if is_any(&[Opcode::RemoveMapping]) {
                dax.remove(body)
            } else {
                self.tell(accesses, header.nodeid, Dax::range(body));
                match dax.setup(&self.images, header.nodeid, body) {
                    Ok(Ok(())) => Ok(()),
                    Ok(Err(missing)) => return Verdict::Wait(missing),
                    Err(error) => Err(error),
                }
            };
            let errno = done
                .err()
                .map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
            return Verdict::Done(self.reply_error(chain, errno));
        } else if is_any(&[Opcode::Init, Opcode::Destroy]) {
            // Whoever mounted it before has nothing mapped any more.
            dax.clear();
            if is_any(&[Opcode::Destroy]) {
                return Verdict::Done(self.reply_error(chain, 0));
            }
        }
        let served = self.serve(&message, chain);
        if metadata_lost() {
            // Zeros may have been taken for metadata, also just now.
            if let Some(dropped) = self.log.pass() {
                tracing::error!(
                    opcode,
                    dropped,
                    "an image's metadata file is damaged, or was cut: try `thaw image verify`"
                );
            }
            return Verdict::Done(self.reply_error(chain, libc::EIO));
        }
        match served {
            Some(length) => {
                if is_any(&[Opcode::Getattr]) {
                    self.complete_attributes(chain, header.nodeid, length);
                }
                Verdict::Done(length)
            }
            None => Verdict::Done(self.reply_error(chain, libc::EIO)),
        }
    }

    /// Tells which bytes of blobs a range of a file is about.
    fn tell(&self, accesses: Option<&mut AccessLog>, node: u64, range: Option<(u64, u64)>) {
        if let (Some(accesses), Some((offset, length))) = (accesses.filter(|log| log.is_on()), range) {
            let mut tell = |blob, offset, length| accesses.tell(blob, offset, length);
            self.images.touched(node, offset, length, &mut tell);
        }
    }

    /// GETATTR's answer has room for what the server has no word for: the flags. Without them an inode that can be mapped
    /// would seem to have become another.
    fn complete_attributes(&self, chain: &Chain, node: u64, length: u32) {
        let flags = self.images.attribute_flags(node);
        if flags != 0
            && length as usize == ATTRIBUTE_FLAGS + size_of::<u32>()
            && let Ok(reply) = chain.writable(&self.guest)
        {
            guest_io::copy_in(&reply, ATTRIBUTE_FLAGS, &flags.to_le_bytes());
        }
    }

    /// Has the server answer; the bytes it wrote. None when it found the message malformed.
    fn serve(&mut self, message: &[u8], chain: &Chain) -> Option<u32> {
        self.memory.write_slice(message, GuestAddress(MESSAGE)).ok()?;
        let (next, write) = (VRING_DESC_F_NEXT as u16, VRING_DESC_F_WRITE as u16);
        let buffers = chain.writable_buffers();
        let mut table = vec![Descriptor::new(MESSAGE, message.len() as u32, next, 1)];
        table.extend(buffers.iter().zip(2..).map(|(buffer, following)| {
            let flags = if following <= buffers.len() as u16 {
                write | next
            } else {
                write
            };
            Descriptor::new(buffer.address.0, buffer.length, flags, following)
        }));
        for (address, descriptor) in (SCRATCH..).step_by(16).zip(table) {
            self.memory.write_obj(descriptor, GuestAddress(address)).ok()?;
        }
        self.queue.set_next_avail(0);
        let table = self.queue.pop_descriptor_chain(&self.memory)?;
        let reader = Reader::from_descriptor_chain(&self.memory, table.clone()).ok()?;
        let writer: Writer<'_> = VirtioFsWriter::new(&self.memory, table).ok()?.into();
        match self.server.handle_message(reader, writer, None, None) {
            Ok(written) => Some(written as u32),
            Err(error) => {
                tracing::debug!(%error, "a malformed FUSE message");
                None
            }
        }
    }

    /// Answers a message with an error, or with a success that has nothing to say; the bytes written.
    pub fn reply_error(&self, chain: &Chain, errno: i32) -> u32 {
        let Ok(request) = chain.readable(&self.guest) else {
            return 0;
        };
        let head = copy(&request, IN_HEADER);
        if head.len() < IN_HEADER {
            return 0;
        }
        let unique = decode::<InHeader>(&head).unique;
        let header = OutHeader {
            len: OUT_HEADER as u32,
            error: -errno,
            unique,
        };
        match chain.writable_buffers().first() {
            Some(first) if self.guest.write_slice(header.as_slice(), first.address).is_ok() => header.len,
            _ => 0,
        }
    }
}

/// The first bytes of buffers, at most `most`.
fn copy(buffers: &[VolatileSlice<'_>], most: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for buffer in buffers {
        let start = bytes.len();
        bytes.resize((start + buffer.len()).min(most), 0);
        buffer.copy_to(&mut bytes[start..]);
    }
    bytes
}

/// A message's structure, whatever its alignment; `bytes` are as many as it has.
fn decode<T: ByteValued + Default>(bytes: &[u8]) -> T {
    let mut value = T::default();
    value.as_mut_slice().copy_from_slice(bytes);
    value
}
