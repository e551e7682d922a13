//! Which pages of this process are present and which were written, read from a descriptor of `/proc/<pid>/pagemap`.
//!
//! Unlike KVM's dirty log it covers writes of the devices in this process. A page of a private file mapping that was only read is a page of
//! the file; the first write makes it anonymous, and the kernel reports which it is (linux/Documentation/admin-guide/mm/pagemap.rst: bit 63
//! present, 62 swapped, 61 file page or shared).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use vm_memory::{MmapRegion, VolatileMemory};

use super::PAGE;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE: u64 = 1 << 61;

/// Entries read at once: 32 MiB of memory.
const ENTRIES: usize = 8192;

/// How this process has used a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Never touched, or discarded.
    Absent,
    /// A page of the mapped file: only read.
    Read,
    /// A page of this process's own: written, or read where nothing is mapped (the kernel's zero page).
    Written,
}

impl PageKind {
    fn of(entry: u64) -> PageKind {
        if entry & (PRESENT | SWAPPED) == 0 {
            PageKind::Absent
        } else if entry & FILE != 0 {
            PageKind::Read
        } else {
            PageKind::Written
        }
    }

    /// The same of a write-protected page. One that is not present may be swapped out, or the kernel's mark of the protection: absent.
    fn of_protected(entry: u64) -> PageKind {
        match entry & PRESENT {
            0 => PageKind::Absent,
            _ => PageKind::of(entry),
        }
    }
}

/// This process's pagemap.
pub struct Pagemap<'f> {
    file: &'f File,
}

impl<'f> Pagemap<'f> {
    /// Returns `None` if the descriptor is not of this process. To find out, it looks up a page before and after writing to it. A wrong
    /// descriptor would lose memory silently.
    pub fn new(file: &'f File) -> io::Result<Option<Pagemap<'f>>> {
        let pagemap = Pagemap { file };
        let probe = MmapRegion::<()>::new(PAGE as usize).map_err(io::Error::other)?;
        let before = pagemap.kind(probe.as_ptr() as u64)?;
        probe.get_ref::<u8>(0).map_err(io::Error::other)?.store(1);
        let after = pagemap.kind(probe.as_ptr() as u64)?;
        let ours = (before, after) == (Some(PageKind::Absent), Some(PageKind::Written));
        Ok(ours.then_some(pagemap))
    }

    /// The kind of one page, or `None` if the file has no entry for it.
    fn kind(&self, host_address: u64) -> io::Result<Option<PageKind>> {
        let mut kind = None;
        match self.runs(host_address, PAGE, |_, of| kind = Some(of)) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            result => result.map(|()| kind),
        }
    }

    /// Calls `each` with every run of neighbouring pages of one kind, as offsets from `host_address`, in order.
    pub fn runs(
        &self,
        host_address: u64,
        size: u64,
        each: impl FnMut(Range<u64>, PageKind),
    ) -> io::Result<()> {
        self.runs_as(PageKind::of, host_address, size, each)
    }

    /// As [`Self::runs`], of pages that are write-protected. Those that are swapped out look absent.
    pub fn protected_runs(
        &self,
        host_address: u64,
        size: u64,
        each: impl FnMut(Range<u64>, PageKind),
    ) -> io::Result<()> {
        self.runs_as(PageKind::of_protected, host_address, size, each)
    }

    fn runs_as(
        &self,
        kind_of: fn(u64) -> PageKind,
        host_address: u64,
        size: u64,
        mut each: impl FnMut(Range<u64>, PageKind),
    ) -> io::Result<()> {
        let pages = size / PAGE;
        let mut buffer = vec![0; ENTRIES.min(pages as usize) * 8];
        let mut run: Option<(u64, PageKind)> = None;
        let mut page = 0;
        while page < pages {
            let count = (pages - page).min(ENTRIES as u64);
            let bytes = &mut buffer[..count as usize * 8];
            self.file.read_exact_at(bytes, (host_address / PAGE + page) * 8)?;
            for (index, entry) in bytes.as_chunks::<8>().0.iter().enumerate() {
                let kind = kind_of(u64::from_ne_bytes(*entry));
                let at = (page + index as u64) * PAGE;
                match run {
                    Some((_, last)) if last == kind => {}
                    _ => {
                        if let Some((start, last)) = run.replace((at, kind)) {
                            each(start..at, last);
                        }
                    }
                }
            }
            page += count;
        }
        if let Some((start, last)) = run {
            each(start..pages * PAGE, last);
        }
        Ok(())
    }
}
