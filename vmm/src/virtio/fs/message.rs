//! One FUSE message: from a chain to the server and back.
//!
//! Invariant: the server reads a message only from memory the guest cannot touch. The message's bytes, and a descriptor table made of the
//! chain's checked buffers, are copied to a *scratch* region that only this process has. So the message that was checked is the one that is
//! served, even if the guest changes its memory meanwhile. Only replies are written to guest memory.

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
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestRegionMmap, MmapRegion};

use super::dax::Dax;
use crate::memory::GuestMemory;
use crate::virtio::accesses::AccessLog;
use crate::virtio::chain::Chain;
use crate::virtio::guest_io;

/// Address of the scratch region in this process's view, beyond any guest address.
const SCRATCH: u64 = 1 << 60;
/// Descriptors in the scratch table. The first is the message.
const DESCRIPTORS: u16 = 1024;
/// Longest message. Names and xattr names are short; only WRITE is long, and it is refused unread.
const MAX_MESSAGE: usize = 128 << 10;
/// Longest read, as INIT promises (`max_pages`).
const MAX_READ: u32 = 1 << 20;

const TABLE_BYTES: u64 = DESCRIPTORS as u64 * 16;
const AVAIL: u64 = SCRATCH + TABLE_BYTES;
const AVAIL_BYTES: u64 = 8192;
const USED: u64 = AVAIL + AVAIL_BYTES;
const USED_BYTES: u64 = 16384;
const MESSAGE: u64 = USED + USED_BYTES;

const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();
/// Offset of `fuse_attr.flags`, the last field, in the answer to GETATTR.
const ATTRIBUTE_FLAGS: usize = OUT_HEADER + size_of::<AttrOut>() - size_of::<u32>();

const READ: u32 = Opcode::Read as u32;
const WRITE: u32 = Opcode::Write as u32;
const GETATTR: u32 = Opcode::Getattr as u32;
const FORGET: u32 = Opcode::Forget as u32;
const BATCH_FORGET: u32 = Opcode::BatchForget as u32;
const INTERRUPT: u32 = Opcode::Interrupt as u32;
const INIT: u32 = Opcode::Init as u32;
const DESTROY: u32 = Opcode::Destroy as u32;
const SETUP_MAPPING: u32 = Opcode::SetupMapping as u32;
const REMOVE_MAPPING: u32 = Opcode::RemoveMapping as u32;

/// The outcome of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Answered with this many bytes; 0 if no answer is due or there is no room for one.
    Done(u32),
    /// A read of bytes that are not there yet. Nothing was answered.
    Wait(Vec<MissingRange>),
}

/// Passes messages to the server.
pub struct Messenger {
    images: Arc<RootFs>,
    server: Server<Arc<RootFs>>,
    guest: GuestMemory,
    /// Guest memory and the scratch region.
    memory: GuestMemory,
    /// A queue in the scratch region: the server's transport takes a message in no other form.
    queue: Queue,
    /// The message and the descriptors that are handled now. Kept, so that the next ones need no allocation.
    message: Vec<u8>,
    table: Vec<u8>,
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
            message: Vec::new(),
            table: Vec::new(),
            log,
        })
    }

    /// Answers a message, unless it must wait.
    ///
    /// `dax` is the window that files are mapped into. Reads are reported to `accesses`.
    pub fn handle(&mut self, chain: &Chain, dax: &mut Dax, accesses: Option<&mut AccessLog>) -> Verdict {
        let mut message = std::mem::take(&mut self.message);
        let verdict = match self.take(chain, &mut message) {
            Ok(header) => self.handle_copy(&header, &message, chain, dax, accesses),
            Err(written) => Verdict::Done(written),
        };
        self.message = message;
        verdict
    }

    /// Answers a message that was copied, unless it must wait.
    fn handle_copy(
        &mut self,
        header: &InHeader,
        message: &[u8],
        chain: &Chain,
        dax: &mut Dax,
        accesses: Option<&mut AccessLog>,
    ) -> Verdict {
        let body = &message[IN_HEADER..];
        match header.opcode {
            READ => match self.check_read(header, body, chain, accesses) {
                Ok(missing) if missing.is_empty() => {}
                Ok(missing) => return Verdict::Wait(missing),
                Err(errno) => return Verdict::Done(self.reply_error(chain, errno)),
            },
            SETUP_MAPPING => {
                self.record_access(accesses, header.nodeid, Dax::range(body));
                return match dax.setup(&self.images, header.nodeid, body) {
                    Ok(Err(missing)) => Verdict::Wait(missing),
                    Ok(Ok(())) => Verdict::Done(self.reply_error(chain, 0)),
                    Err(error) => Verdict::Done(self.reply_error(chain, errno_of(&error))),
                };
            }
            REMOVE_MAPPING => {
                let errno = dax.remove(body).err().map_or(0, |error| errno_of(&error));
                return Verdict::Done(self.reply_error(chain, errno));
            }
            // The file system is mounted anew, so the mappings of an earlier mount are removed.
            INIT => dax.clear(),
            DESTROY => {
                dax.clear();
                return Verdict::Done(self.reply_error(chain, 0));
            }
            _ => {}
        }
        Verdict::Done(self.answer(header, message, chain))
    }

    /// Copies a message to `message` if the server may see it, and returns its header. Otherwise answers it and returns the bytes written.
    fn take(&self, chain: &Chain, message: &mut Vec<u8>) -> Result<InHeader, u32> {
        let readable = chain.readable_len();
        let is_in_memory = copy(chain, &self.guest, MAX_MESSAGE, message);
        if !is_in_memory || readable < IN_HEADER as u64 {
            return Err(0);
        }
        let header: InHeader = decode(&message[..IN_HEADER]);
        let opcode = header.opcode;
        // These messages have no reply, and the device keeps nothing about the nodes they name.
        if matches!(opcode, FORGET | BATCH_FORGET | INTERRUPT) {
            return Err(0);
        }
        // The reply's header must fit one descriptor: a shorter one comes from a broken driver, and would break the server.
        let has_room = chain
            .writable_buffers()
            .first()
            .is_some_and(|first| first.length as usize >= OUT_HEADER);
        if !has_room || chain.writable_slices(&self.guest).any(|slice| slice.is_err()) {
            tracing::debug!(opcode, "a FUSE message without room for an answer");
            return Err(0);
        }
        if opcode == WRITE {
            return Err(self.reply_error(chain, libc::EROFS));
        }
        if readable > MAX_MESSAGE as u64 || chain.writable_buffers().len() >= usize::from(DESCRIPTORS) {
            return Err(self.reply_error(chain, libc::E2BIG));
        }
        Ok(header)
    }

    /// The ranges that a READ must wait for, or the error that answers it.
    fn check_read(
        &self,
        header: &InHeader,
        body: &[u8],
        chain: &Chain,
        accesses: Option<&mut AccessLog>,
    ) -> Result<Vec<MissingRange>, i32> {
        let read: ReadIn = body.get(..size_of::<ReadIn>()).map(decode).ok_or(libc::EINVAL)?;
        if read.size > MAX_READ {
            return Err(libc::EINVAL);
        }
        let room = (chain.writable_len() - OUT_HEADER as u64).min(u64::from(MAX_READ)) as u32;
        let size = read.size.min(room);
        self.record_access(accesses, header.nodeid, Some((read.offset, u64::from(size))));
        Ok(self.images.missing(header.nodeid, read.offset, size))
    }

    /// Lets the server answer a message. Returns the bytes written.
    fn answer(&mut self, header: &InHeader, message: &[u8], chain: &Chain) -> u32 {
        let served = self.serve(message, chain);
        if metadata_lost() {
            // Lost bytes of a blob read as zeros, which may have been taken for metadata, also in this answer.
            if let Some(dropped) = self.log.pass() {
                tracing::error!(
                    opcode = header.opcode,
                    dropped,
                    "an image's metadata file is damaged, or was cut: try `thaw image verify`"
                );
            }
            return self.reply_error(chain, libc::EIO);
        }
        let Some(length) = served else {
            return self.reply_error(chain, libc::EIO);
        };
        if header.opcode == GETATTR {
            self.complete_attributes(chain, header.nodeid, length);
        }
        length
    }

    /// Reports the bytes of blobs that a range of a file consists of.
    fn record_access(&self, accesses: Option<&mut AccessLog>, node: u64, range: Option<(u64, u64)>) {
        if let (Some(accesses), Some((offset, length))) = (accesses.filter(|log| log.is_on()), range) {
            let mut record = |blob, offset, length| accesses.record(blob, offset, length);
            self.images.touched(node, offset, length, &mut record);
        }
    }

    /// Adds the flags to GETATTR's answer, because the server cannot set them. Without them an inode that can be mapped would seem to have
    /// become another.
    fn complete_attributes(&self, chain: &Chain, node: u64, length: u32) {
        let flags = self.images.attribute_flags(node);
        if flags != 0
            && length as usize == ATTRIBUTE_FLAGS + size_of::<u32>()
            && let Ok(reply) = chain.writable(&self.guest)
        {
            guest_io::copy_in(&reply, ATTRIBUTE_FLAGS, &flags.to_le_bytes());
        }
    }

    /// Lets the server answer. Returns the bytes it wrote, or `None` if it found the message malformed.
    fn serve(&mut self, message: &[u8], chain: &Chain) -> Option<u32> {
        self.memory.write_slice(message, GuestAddress(MESSAGE)).ok()?;
        let (next, write) = (VRING_DESC_F_NEXT as u16, VRING_DESC_F_WRITE as u16);
        let buffers = chain.writable_buffers();
        let first = Descriptor::new(MESSAGE, message.len() as u32, next, 1);
        self.table.clear();
        self.table.extend_from_slice(first.as_slice());
        for (buffer, following) in buffers.iter().zip(2..) {
            let flags = if following <= buffers.len() as u16 {
                write | next
            } else {
                write
            };
            let descriptor = Descriptor::new(buffer.address.0, buffer.length, flags, following);
            self.table.extend_from_slice(descriptor.as_slice());
        }
        self.memory.write_slice(&self.table, GuestAddress(SCRATCH)).ok()?;
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

    /// Answers a message with an error, or with a success without a body. Returns the bytes written.
    pub fn reply_error(&self, chain: &Chain, errno: i32) -> u32 {
        let mut head = Vec::with_capacity(IN_HEADER);
        if !copy(chain, &self.guest, IN_HEADER, &mut head) || head.len() < IN_HEADER {
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

fn errno_of(error: &std::io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Replaces `bytes` by the first bytes of a chain's message, at most `most`. Returns false if a part of the message is outside memory.
fn copy(chain: &Chain, memory: &GuestMemory, most: usize, bytes: &mut Vec<u8>) -> bool {
    bytes.clear();
    for slice in chain.readable_slices(memory) {
        let Ok(slice) = slice else { return false };
        let start = bytes.len();
        bytes.resize((start + slice.len()).min(most), 0);
        slice.copy_to(&mut bytes[start..]);
    }
    true
}

/// Decodes a message's structure, whatever its alignment. `bytes` must be as long as it.
fn decode<T: ByteValued + Default>(bytes: &[u8]) -> T {
    let mut value = T::default();
    value.as_mut_slice().copy_from_slice(bytes);
    value
}
