//! System calls that read and write guest memory directly, without a copy in this process.
//!
//! All `unsafe` code of the request path is here: it passes the kernel pointers from [`VolatileSlice`]s, whose bounds were checked when
//! they were made. The guest may change the bytes meanwhile; this module never looks at them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};
use smallvec::SmallVec;
use vm_memory::VolatileSlice;

/// Most slices that one system call takes (`IOV_MAX`).
pub const MAX_SLICES: usize = 1024;
/// Most slices for which no memory is allocated: enough for the buffers of the largest frame of a network, with the room behind them.
pub const FEW_SLICES: usize = 64;

/// The argument of a system call: on the stack, unless it is long.
type Iovecs = SmallVec<[libc::iovec; FEW_SLICES]>;

/// Bytes in `slices`.
pub fn total(slices: &[VolatileSlice<'_>]) -> usize {
    slices.iter().map(|s| s.len()).sum()
}

/// The bytes `skip..skip + take` of `slices`, or fewer if there are fewer.
pub fn part<'m>(slices: &[VolatileSlice<'m>], skip: usize, take: usize) -> Vec<VolatileSlice<'m>> {
    let mut out = Vec::with_capacity(slices.len());
    out.extend(pieces(slices, skip, take));
    out
}

/// As [`part`], one slice after the other.
fn pieces<'m>(
    slices: &[VolatileSlice<'m>],
    mut skip: usize,
    mut take: usize,
) -> impl Iterator<Item = VolatileSlice<'m>> {
    slices.iter().filter_map(move |slice| {
        let from = skip.min(slice.len());
        let n = take.min(slice.len() - from);
        skip -= from;
        take -= n;
        (n > 0).then(|| slice.subslice(from, n).ok()).flatten()
    })
}

/// Copies the bytes `skip..` of `slices` to `data`. Returns how many there were.
pub fn copy_out(slices: &[VolatileSlice<'_>], skip: usize, data: &mut [u8]) -> usize {
    let mut done = 0;
    for slice in pieces(slices, skip, data.len()) {
        done += slice.copy_to(&mut data[done..]);
    }
    done
}

/// Copies `data` over the bytes `skip..` of `slices`. Returns how many fitted.
pub fn copy_in(slices: &[VolatileSlice<'_>], skip: usize, data: &[u8]) -> usize {
    let mut done = 0;
    for slice in pieces(slices, skip, data.len()) {
        let n = slice.len();
        slice.copy_from(&data[done..done + n]);
        done += n;
    }
    done
}

/// Fills `slices` from `file` at `offset`. `UnexpectedEof` if the file ends before.
pub fn read_exact_at(file: BorrowedFd<'_>, slices: &[VolatileSlice<'_>], offset: u64) -> io::Result<()> {
    transfer(slices, offset, |iov, at| {
        // SAFETY: `iov` points to `iov.len()` entries, each naming guest memory that stays mapped and writable while
        // its slice lives; the kernel writes nowhere else.
        unsafe { libc::preadv(file.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int, at) }
    })
}

/// Writes all of `slices` to `file` at `offset`.
pub fn write_all_at(file: BorrowedFd<'_>, slices: &[VolatileSlice<'_>], offset: u64) -> io::Result<()> {
    transfer(slices, offset, |iov, at| {
        // SAFETY: as for preadv; the kernel only reads the memory named.
        unsafe { libc::pwritev(file.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int, at) }
    })
}

fn transfer(
    slices: &[VolatileSlice<'_>],
    offset: u64,
    call: impl Fn(&[libc::iovec], libc::off_t) -> isize,
) -> io::Result<()> {
    let length = total(slices);
    let mut done = 0;
    while done < length {
        let rest = part(slices, done, length - done);
        let iov = iovecs(&rest[..rest.len().min(MAX_SLICES)]);
        let at = file_offset(offset + done as u64)?;
        match call(&iov, at) {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n if n > 0 => done += n as usize,
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

/// One `preadv2` that does not wait: the bytes of `file` from `offset` that are in the page cache. Fewer than `slices` have if no more are, or
/// the file ends; `WouldBlock` if none is.
pub fn read_cached_at(file: BorrowedFd<'_>, slices: &[VolatileSlice<'_>], offset: u64) -> io::Result<usize> {
    let iov = iovecs(slices);
    let at = file_offset(offset)?;
    retry(|| {
        // SAFETY: as for preadv.
        unsafe {
            libc::preadv2(
                file.as_raw_fd(),
                iov.as_ptr(),
                iov.len() as libc::c_int,
                at,
                libc::RWF_NOWAIT,
            )
        }
    })
}

/// One `pwritev2` that appends: as many bytes as `file` takes at its end. At most [`MAX_SLICES`].
pub fn append_some(file: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let iov = iovecs(slices);
    retry(|| {
        // SAFETY: as for pwritev.
        unsafe {
            libc::pwritev2(
                file.as_raw_fd(),
                iov.as_ptr(),
                iov.len() as libc::c_int,
                0,
                libc::RWF_APPEND,
            )
        }
    })
}

/// One `recvmsg`: as many bytes as `socket` has now, and the first descriptor that came with them. The kernel closes the others.
pub fn receive_some(
    socket: BorrowedFd<'_>,
    slices: &[VolatileSlice<'_>],
) -> io::Result<(usize, Option<OwnedFd>)> {
    /// Room for one descriptor, aligned as its header wants.
    #[repr(C)]
    union Control {
        header: libc::cmsghdr,
        bytes: [u8; 32],
    }
    let mut iov = iovecs(slices);
    let mut control = Control { bytes: [0; 32] };
    // SAFETY: an all-zero msghdr is a valid empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = iov.len() as _;
    message.msg_control = (&raw mut control).cast();
    // Without padding, which would have room for another descriptor.
    // SAFETY: only computes a length.
    message.msg_controllen = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as _;
    let length = retry(|| {
        // SAFETY: as for preadv; `control` is exclusively borrowed, and has the room that `message` says.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) }
    })?;
    // SAFETY: the kernel has set the length of what it wrote to `control`, and each header there.
    let descriptor = unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        let is_descriptor = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len as usize >= libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
        // SAFETY: the kernel has just made this descriptor for this process, and nothing else knows it.
        is_descriptor.then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
    };
    Ok((length, descriptor))
}

/// One `readv`: as many bytes as `file` returns now. Bytes that do not fit `slices` go to `spill`.
pub fn read_some(file: BorrowedFd<'_>, slices: &[VolatileSlice<'_>], spill: &mut [u8]) -> io::Result<usize> {
    let mut iov = iovecs(slices);
    if !spill.is_empty() {
        iov.push(libc::iovec {
            iov_base: spill.as_mut_ptr().cast(),
            iov_len: spill.len(),
        });
    }
    retry(|| {
        // SAFETY: as for preadv; the last entry, if any, is `spill`, exclusively borrowed for the call.
        unsafe { libc::readv(file.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int) }
    })
}

/// One `writev`: as many bytes as `file` takes now.
pub fn write_some(file: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let iov = iovecs(slices);
    retry(|| {
        // SAFETY: as for pwritev.
        unsafe { libc::writev(file.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int) }
    })
}

/// One `sendmsg` without SIGPIPE: as many bytes as `socket` takes now.
pub fn send_some(socket: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut iov = iovecs(slices);
    // SAFETY: an all-zero msghdr is a valid empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = iov.len() as _;
    retry(|| {
        // SAFETY: as for pwritev; `message` and `iov` outlive the call.
        unsafe {
            libc::sendmsg(
                socket.as_raw_fd(),
                &message,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        }
    })
}

/// EINVAL, as the kernel says, if no file can be so long.
fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match call() {
            n if n >= 0 => return Ok(n as usize),
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

/// Frees the pages of `slice` on the host: when next touched, they read as zero, or as the file mapped there. `slice` must be whole pages.
pub fn discard(slice: &VolatileSlice<'_>) -> io::Result<()> {
    let address = slice.ptr_guard_mut().as_ptr();
    // SAFETY: the range is guest memory (a bounds-checked slice of a private mapping). Dropping its content changes
    // bytes only the guest and volatile accesses see; no Rust reference points into guest memory.
    let done = unsafe { libc::madvise(address.cast(), slice.len(), libc::MADV_DONTNEED) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Replaces the pages of `slice` by read-only zero pages, whatever was mapped there; [`discard`] would bring a file's bytes back. A write
/// by the guest ends its KVM_RUN with EFAULT, and a write by this process is a SIGSEGV. Huge pages are turned off: if the host has no huge
/// zero page, a read would cost 2 MiB. `slice` must be whole pages.
pub fn withdraw(slice: &VolatileSlice<'_>) -> io::Result<()> {
    let address = slice.ptr_guard_mut().as_ptr();
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: the range is guest memory (a bounds-checked slice of a private mapping), replaced by a mapping of the same kind, which the
    // mapping's owner unmaps with the rest. No Rust reference points into guest memory.
    unsafe { mmap_anonymous(address.cast(), slice.len(), ProtFlags::READ, flags) }?;
    advise_page_size(slice, Advice::LinuxNoHugepage);
    Ok(())
}

/// Makes the pages of `slice` writable after [`withdraw`], as huge pages if the host has them. `slice` must be whole pages.
pub fn provide(slice: &VolatileSlice<'_>) -> io::Result<()> {
    allow_writes(slice)?;
    advise_page_size(slice, Advice::LinuxHugepage);
    Ok(())
}

/// Makes the pages of `slice` writable, whatever is mapped there. `slice` must be whole pages.
pub fn allow_writes(slice: &VolatileSlice<'_>) -> io::Result<()> {
    let address = slice.ptr_guard_mut().as_ptr();
    let access = MprotectFlags::READ | MprotectFlags::WRITE;
    // SAFETY: the range is guest memory (a bounds-checked slice of a private mapping), which no Rust reference points into; reading and
    // writing are what guest memory is for.
    unsafe { mprotect(address.cast(), slice.len(), access) }?;
    Ok(())
}

/// Advises the kernel about huge pages. Best effort: a kernel without huge pages ignores it.
pub fn advise_page_size(slice: &VolatileSlice<'_>, advice: Advice) {
    let address = slice.ptr_guard_mut().as_ptr();
    // SAFETY: the range is guest memory (a bounds-checked slice), and neither advice changes its contents.
    if let Err(error) = unsafe { madvise(address.cast(), slice.len(), advice) } {
        tracing::debug!(%error, ?advice, "page sizes are the kernel's choice");
    }
}

fn iovecs(slices: &[VolatileSlice<'_>]) -> Iovecs {
    slices
        .iter()
        .map(|s| libc::iovec {
            iov_base: s.ptr_guard_mut().as_ptr().cast(),
            iov_len: s.len(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use vm_memory::{GuestAddress, GuestMemory as _};

    use super::*;
    use crate::memory::GuestMemory;
    use crate::virtio::testing::send_with;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap()
    }

    fn slices<'m>(memory: &'m GuestMemory, ranges: &[(u64, usize)]) -> Vec<VolatileSlice<'m>> {
        ranges
            .iter()
            .map(|(at, n)| memory.get_slice(GuestAddress(*at), *n).unwrap())
            .collect()
    }

    #[test]
    fn parts_cut_across_slices() {
        let memory = memory();
        let all = slices(&memory, &[(0, 4), (100, 4), (200, 4)]);
        assert_eq!(copy_in(&all, 2, &[1, 2, 3, 4, 5, 6]), 6);
        let mut out = [0; 12];
        assert_eq!(copy_out(&all, 0, &mut out), 12);
        assert_eq!(out, [0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0]);
        assert_eq!(total(&part(&all, 3, 6)), 6);
        assert_eq!(total(&part(&all, 11, 6)), 1);
        assert_eq!(total(&part(&all, 12, 6)), 0);
        assert_eq!(copy_in(&all, 10, &[9; 8]), 2);
    }

    #[test]
    fn few_slices_need_no_allocation() {
        let memory = memory();
        let ranges: Vec<_> = (0..FEW_SLICES as u64 + 1).map(|i| (i * 16, 8)).collect();
        let all = slices(&memory, &ranges);
        assert!(!iovecs(&all[..FEW_SLICES]).spilled());
        assert_eq!(iovecs(&all).len(), all.len());
    }

    #[test]
    fn files_are_read_and_written_in_more_slices_than_a_call_takes() {
        let memory = memory();
        let ranges: Vec<_> = (0..MAX_SLICES as u64 + 10).map(|i| (i * 16, 8)).collect();
        let all = slices(&memory, &ranges);
        let content: Vec<u8> = (0..total(&all)).map(|i| (i % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0; 5]).unwrap();
        file.write_all(&content).unwrap();
        read_exact_at(file.as_fd(), &all, 5).unwrap();
        let mut seen = vec![0; content.len()];
        copy_out(&all, 0, &mut seen);
        assert_eq!(seen, content);

        let copy = tempfile::tempfile().unwrap();
        write_all_at(copy.as_fd(), &all, 3).unwrap();
        let mut written = Vec::new();
        (&copy).read_to_end(&mut written).unwrap();
        assert_eq!(written[..3], [0; 3]);
        assert_eq!(written[3..], content);
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let memory = memory();
        let file = tempfile::tempfile().unwrap();
        let error = read_exact_at(file.as_fd(), &slices(&memory, &[(0, 8)]), 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_cached_read_ends_with_the_file_and_a_write_appends() {
        let memory = memory();
        let file = tempfile::tempfile().unwrap();
        let data = slices(&memory, &[(0, 3), (100, 4)]);
        copy_in(&data, 0, b"abcdefg");
        write_all_at(file.as_fd(), &data, 2).unwrap();
        assert_eq!(append_some(file.as_fd(), &data).unwrap(), 7);
        let place = slices(&memory, &[(200, 10), (300, 10)]);
        assert_eq!(read_cached_at(file.as_fd(), &place, 1).unwrap(), 15);
        let mut seen = [0; 15];
        copy_out(&place, 0, &mut seen);
        assert_eq!(&seen, b"\0abcdefgabcdefg");
    }

    #[test]
    fn a_descriptor_comes_with_the_bytes_it_was_sent_with() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let memory = memory();
        let place = slices(&memory, &[(0, 2), (100, 2)]);
        let (other, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        send_with(&theirs, b"abc", &[theirs.as_fd(), other.as_fd()]);
        let (length, descriptor) = receive_some(ours.as_fd(), &place).unwrap();
        assert_eq!(length, 3);
        let is_same = rustix::fs::fstat(descriptor.unwrap()).unwrap().st_ino
            == rustix::fs::fstat(&theirs).unwrap().st_ino;
        assert!(is_same);
        drop(other);
        far.set_nonblocking(true).unwrap();
        assert_eq!(far.read(&mut [0]).unwrap(), 0, "the second was closed");
        (&theirs).write_all(b"d").unwrap();
        let (length, descriptor) = receive_some(ours.as_fd(), &place).unwrap();
        assert!(length == 1 && descriptor.is_none());
    }

    #[test]
    fn discarded_pages_read_as_zero() {
        let memory = memory();
        let page = slices(&memory, &[(0x1000, 0x1000)]);
        copy_in(&page, 0, &[7; 0x1000]);
        discard(&page[0]).unwrap();
        let mut byte = [9];
        copy_out(&page, 0, &mut byte);
        assert_eq!(byte, [0]);
    }
}
