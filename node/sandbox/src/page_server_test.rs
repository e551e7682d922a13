use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

#[path = "page_server_late_test.rs"]
mod late;

const REGIONS: [u64; 2] = [CHUNK + 2 * PAGE, 3 * PAGE];

/// Anonymous memory watched by a userfaultfd while this lives.
struct Watched {
    address: usize,
    size: usize,
}

impl Watched {
    /// `None` if this host does not allow it; the reason has been reported.
    fn new(size: u64) -> Option<(Watched, OwnedFd)> {
        Watched::with_features(size, 0)
    }

    fn with_features(size: u64, features: u64) -> Option<(Watched, OwnedFd)> {
        use std::os::fd::FromRawFd;
        let size = size as usize;
        // SAFETY: no memory of ours is named.
        let fd = match unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } {
            -1 => {
                thaw_test_skip::skip(format!("userfaultfd: {}", io::Error::last_os_error()));
                return None;
            }
            // SAFETY: the descriptor the kernel just made.
            fd => unsafe { OwnedFd::from_raw_fd(fd as i32) },
        };
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), size, prot, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        // struct uffdio_api: api, features, ioctls; struct uffdio_register: start, len, mode (missing), ioctls.
        let mut api = [0xAAu64, features, 0];
        let mut register = [address as u64, size as u64, 1, 0];
        // SAFETY: both structures are as long as the kernel expects.
        unsafe {
            assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xC018_AA3F, api.as_mut_ptr()), 0);
            assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xC020_AA00, register.as_mut_ptr()), 0);
        }
        let address = address as usize;
        Some((Watched { address, size }, fd))
    }

    fn read(&self, offset: u64) -> u8 {
        assert!((offset as usize) < self.size);
        // SAFETY: within the mapping, which lives as long as `self`; faults are served.
        unsafe { ((self.address + offset as usize) as *const u8).read_volatile() }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: our mapping, to which nothing points any more.
        unsafe { libc::munmap(self.address as *mut libc::c_void, self.size) };
    }
}

fn regions(watched: &Watched) -> [MappedRegion; 2] {
    // The order of the regions in the address space is the reverse of that in the file.
    let first = watched.address as u64 + REGIONS[1];
    [
        MappedRegion {
            host_address: first,
            size: REGIONS[0],
            guest_address: 0,
        },
        MappedRegion {
            host_address: watched.address as u64,
            size: REGIONS[1],
            guest_address: 1 << 32,
        },
    ]
}

fn memory() -> (File, ChunkedFile) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(REGIONS.iter().sum()).unwrap();
    file.write_all_at(&[7; 10], 5 * PAGE).unwrap();
    file.write_all_at(&[8; 10], CHUNK + PAGE).unwrap();
    file.write_all_at(&[9; 10], REGIONS[0] + 2 * PAGE).unwrap();
    let chunks = crate::snapshot::contents::hash_chunks(&file).unwrap();
    (file, chunks)
}

#[test]
fn pages_come_as_they_are_touched_whatever_their_region() {
    let Some((watched, fd)) = Watched::new(REGIONS.iter().sum()) else {
        return;
    };
    let (file, expected) = memory();
    let source = FileSource::new(file, &expected);
    let server = PageServer::start(fd, &regions(&watched), source, |reason| panic!("{reason}")).unwrap();
    let low = REGIONS[1];
    assert_eq!(watched.read(low), 0);
    assert_eq!(watched.read(low + 5 * PAGE + 9), 7);
    assert_eq!(watched.read(low + 5 * PAGE + 10), 0);
    assert_eq!(watched.read(low + CHUNK + PAGE), 8);
    assert_eq!(watched.read(2 * PAGE), 9);
    assert_eq!(watched.read(PAGE), 0);
    drop(server);
}

#[test]
fn a_page_given_back_is_zero_when_touched_again() {
    let Some((watched, fd)) = Watched::new(REGIONS.iter().sum()) else {
        return;
    };
    let (file, expected) = memory();
    let source = FileSource::new(file, &expected);
    let server = PageServer::start(fd, &regions(&watched), source, |reason| panic!("{reason}")).unwrap();
    assert_eq!(watched.read(2 * PAGE), 9);
    // SAFETY: our mapping.
    unsafe {
        libc::madvise(
            watched.address as *mut libc::c_void,
            watched.size,
            libc::MADV_DONTNEED,
        )
    };
    assert_eq!(watched.read(2 * PAGE), 0);
    drop(server);
}

#[test]
fn a_chunk_that_is_not_what_the_manifest_says_is_not_served() {
    let Some((watched, fd)) = Watched::new(REGIONS.iter().sum()) else {
        return;
    };
    let (file, expected) = memory();
    file.write_all_at(&[1], 6 * PAGE).unwrap();
    let (sender, broken) = mpsc::channel();
    let source = FileSource::new(file, &expected);
    let server = PageServer::start(fd, &regions(&watched), source, move |reason| {
        sender.send(reason).unwrap()
    })
    .unwrap();
    std::thread::scope(|scope| {
        let touching = scope.spawn(|| watched.read(REGIONS[1] + 6 * PAGE));
        let reason = broken.recv().unwrap();
        assert!(
            reason.contains("chunk 0") && reason.contains("manifest"),
            "{reason}"
        );
        // The server's thread closed the descriptor, so the fault ends. In production the VMM is killed instead.
        let _ = touching.join();
    });
    drop(server);
}

/// Starts a server of [`memory`]. The reason why it broke arrives at the receiver.
fn serve(watched: &Watched, fd: OwnedFd) -> (PageServer, mpsc::Receiver<String>) {
    let (file, expected) = memory();
    serve_from(FileSource::new(file, &expected), watched, fd)
}

fn serve_from(
    source: impl PageSource + 'static,
    watched: &Watched,
    fd: OwnedFd,
) -> (PageServer, mpsc::Receiver<String>) {
    let (sender, broken) = mpsc::channel();
    let told = move |reason| sender.send(reason).unwrap();
    let server = PageServer::start(fd, &regions(watched), source, told).unwrap();
    (server, broken)
}

/// Touches a page on a detached thread, because its fault may never be served.
fn touch_for_ever(watched: &Arc<Watched>, offset: u64) {
    let watched = watched.clone();
    std::thread::spawn(move || watched.read(offset));
}

const LIMIT: Duration = Duration::from_secs(10);

/// `UFFD_FEATURE_EVENT_REMOVE`, linux/userfaultfd.h.
const EVENT_REMOVE: u64 = 1 << 3;

/// A source that ends with an event on its way: until that is read, which it never is, the kernel fills no page.
struct Changing {
    file: FileSource,
    watched: Arc<Watched>,
    fd: OwnedFd,
}

impl PageSource for Changing {
    fn read(&mut self, number: u64, buffer: &mut [u8]) -> io::Result<bool> {
        let address = self.watched.address;
        // SAFETY: our mapping. The call waits in the kernel, and so on a thread of its own.
        std::thread::spawn(move || unsafe {
            libc::madvise(address as *mut _, PAGE as usize, libc::MADV_DONTNEED)
        });
        while try_zero(&self.fd, address as u64 + PAGE) {
            std::thread::yield_now();
        }
        self.file.read(number, buffer)
    }

    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn hash(&self, number: u64) -> Option<Hash> {
        self.file.hash(number)
    }
}

#[test]
fn vmm_whose_mappings_change_for_ever_is_broken() {
    let Some((watched, fd)) = Watched::with_features(REGIONS.iter().sum(), EVENT_REMOVE) else {
        return;
    };
    let (watched, keeps) = (Arc::new(watched), fd.try_clone().unwrap());
    let (file, expected) = memory();
    let changing = Changing {
        file: FileSource::new(file, &expected),
        watched: watched.clone(),
        fd: fd.try_clone().unwrap(),
    };
    let (server, broken) = serve_from(changing, &watched, fd);
    touch_for_ever(&watched, REGIONS[1] + 5 * PAGE);
    let reason = broken.recv_timeout(LIMIT).unwrap();
    assert!(reason.contains("go on changing"), "{reason}");
    drop(server);
    std::mem::forget(keeps);
}

/// Fills a page with zeros. Returns false if the kernel fills none now.
fn try_zero(fd: &OwnedFd, address: u64) -> bool {
    let mut request = [address, PAGE, 0, 0];
    // SAFETY: `request` is a struct uffdio_zeropage.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_ZEROPAGE, request.as_mut_ptr()) };
    result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN)
}

#[test]
fn userfaultfd_that_was_made_to_block_is_broken() {
    let Some((watched, fd)) = Watched::new(REGIONS.iter().sum()) else {
        return;
    };
    let (watched, theirs) = (Arc::new(watched), fd.try_clone().unwrap());
    let (server, broken) = serve(&watched, fd);
    // It has served a page, and waits.
    assert_eq!(watched.read(2 * PAGE), 9);
    rustix::io::ioctl_fionbio(&theirs, false).unwrap();
    touch_for_ever(&watched, PAGE);
    let reason = broken.recv_timeout(LIMIT).unwrap();
    assert!(reason.contains("made to block"), "{reason}");
    drop(server);
}

#[test]
fn flooded_server_ends_when_it_is_dropped() {
    let Some((watched, fd)) = Watched::new(REGIONS.iter().sum()) else {
        return;
    };
    let (watched, ends) = (Arc::new(watched), Arc::new(AtomicBool::new(false)));
    let (theirs, flooded) = (fd.try_clone().unwrap(), Arc::new(AtomicU64::new(0)));
    let (server, broken) = serve(&watched, fd);
    let floods: Vec<_> = (0..3)
        .map(|_| {
            let (watched, ends, flooded) = (watched.clone(), ends.clone(), flooded.clone());
            std::thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    let all = watched.address as *mut libc::c_void;
                    // SAFETY: our mapping.
                    unsafe { libc::madvise(all, watched.size, libc::MADV_DONTNEED) };
                    watched.read(flooded.fetch_add(1, Ordering::Relaxed) % 8 * PAGE);
                }
            })
        })
        .collect();
    while flooded.load(Ordering::Relaxed) < 10_000 {
        std::thread::yield_now();
    }
    let begin = std::time::Instant::now();
    drop(server);
    assert!(begin.elapsed().as_secs() < END_LIMIT_S as u64);
    assert!(broken.try_recv().is_err());
    ends.store(true, Ordering::Relaxed);
    // The faults are no longer served: closing the last descriptor ends them.
    drop(theirs);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
}

#[test]
fn vmm_that_unmaps_its_memory_is_broken() {
    let Some((watched, fd)) = Watched::new(REGIONS.iter().sum()) else {
        return;
    };
    let watched = Arc::new(watched);
    // Never dropped: another mapping may now be at this address.
    std::mem::forget(watched.clone());
    let (server, broken) = serve(&watched, fd);
    let data = watched.address + (REGIONS[1] + 5 * PAGE) as usize;
    // SAFETY: our mapping, to which nothing points.
    unsafe { libc::munmap(data as *mut libc::c_void, PAGE as usize) };
    touch_for_ever(&watched, REGIONS[1] + 6 * PAGE);
    let reason = broken.recv_timeout(LIMIT).unwrap();
    assert!(reason.contains("cannot be filled"), "{reason}");
    drop(server);
}
