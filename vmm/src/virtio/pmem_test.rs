use std::io::Write;

use vm_memory::{Bytes, MemoryRegionAddress};

use super::*;
use crate::layout::Window;
use crate::virtio::VirtioDevice;
use crate::virtio::testing::{Buf, NOWHERE, Rig};

const WINDOW: Window = Window {
    start: 0x10_0000_0000,
    size: 16 * PAGE,
};

fn pmem() -> Pmem {
    Pmem::new(HostWindow::reserve(WINDOW).unwrap())
}

fn file(bytes: usize) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; bytes]).unwrap();
    file.into()
}

fn byte(pmem: &Pmem, offset: u64) -> u8 {
    pmem.window
        .region()
        .read_obj(MemoryRegionAddress(offset))
        .unwrap()
}

#[test]
fn the_configuration_names_the_window() {
    let config = pmem().config().bytes();
    assert_eq!(config[..8], WINDOW.start.to_le_bytes());
    assert_eq!(config[8..], WINDOW.size.to_le_bytes());
}

#[test]
fn a_file_appears_in_the_window_and_zeros_behind_it() {
    let mut pmem = pmem();
    assert_eq!(byte(&pmem, 0), 0);
    pmem.attach(Backend::Pmem, vec![file(PAGE as usize + 1)]).unwrap();
    assert_eq!(
        (
            byte(&pmem, 0),
            byte(&pmem, PAGE),
            byte(&pmem, PAGE + 1),
            byte(&pmem, 2 * PAGE)
        ),
        (7, 7, 0, 0)
    );
}

#[test]
fn a_smaller_file_leaves_nothing_of_a_larger_one() {
    let mut pmem = pmem();
    pmem.attach(Backend::Pmem, vec![file(4 * PAGE as usize)]).unwrap();
    pmem.attach(Backend::Pmem, vec![file(PAGE as usize)]).unwrap();
    assert_eq!(
        (byte(&pmem, 0), byte(&pmem, PAGE), byte(&pmem, 3 * PAGE)),
        (7, 0, 0)
    );
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut pmem = pmem();
    pmem.attach(Backend::Pmem, vec![file(1)]).unwrap();
    let too_large = file(WINDOW.size as usize + 1);
    assert!(matches!(
        pmem.attach(Backend::Pmem, vec![too_large]),
        Err(AttachError::Invalid(_))
    ));
    assert!(matches!(
        pmem.attach(Backend::Pmem, vec![file(0)]),
        Err(AttachError::Invalid(_))
    ));
    let directory = std::fs::File::open("/").unwrap();
    assert!(matches!(
        pmem.attach(Backend::Pmem, vec![directory.into()]),
        Err(AttachError::Invalid(_))
    ));
    assert!(matches!(
        pmem.attach(Backend::Pmem, vec![]),
        Err(AttachError::Descriptors { expected: 1, got: 0 })
    ));
    assert!(matches!(
        pmem.attach(Backend::Vsock, vec![file(1)]),
        Err(AttachError::WrongKind(_))
    ));
    assert_eq!(byte(&pmem, 0), 7);
}

#[test]
fn a_flush_succeeds_and_anything_else_fails() {
    let mut rig = Rig::new(pmem(), 0);
    for (request, ret) in [
        (&[0u8, 0, 0, 0][..], 0u32),
        (&[1, 0, 0, 0], FAILED),
        (&[0, 0], FAILED),
    ] {
        let (request, response) = (rig.readable(request), rig.writable(4));
        assert_eq!(rig.request(0, &[request, response]), 4);
        assert_eq!(rig.bytes(response), ret.to_le_bytes());
    }
}

#[test]
fn a_request_without_room_for_a_response_stops_the_device() {
    for response in [
        Buf {
            address: NOWHERE,
            length: 4,
            write: true,
        },
        Buf {
            address: 0x10_0000,
            length: 3,
            write: true,
        },
    ] {
        let mut rig = Rig::new(pmem(), 0);
        let request = rig.readable(&[0; 4]);
        rig.submit(0, &[request, response]);
        assert!(matches!(rig.kick(0), Err(DeviceError::Unanswerable { .. })));
    }
}

#[test]
fn a_file_smaller_than_the_frozen_one_is_refused() {
    let mut frozen = pmem();
    frozen
        .attach(Backend::Pmem, vec![file(2 * PAGE as usize)])
        .unwrap();
    let mut thawed = Rig::thaw(Rig::new(frozen, 0).freeze(), pmem());
    assert!(!thawed.device.is_backed());
    let refused = thawed.device.attach(Backend::Pmem, vec![file(PAGE as usize)]);
    assert!(matches!(refused, Err(AttachError::Frozen(_))));
    assert_eq!(byte(&thawed.device, 0), 0);
    thawed
        .device
        .attach(Backend::Pmem, vec![file(2 * PAGE as usize)])
        .unwrap();
    assert_eq!(byte(&thawed.device, PAGE), 7);
}
