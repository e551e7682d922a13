//! The files that the guest has open and thaw-share has handed over. This process reads and writes them itself.
//!
//! Invariants: a message about such a file has the effect and the reply that it would have from thaw-share, or it goes there. A read does not
//! wait: bytes that are not in the host's page cache are left to thaw-share. A write may wait, so it is a [`Call`], made without the device's
//! lock.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use fuse_backend_rs::abi::fuse_abi::{
    EntryOut, InHeader, OpenOut, OutHeader, ReadIn, ReleaseIn, SetattrIn, WRITE_CACHE, WriteIn, WriteOut,
};
use rustix::fs::FileType;
use thaw_protocol::share::{CREATE, OPEN, READ, RELEASE, SETATTR, WRITE};
use thaw_sys::lock::Lock;
use vm_memory::ByteValued;

use super::request::Request;
use crate::memory::GuestMemory;
use crate::virtio::device::Call;
use crate::virtio::flight::InFlight;
use crate::virtio::guest_io::{self, MAX_SLICES};

/// Most files. Messages about more go to thaw-share.
const FILES: usize = 256;
const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();
/// `FATTR_MODE` of `struct fuse_setattr_in`: the mode is to change.
const CHANGES_MODE: u32 = 1;
/// The set-user-ID and set-group-ID bits.
const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;

/// A file that was handed over.
struct OpenFile {
    node: u64,
    file: Arc<OwnedFd>,
    /// Whether its file system can read without waiting.
    reads_cached: bool,
}

/// The files.
pub struct OpenFiles {
    /// By the guest's handle.
    files: HashMap<u64, OpenFile>,
    /// Writes that end behind this are thaw-share's. This process may write no larger files than its own disk (`RLIMIT_FSIZE`).
    largest: u64,
    /// The write that turned out to be too large for this process.
    too_large: Arc<Mutex<Option<TooLarge>>>,
}

impl Default for OpenFiles {
    fn default() -> OpenFiles {
        OpenFiles {
            files: HashMap::new(),
            largest: u64::MAX,
            too_large: Arc::default(),
        }
    }
}

impl OpenFiles {
    /// Adds the file that came with the reply of `length` bytes to this request. The guest can change both meanwhile, and then uses its own
    /// file by another handle.
    pub fn add(&mut self, request: &Request, length: u32, memory: &GuestMemory, file: OwnedFd) {
        let asked = request.header(memory);
        let opened_at = match asked.opcode {
            OPEN => OUT_HEADER,
            CREATE => OUT_HEADER + size_of::<EntryOut>(),
            _ => return,
        };
        let is_whole = length as usize == opened_at + size_of::<OpenOut>();
        let is_usable = is_whole && request.reply_header(memory).error == 0 && is_regular(&file);
        if !is_usable || self.files.len() >= FILES {
            return;
        }
        let node = match asked.opcode {
            CREATE => request
                .replied::<EntryOut>(memory, OUT_HEADER)
                .map(|entry| entry.nodeid),
            _ => Some(asked.nodeid),
        };
        let opened = request.replied::<OpenOut>(memory, opened_at);
        if let (Some(node), Some(opened)) = (node, opened) {
            let open = OpenFile {
                node,
                file: Arc::new(file),
                reads_cached: true,
            };
            self.files.insert(opened.fh, open);
        }
    }

    /// Forgets what a message that goes to thaw-share ends: a handle, or that a write may clear bits of the mode as the VMM's does.
    pub fn see(&mut self, asked: &InHeader, request: &Request, memory: &GuestMemory) {
        match asked.opcode {
            RELEASE => {
                if let Some(release) = request.body::<ReleaseIn>(memory) {
                    self.files.remove(&release.fh);
                }
            }
            SETATTR => {
                let change = request.body::<SetattrIn>(memory);
                if change.is_some_and(|change| change.valid & CHANGES_MODE != 0 && change.mode & SET_ID != 0)
                {
                    self.files.retain(|_, open| open.node != asked.nodeid);
                }
            }
            _ => {}
        }
    }

    /// Reads, if the message is a READ of such a file whose bytes are in the page cache. Returns the length of the reply that was written.
    pub fn read(&mut self, asked: &InHeader, request: &Request, memory: &GuestMemory) -> Option<u32> {
        if asked.opcode != READ || self.files.is_empty() {
            return None;
        }
        let read = request.body::<ReadIn>(memory)?;
        let open = self
            .files
            .get_mut(&read.fh)
            .filter(|open| open.node == asked.nodeid)?;
        let room = (request.room as usize).checked_sub(OUT_HEADER)?;
        let place = request.chain.writable(memory).ok()?;
        let bytes = guest_io::part(&place, OUT_HEADER, room.min(read.size as usize));
        if !open.reads_cached || bytes.len() > MAX_SLICES {
            return None;
        }
        let got = match guest_io::read_cached_at(open.file.as_fd(), &bytes, read.offset) {
            Ok(got) => got,
            Err(error) => {
                open.reads_cached = error.raw_os_error() != Some(libc::EOPNOTSUPP);
                return None;
            }
        };
        if got < guest_io::total(&bytes) && !open.ends_at(read.offset + got as u64) {
            return None;
        }
        let reply = OutHeader {
            len: (OUT_HEADER + got) as u32,
            error: 0,
            unique: asked.unique,
        };
        guest_io::copy_in(&place, 0, reply.as_slice());
        Some(reply.len)
    }

    /// The write, if the message is a WRITE to such a file.
    pub fn write(&self, asked: &InHeader, request: &Request, memory: &GuestMemory) -> Option<Write> {
        if asked.opcode != WRITE || self.files.is_empty() {
            return None;
        }
        let write = request.body::<WriteIn>(memory)?;
        let open = self
            .files
            .get(&write.fh)
            .filter(|open| open.node == asked.nodeid)?;
        let has_data = request.length as usize >= DATA_AT + write.size as usize;
        let has_room = request.room as usize >= OUT_HEADER + size_of::<WriteOut>();
        let end = write.offset.saturating_add(write.size.into());
        (has_data && has_room && end <= self.largest).then(|| Write {
            file: open.file.clone(),
            too_large: self.too_large.clone(),
            offset: write.offset,
            size: write.size as usize,
            // As virtiofsd does: the kernel that writes pages back knows where they belong.
            appends: write.flags & libc::O_APPEND as u32 != 0 && write.fuse_flags & WRITE_CACHE == 0,
            unique: asked.unique,
        })
    }

    /// Forgets all files. No write is being made.
    pub fn clear(&mut self) {
        self.files.clear();
        self.too_large.locked().take();
    }

    /// The request of the last write, if thaw-share is to make it.
    pub fn too_large(&mut self) -> Option<Request> {
        let TooLarge { request, end } = self.too_large.locked().take()?;
        self.largest = self.largest.min(end.saturating_sub(1));
        Some(request)
    }
}

impl OpenFile {
    fn ends_at(&self, offset: u64) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| stat.st_size as u64 <= offset)
    }
}

/// Where the data of a WRITE begins.
const DATA_AT: usize = IN_HEADER + size_of::<WriteIn>();

/// A write to a file.
pub struct Write {
    file: Arc<OwnedFd>,
    too_large: Arc<Mutex<Option<TooLarge>>>,
    offset: u64,
    size: usize,
    /// At the file's end, wherever that is.
    appends: bool,
    unique: u64,
}

/// A request to write more than this process may.
struct TooLarge {
    request: Request,
    /// Where the write would end.
    end: u64,
}

/// A write with the request that it answers.
pub struct WriteCall {
    pub write: Write,
    pub request: Request,
    pub memory: GuestMemory,
    pub in_flight: InFlight,
}

impl Call for WriteCall {
    fn make(self: Box<Self>) {
        let WriteCall {
            write,
            request,
            memory,
            in_flight,
        } = *self;
        let (Ok(message), Ok(place)) = (request.chain.readable(&memory), request.chain.writable(&memory))
        else {
            // Impossible: both were in guest memory when the request was taken, and guest memory stays.
            return;
        };
        let data = guest_io::part(&message, DATA_AT, write.size);
        let length = match guest_io::write_at(write.file.as_fd(), &data, write.offset, write.appends) {
            Ok(size) => {
                let reply = OutHeader {
                    len: (OUT_HEADER + size_of::<WriteOut>()) as u32,
                    error: 0,
                    unique: write.unique,
                };
                let size = WriteOut {
                    size: size as u32,
                    padding: 0,
                };
                guest_io::copy_in(&place, 0, reply.as_slice());
                guest_io::copy_in(&place, OUT_HEADER, size.as_slice());
                reply.len
            }
            Err(error) if error.raw_os_error() == Some(libc::EFBIG) => {
                let end = write.offset.saturating_add(write.size as u64);
                *write.too_large.locked() = Some(TooLarge { request, end });
                // The request is not answered yet.
                return;
            }
            Err(error) => request.write_error(&memory, error.raw_os_error().unwrap_or(libc::EIO)),
        };
        drop(write);
        in_flight.end(length);
    }
}

/// Whether it is a regular file, whose calls have offsets and end.
fn is_regular(file: &OwnedFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}
