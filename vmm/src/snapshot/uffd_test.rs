use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use thaw_protocol::control::FreezeKind::Full;

use super::*;
use crate::snapshot::PAGE;
use crate::snapshot::testing::*;

/// `_IOWR(0xAA, 3, struct uffdio_copy)`.
const UFFDIO_COPY: libc::Ioctl = 0xC028_AA03;

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// Serves pages from a memory file until the other end of `stop` is closed. Returns how many.
fn serve(uffd: OwnedFd, regions: Vec<MappedRegion>, file: File, stop: OwnedFd) -> usize {
    let mut served = 0;
    loop {
        let mut ready = [
            PollFd::new(&uffd, PollFlags::IN),
            PollFd::new(&stop, PollFlags::IN | PollFlags::HUP),
        ];
        poll(&mut ready, None).unwrap();
        if !ready[1].revents().is_empty() {
            return served;
        }
        // struct uffd_msg: event at byte 0 (0x12: page fault), the address at byte 16.
        let mut message = [0; 32];
        if rustix::io::read(&uffd, &mut message) != Ok(32) {
            continue;
        }
        assert_eq!(message[0], 0x12);
        let address = u64::from_le_bytes(message[16..24].try_into().unwrap()) & !(PAGE - 1);
        let mut before = 0;
        let offset = regions.iter().find_map(|region| {
            let inside = address
                .checked_sub(region.host_address)
                .filter(|at| *at < region.size);
            let offset = inside.map(|at| before + at);
            before += region.size;
            offset
        });
        let mut page = [0; PAGE as usize];
        file.read_exact_at(&mut page, offset.unwrap()).unwrap();
        let mut copy = UffdioCopy {
            dst: address,
            src: page.as_ptr() as u64,
            len: PAGE,
            mode: 0,
            copy: 0,
        };
        // SAFETY: `copy` names a page of this process to read and a missing page of guest memory to fill.
        let copied = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_COPY, &raw mut copy) };
        assert_eq!(copied, 0);
        served += 1;
    }
}

#[test]
fn missing_pages_come_from_the_server_and_holes_do_not_ask_it() {
    let Some(device) = userfaultfd() else { return };
    let original = Clone::booted();
    (0..8).for_each(|page| write(&original.memory, page, page + 1));
    (PAGES + 100..PAGES + 104).for_each(|page| write(&original.memory, page, page));
    let (frozen, layers) = original.freeze(Full, &[]).unwrap();

    let here = memory();
    let watch = watch(std::os::fd::AsFd::as_fd(&device), &here, &frozen.map).unwrap();
    let (stop, stopped) = rustix::pipe::pipe().unwrap();
    let server = {
        let (uffd, regions) = (watch.uffd.try_clone().unwrap(), watch.regions.clone());
        let file = layers[0].try_clone().unwrap();
        thread::spawn(move || serve(uffd, regions, file, stop))
    };
    assert!((0..8).all(|page| read(&here, page) == page + 1));
    write(&here, 0, 77);
    assert_eq!(
        [read(&here, 0), read(&here, 2000), read(&here, PAGES)],
        [77, 0, 0]
    );
    // The kernel touches memory too, when a device's system call accesses it: here it reads from it.
    let out = empty_file();
    let slice =
        vm_memory::GuestMemory::get_slice(&here, vm_memory::GuestAddress(page(PAGES + 101)), 4096).unwrap();
    crate::virtio::guest_io::write_all_at(std::os::fd::AsFd::as_fd(&out), &[slice], 0).unwrap();
    assert_eq!(out.metadata().unwrap().len(), PAGE);
    assert_eq!(read(&here, PAGES + 101), PAGES + 101);
    drop(stopped);
    assert_eq!(server.join().unwrap(), 9);
}

#[test]
fn what_is_not_the_device_is_refused() {
    let original = Clone::booted();
    let (frozen, _) = original.freeze(Full, &[]).unwrap();
    let zero = File::open("/dev/zero").unwrap();
    let error = watch(std::os::fd::AsFd::as_fd(&zero), &memory(), &frozen.map).unwrap_err();
    assert!(matches!(error, UffdError::Open(_)), "{error}");
}
