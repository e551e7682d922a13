//! The files that the guest has open and thaw-share has handed over. This process reads and writes them itself.
//!
//! Invariants: a message about such a file has the effect and the reply that it would have from thaw-share, or it goes there. A read does not
//! wait for its bytes: those that are not in the host's page cache are left to thaw-share. (The kernel may note the time of the access, and wait
//! for the file system's journal to do so.) A write may wait, so it is a [`Call`], made without the device's lock. One that failed goes to
//! thaw-share, which has other rights and limits, and so do all for [`PAUSE`] after one that took [`LONG`], because there other requests need not
//! wait for them.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fuse_backend_rs::abi::fuse_abi::{
    EntryOut, InHeader, OpenOut, OutHeader, ReadIn, ReleaseIn, WRITE_CACHE, WriteIn, WriteOut,
};
use rustix::fs::FileType;
use thaw_protocol::share::{CREATE, DESTROY, INIT, OPEN, READ, RELEASE, WRITE};
use thaw_sys::lock::Lock;
use vm_memory::{ByteValued, VolatileSlice};

use super::request::Request;
use crate::memory::GuestMemory;
use crate::virtio::device::Call;
use crate::virtio::flight::InFlight;
use crate::virtio::guest_io::{self, MAX_SLICES};

/// Most files. Messages about more go to thaw-share.
const FILES: usize = 256;
const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();
/// A write that took this long had to wait for more than the page cache.
const LONG: Duration = Duration::from_millis(50);
/// How long no write is made here after such a one.
const PAUSE: Duration = Duration::from_secs(1);

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
    /// Until then writes are thaw-share's.
    paused_until: Option<Instant>,
    outcome: Arc<Mutex<Outcome>>,
}

/// What became of the last write, besides its reply.
#[derive(Default)]
struct Outcome {
    /// The request, if thaw-share is to make the write.
    unserved: Option<Request>,
    /// The write ends here, which is too far for this process.
    too_far: Option<u64>,
    took_long: bool,
}

impl Default for OpenFiles {
    fn default() -> OpenFiles {
        OpenFiles {
            files: HashMap::new(),
            largest: u64::MAX,
            paused_until: None,
            outcome: Arc::default(),
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

    /// Forgets the files that a message which goes to thaw-share closes.
    pub fn see(&mut self, asked: &InHeader, request: &Request, memory: &GuestMemory) {
        match asked.opcode {
            RELEASE => {
                if let Some(release) = request.body::<ReleaseIn>(memory) {
                    self.files.remove(&release.fh);
                }
            }
            INIT | DESTROY => self.clear(),
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
        let is_paused = self.paused_until.is_some_and(|until| Instant::now() < until);
        let end = write.offset.saturating_add(write.size.into());
        (has_data && has_room && end <= self.largest && !is_paused).then(|| Write {
            file: open.file.clone(),
            outcome: self.outcome.clone(),
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
        *self.outcome.locked() = Outcome::default();
    }

    /// A write has been made. Returns its request, if thaw-share is to make it after all.
    pub fn called(&mut self) -> Option<Request> {
        let outcome = std::mem::take(&mut *self.outcome.locked());
        if let Some(end) = outcome.too_far {
            self.largest = self.largest.min(end.saturating_sub(1));
        }
        if outcome.took_long {
            self.paused_until = Some(Instant::now() + PAUSE);
        }
        outcome.unserved
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
    outcome: Arc<Mutex<Outcome>>,
    offset: u64,
    size: usize,
    /// At the file's end, wherever that is.
    appends: bool,
    unique: u64,
}

impl Write {
    /// Writes all of `data`, or some of it to the file's end. Returns how many bytes were written.
    fn make(&self, data: &[VolatileSlice<'_>]) -> io::Result<usize> {
        // The kernel would clear these bits, because this process lacks CAP_FSETID.
        if rustix::fs::fstat(&self.file)?.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if self.appends {
            return guest_io::append_some(self.file.as_fd(), &data[..data.len().min(MAX_SLICES)]);
        }
        guest_io::write_all_at(self.file.as_fd(), data, self.offset)?;
        Ok(guest_io::total(data))
    }
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
        let begun = Instant::now();
        let made = write.make(&data);
        let took_long = begun.elapsed() >= LONG;
        let size = match made {
            Ok(size) => size,
            Err(error) => {
                // To be made again, and whole: the same bytes at the same place, if some were written.
                let is_too_far = error.raw_os_error() == Some(libc::EFBIG) && !write.appends;
                *write.outcome.locked() = Outcome {
                    unserved: Some(request),
                    too_far: is_too_far.then(|| write.offset.saturating_add(write.size as u64)),
                    took_long,
                };
                return;
            }
        };
        write.outcome.locked().took_long = took_long;
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
        drop(write);
        in_flight.end(reply.len);
    }
}

/// Whether it is a regular file, whose calls have offsets and end.
fn is_regular(file: &OwnedFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}
