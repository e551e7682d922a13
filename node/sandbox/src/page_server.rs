//! Fills a machine's memory on demand by userfaultfd(2), for memory that is not mapped from a local file.
//!
//! Invariant: the machine gets no byte before that byte's complete chunk was compared with the manifest. If a chunk cannot be fetched or
//! does not match the manifest, the machine ends.
//!
//! The userfaultfd belongs to the VMM, which may be hostile: it may close it, unmap the memory, ask for events that stop the
//! kernel from filling pages until they are read, or make the descriptor block. Each of these ends the machine. The server checks
//! whether it should stop at least every [`FAULTS`] faults, tries to fill a page at most [`TRIES`] times, and waits for at most
//! [`MOST_WAITING`] chunks at once.
//!
//! A fault that one server has read and not served before its process ended is served by the next: a server begins by waking all threads
//! that wait for a page, which then fault again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::pipe::PipeFlags;
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::control::MappedRegion;

use crate::snapshot::Hash;
use crate::snapshot::manifest::{CHUNK, ChunkedFile};

const PAGE: u64 = 4096;
/// Size of `struct uffd_msg` (linux/userfaultfd.h).
const MESSAGE: usize = 32;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
/// `_IOWR(0xAA, nr, size)` and `_IOR` of linux/userfaultfd.h.
const UFFDIO_WAKE: libc::c_ulong = 0x8010_AA02;
const UFFDIO_COPY: libc::c_ulong = 0xC028_AA03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xC020_AA04;

/// Number of faults served before the server checks whether it should stop.
const FAULTS: usize = 64;
/// No offset: reads at the descriptor's own position, as read(2) does (preadv2(2)).
const NO_OFFSET: u64 = u64::MAX;
/// How often to retry when the kernel cannot fill a page now. The kernel refuses briefly while it collects page tables, and for as long as
/// an event that the VMM asked for waits to be read.
const TRIES: u32 = 1000;
/// Chunks of one machine that are obtained at once. While there are so many, its other faults wait.
const MOST_WAITING: usize = 64;
/// Seconds that a server may take to end when it is dropped. It takes longer only before Linux 6.10, if the VMM makes its userfaultfd block
/// just before it is read.
const END_LIMIT_S: i64 = 5;
/// The target of a userfaultfd's link in /proc.
pub const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// Source of the chunks of a memory file. It need not be trusted: each chunk is compared.
pub trait PageSource: Send {
    /// Reads chunk `number` into `buffer`, which has the chunk's length. Beyond the source's end are zeros. Returns false if the chunk is
    /// not on this host: it is being obtained from now on, and will be among [`Self::arrived`].
    fn read(&mut self, number: u64, buffer: &mut [u8]) -> io::Result<bool>;

    /// The chunks that were obtained since the last call, and why others cannot be.
    fn arrived(&mut self) -> Vec<(u64, Result<(), String>)> {
        Vec::new()
    }

    /// Readable when there is something in [`Self::arrived`]. `None` if all chunks are on this host.
    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Bytes of the memory file.
    fn bytes(&self) -> u64;

    /// The hash of chunk `number`; `None` if all of it is zero.
    fn hash(&self, number: u64) -> Option<Hash>;
}

/// A memory file on this host.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    bytes: u64,
    hashes: Vec<Option<Hash>>,
}

impl FileSource {
    /// `expected` comes from the manifest.
    pub fn new(file: File, expected: &ChunkedFile) -> FileSource {
        FileSource {
            file,
            bytes: expected.bytes,
            hashes: expected.by_chunk(),
        }
    }
}

impl PageSource for FileSource {
    fn read(&mut self, number: u64, buffer: &mut [u8]) -> io::Result<bool> {
        let mut at = 0;
        while at < buffer.len() {
            match self.file.read_at(&mut buffer[at..], number * CHUNK + at as u64) {
                Ok(0) => {
                    buffer[at..].fill(0);
                    return Ok(true);
                }
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn hash(&self, number: u64) -> Option<Hash> {
        self.hashes.get(usize::try_from(number).ok()?).copied().flatten()
    }
}

/// Serves one machine's faults on its own thread, until it is dropped.
#[derive(Debug)]
pub struct PageServer {
    stop: OwnedFd,
    /// A pipe whose other end the thread holds.
    ended: OwnedFd,
}

impl PageServer {
    /// Serves `userfaultfd`, which watches `regions`. Calls `broken` with the reason if a fault cannot be served.
    ///
    /// # Errors
    /// `InvalidData` if the VMM sent something that is not a userfaultfd, or regions that no address space can have.
    pub fn start(
        userfaultfd: OwnedFd,
        regions: &[MappedRegion],
        source: impl PageSource + 'static,
        broken: impl FnOnce(String) + Send + 'static,
    ) -> io::Result<PageServer> {
        check_descriptor(&userfaultfd)?;
        check_regions(regions)?;
        rustix::io::ioctl_fionbio(&userfaultfd, true)?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let ours = stop.try_clone()?;
        let mut server = Server {
            served: vec![false; source.bytes().div_ceil(CHUNK) as usize],
            userfaultfd,
            never_waits: true,
            regions: regions.to_vec(),
            source,
            waiting: BTreeMap::new(),
            buffer: Vec::new(),
        };
        let (ended, ending) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        std::thread::Builder::new().name("pages".into()).spawn(move || {
            let _ending = ending;
            if let Err(reason) = server.run(&ours) {
                tracing::error!("cannot serve a machine's memory: {reason}");
                broken(reason);
            }
        })?;
        Ok(PageServer { stop, ended })
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let mut ended = [PollFd::new(&self.ended, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: END_LIMIT_S,
            tv_nsec: 0,
        };
        let ended = rustix::io::retry_on_intr(|| rustix::event::poll(&mut ended, Some(&limit)));
        if ended == Ok(0) {
            tracing::error!("a page server does not end: its VMM made its userfaultfd block");
        }
    }
}

struct Server<S> {
    userfaultfd: OwnedFd,
    /// Whether reads from the descriptor cannot block, as far as is known.
    never_waits: bool,
    regions: Vec<MappedRegion>,
    source: S,
    /// Chunks whose data has been copied.
    served: Vec<bool>,
    /// Pages that threads of the machine wait for, by chunks that are being obtained.
    waiting: BTreeMap<u64, BTreeSet<u64>>,
    buffer: Vec<u8>,
}

impl<S: PageSource> Server<S> {
    fn run(&mut self, stop: &OwnedFd) -> Result<(), String> {
        match self.serve_all(stop) {
            // The process has ended, and its memory is gone.
            Ok(()) | Err(Error::Gone) => Ok(()),
            Err(Error::Broken(reason)) => Err(reason),
        }
    }

    fn serve_all(&mut self, stop: &OwnedFd) -> Result<(), Error> {
        self.wake_all()?;
        loop {
            let takes = self.waiting.len() < MOST_WAITING;
            let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
            let wakes = self.source.wakes();
            fds.extend(wakes.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            if takes {
                fds.push(PollFd::new(&self.userfaultfd, PollFlags::IN));
            }
            match rustix::event::poll(&mut fds, None) {
                Ok(_) if !fds[0].revents().is_empty() => return Ok(()),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(e) => return Err(Error::Broken(format!("poll: {e}"))),
            }
            let faults = fds.last().filter(|_| takes).map(PollFd::revents);
            drop(fds);
            self.serve_arrived()?;
            match faults {
                Some(ready) if ready == PollFlags::IN => self.serve_faults()?,
                // Polling a userfaultfd that blocks returns at once, with other events. Reading it might wait for ever.
                Some(other) if !other.is_empty() => {
                    let what = "the VMM's userfaultfd cannot be waited for: it was made to block";
                    return Err(Error::Broken(what.into()));
                }
                _ => {}
            }
        }
    }

    fn serve_faults(&mut self) -> Result<(), Error> {
        for _ in 0..FAULTS {
            if self.waiting.len() >= MOST_WAITING {
                break;
            }
            let Some(address) = self.next_fault().map_err(Error::Broken)? else {
                break;
            };
            reach(Failpoint::PagesFaultRead);
            self.serve(address)?;
            reach(Failpoint::PagesFaultServed);
        }
        Ok(())
    }

    /// Serves the faults in chunks that were obtained since the last call.
    fn serve_arrived(&mut self) -> Result<(), Error> {
        for (number, obtained) in self.source.arrived() {
            obtained.map_err(|why| broken(number, why))?;
            let Some(pages) = self.waiting.remove(&number) else {
                continue;
            };
            if !self.copy_chunk(number)? {
                return Err(broken(number, "it was obtained, and is not there".into()));
            }
            pages.into_iter().try_for_each(|page| self.end_fault(page))?;
        }
        Ok(())
    }

    /// Wakes all threads that wait for a page.
    fn wake_all(&self) -> Result<(), Error> {
        let mut regions = self.regions.iter().filter(|region| region.size > 0);
        regions.try_for_each(|region| self.wake(region.host_address, region.size))
    }

    /// The address of the next pending fault.
    fn next_fault(&mut self) -> Result<Option<u64>, String> {
        let mut message = [0u8; MESSAGE];
        match self.read(&mut message) {
            Ok(MESSAGE) if message[0] == UFFD_EVENT_PAGEFAULT => Ok(Some(fault_address(&message))),
            Ok(n) => Err(format!(
                "an event of {n} bytes, kind {:#x}, that was not asked for",
                message[0]
            )),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(e) => Err(format!("read: {e}")),
        }
    }

    /// Reads without waiting, even if the VMM made the descriptor block.
    fn read(&mut self, message: &mut [u8]) -> rustix::io::Result<usize> {
        if self.never_waits {
            let into = &mut [IoSliceMut::new(message)];
            match rustix::io::preadv2(&self.userfaultfd, into, NO_OFFSET, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => self.never_waits = false,
                read => return read,
            }
        }
        // Before Linux 6.10, a read can block if the VMM made the descriptor block and withdrew the fault after this poll.
        let mut fds = [PollFd::new(&self.userfaultfd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&Timespec::default()))? {
            1 if fds[0].revents() == PollFlags::IN => rustix::io::read(&self.userfaultfd, message),
            _ => Err(Errno::AGAIN),
        }
    }

    fn serve(&mut self, address: u64) -> Result<(), Error> {
        let page = address & !(PAGE - 1);
        let offset = file_offset(&self.regions, page)
            .ok_or_else(|| Error::Broken(format!("a fault at {address:#x}, where no memory is")))?;
        let number = offset / CHUNK;
        if let Some(pages) = self.waiting.get_mut(&number) {
            pages.insert(page);
            return Ok(());
        }
        let new = self.served.get(number as usize).is_some_and(|served| !served);
        if new && self.source.hash(number).is_some() && !self.copy_chunk(number)? {
            self.waiting.insert(number, BTreeSet::from([page]));
            return Ok(());
        }
        self.end_fault(page)
    }

    /// Ends a fault after the chunk's data was copied.
    fn end_fault(&self, page: u64) -> Result<(), Error> {
        // Zero if the chunk has no data there, or if the machine released its page after it was served.
        match self.zero(page)? {
            true => Ok(()),
            false => self.wake(page, PAGE),
        }
    }

    /// Compares one chunk with its hash, and copies its non-zero pages to the machine. Returns false if it is not on this host yet.
    fn copy_chunk(&mut self, number: u64) -> Result<bool, Error> {
        let start = number * CHUNK;
        let length = CHUNK.min(self.source.bytes() - start);
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.resize(length as usize, 0);
        let read = self.source.read(number, &mut buffer);
        if !read.map_err(|e| broken(number, e.to_string()))? {
            self.buffer = buffer;
            return Ok(false);
        }
        if Some(Hash::of(&buffer)) != self.source.hash(number) {
            return Err(broken(number, "it is not what the manifest says".into()));
        }
        for (index, page) in buffer.chunks_exact(PAGE as usize).enumerate() {
            if page.iter().any(|b| *b != 0)
                && let Some(address) = host_address(&self.regions, start + index as u64 * PAGE)
            {
                self.copy(address, page)?;
            }
        }
        self.served[number as usize] = true;
        self.buffer = buffer;
        Ok(true)
    }

    /// Fills a page, unless the page exists already.
    fn copy(&self, address: u64, page: &[u8]) -> Result<(), Error> {
        // struct uffdio_copy: dst, src, len, mode, copy.
        let mut request = [address, page.as_ptr() as u64, PAGE, 0, 0];
        self.fill(UFFDIO_COPY, &mut request).map(drop)
    }

    /// Fills a page with zeros. Returns false if the page exists already.
    fn zero(&self, address: u64) -> Result<bool, Error> {
        // struct uffdio_zeropage: range (start, len), mode, zeropage.
        let mut request = [address, PAGE, 0, 0];
        self.fill(UFFDIO_ZEROPAGE, &mut request)
    }

    fn fill(&self, operation: libc::c_ulong, request: &mut [u64]) -> Result<bool, Error> {
        for _ in 0..TRIES {
            match self.ioctl(operation, request) {
                Ok(()) => return Ok(true),
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => return Ok(false),
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Err(Error::Gone),
                Err(e) => return Err(Error::Broken(format!("a page cannot be filled: {e}"))),
            }
        }
        let what = "a page cannot be filled: the machine's mappings go on changing";
        Err(Error::Broken(what.into()))
    }

    /// Wakes the threads that wait for pages in a range.
    fn wake(&self, address: u64, bytes: u64) -> Result<(), Error> {
        match self.ioctl(UFFDIO_WAKE, &mut [address, bytes]) {
            Ok(()) => Ok(()),
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Err(Error::Gone),
            Err(e) => Err(Error::Broken(format!("a fault cannot be ended: {e}"))),
        }
    }

    fn ioctl(&self, operation: libc::c_ulong, request: &mut [u64]) -> io::Result<()> {
        let fd = self.userfaultfd.as_fd().as_raw_fd();
        // SAFETY: `request` is as long as the structure that `operation` names, and is written only within it; a source
        // address in it points to a page-sized buffer that lives across the call, and is only read.
        match unsafe { libc::ioctl(fd, operation, request.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

enum Error {
    /// The process has ended.
    Gone,
    Broken(String),
}

fn broken(chunk: u64, what: String) -> Error {
    Error::Broken(format!("memory chunk {chunk}: {what}"))
}

/// Refuses anything but a userfaultfd, whose reads and ioctls could have any effect.
fn check_descriptor(userfaultfd: &OwnedFd) -> io::Result<()> {
    let is = std::fs::read_link(format!("/proc/self/fd/{}", userfaultfd.as_raw_fd()))?;
    if is != Path::new(USERFAULTFD) {
        let what = format!("the VMM made {} for a userfaultfd", is.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(())
}

/// Refuses regions whose addresses or file offsets overflow.
fn check_regions(regions: &[MappedRegion]) -> io::Result<()> {
    let mut before = 0u64;
    for region in regions {
        let end = before.checked_add(region.size);
        let (Some(end), Some(_)) = (end, region.host_address.checked_add(region.size)) else {
            let what = format!("the VMM maps {region:?}, which no address space has");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        };
        before = end;
    }
    Ok(())
}

/// `arg.pagefault.address` of a `struct uffd_msg`.
fn fault_address(message: &[u8; MESSAGE]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&message[16..24]);
    u64::from_ne_bytes(bytes)
}

/// The offset in the memory file of the byte at this address in the VMM.
fn file_offset(regions: &[MappedRegion], address: u64) -> Option<u64> {
    let mut before = 0;
    for region in regions {
        if let Some(within) = address.checked_sub(region.host_address)
            && within < region.size
        {
            return Some(before + within);
        }
        before += region.size;
    }
    None
}

/// The reverse.
fn host_address(regions: &[MappedRegion], offset: u64) -> Option<u64> {
    let mut left = offset;
    for region in regions {
        if left < region.size {
            return Some(region.host_address + left);
        }
        left -= region.size;
    }
    None
}

#[cfg(test)]
#[path = "page_server_test.rs"]
mod tests;
