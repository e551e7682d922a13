use super::*;
use std::sync::mpsc;

const REGIONS: [u64; 2] = [CHUNK + 2 * PAGE, 3 * PAGE];

/// Anonymous memory watched by a userfaultfd, for as long as it lives.
struct Watched {
    address: usize,
    size: usize,
}

impl Watched {
    /// None, having said why, where this may not be done.
    fn new(size: u64) -> Option<(Watched, OwnedFd)> {
        use std::os::fd::FromRawFd;
        let size = size as usize;
        // SAFETY: no memory of ours is named.
        let fd = match unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } {
            -1 => {
                eprintln!("skipped: userfaultfd: {}", io::Error::last_os_error());
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
        let mut api = [0xAAu64, 0, 0];
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
        // SAFETY: within the mapping, which lives as long as we do; faults are served.
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
    // In the address space the other way round than in the file.
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
        // Its descriptor closed with the server's thread, so the fault ends; in a machine the VMM is killed instead.
        let _ = touching.join();
    });
    drop(server);
}

#[test]
fn addresses_and_offsets_are_each_others_inverse() {
    let regions = [
        MappedRegion {
            host_address: 0x7000_0000,
            size: 3 * PAGE,
            guest_address: 0,
        },
        MappedRegion {
            host_address: 0x1000_0000,
            size: 2 * PAGE,
            guest_address: 1 << 32,
        },
    ];
    for page in 0..5 {
        let address = host_address(&regions, page * PAGE).unwrap();
        assert_eq!(file_offset(&regions, address), Some(page * PAGE));
    }
    assert_eq!(host_address(&regions, 5 * PAGE), None);
    for outside in [
        0,
        0x1000_0000 - 1,
        0x1000_0000 + 2 * PAGE,
        0x7000_0000 + 3 * PAGE,
        u64::MAX,
    ] {
        assert_eq!(file_offset(&regions, outside), None, "{outside:#x}");
    }
}
