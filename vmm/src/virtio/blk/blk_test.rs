use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use thaw_protocol::control::DeviceId;
use thaw_protocol::disk_layer::file_bytes;

use super::request::Status;
use super::*;
use crate::virtio::VirtioDevice;
use crate::virtio::interrupt::{CONFIG_CHANGE, USED_BUFFER};
use crate::virtio::testing::{Buf, NOWHERE, Rig};

#[path = "image_test.rs"]
mod image;
#[path = "in_flight_test.rs"]
mod in_flight;
#[path = "rate_limit_test.rs"]
mod rate_limit;

const SECTORS: u64 = 64;

/// A device whose event loop never runs: the tests call it themselves.
fn blk(id: DeviceId) -> Blk {
    Blk::new(
        &format!("{id:?}").to_lowercase(),
        crate::virtio::event_loop::EventLoop::new().unwrap().registrar(id),
    )
}

/// A disk whose sector n is filled with n, and its file.
fn disk() -> File {
    let mut file = tempfile::tempfile().unwrap();
    for sector in 0..SECTORS {
        file.write_all(&[sector as u8; SECTOR as usize]).unwrap();
    }
    file
}

fn rig(file: &File, read_only: bool) -> Rig<Blk> {
    let mut blk = blk(DeviceId::Blk1);
    blk.attach(
        Backend::Disk { read_only },
        vec![file.try_clone().unwrap().into()],
    )
    .unwrap();
    Rig::new(blk, 0)
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// One request with readable and writable data. Returns its status and the used length.
fn ask(rig: &mut Rig<Blk>, kind: u32, sector: u64, out: &[u8], back: &[Buf]) -> (u8, u32) {
    let header = rig.readable(&header(kind, sector));
    let mut chain = vec![header];
    if !out.is_empty() {
        chain.push(rig.readable(out));
    }
    chain.extend(back);
    let status = rig.writable(1);
    chain.push(status);
    let used = rig.request(0, &chain);
    (rig.bytes(status)[0], used)
}

const OK: u8 = Status::Ok as u8;
const IOERR: u8 = Status::IoErr as u8;
const UNSUPP: u8 = Status::Unsupported as u8;

#[test]
fn sectors_are_read_into_scattered_buffers() {
    let mut rig = rig(&disk(), false);
    let (a, b) = (rig.writable(300), rig.writable(724));
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 3, &[], &[a, b]), (OK, 1025));
    let read = [rig.bytes(a), rig.bytes(b)].concat();
    assert_eq!(read, [[3; 512], [4; 512]].concat());
}

#[test]
fn sectors_are_written_and_flushed() {
    let mut file = disk();
    let mut rig = rig(&file, false);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_OUT, 5, &[0xAB; 1024], &[]), (OK, 1));
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_FLUSH, 0, &[], &[]), (OK, 1));
    let mut content = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut content).unwrap();
    assert!(content[5 * 512..7 * 512].iter().all(|byte| *byte == 0xAB));
    assert_eq!((content[5 * 512 - 1], content[7 * 512]), (4, 7));
    assert_eq!(content.len() as u64, SECTORS * SECTOR);
}

#[test]
fn disk_over_a_base_writes_to_its_layer() {
    let (base, layer) = (disk(), tempfile::tempfile().unwrap());
    layer.set_len(file_bytes(SECTORS * SECTOR)).unwrap();
    let mut blk = blk(DeviceId::Blk0);
    let fds = [&base, &layer].map(|file| OwnedFd::from(file.try_clone().unwrap()));
    blk.attach(Backend::LayeredDisk, fds.into()).unwrap();
    let mut rig = Rig::new(blk, 0);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_OUT, 9, &[0xAB; 512], &[]), (OK, 1));
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_FLUSH, 0, &[], &[]), (OK, 1));
    let back = rig.writable(3 * 512);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 8, &[], &[back]), (OK, 1537));
    let expected = [[8; 512], [0xAB; 512], [10; 512]].concat();
    assert_eq!(rig.bytes(back), expected);
    let mut sector = [0; 512];
    base.read_exact_at(&mut sector, 9 * 512).unwrap();
    assert_eq!(sector, [9; 512]);
    layer.read_exact_at(&mut sector, 9 * 512).unwrap();
    assert_eq!(sector, [0xAB; 512]);
}

#[test]
fn framing_does_not_matter() {
    let mut rig = rig(&disk(), false);
    let header = header(b::VIRTIO_BLK_T_IN, 9);
    let (h1, h2) = (rig.readable(&header[..7]), rig.readable(&header[7..]));
    // Data and status in one buffer.
    let back = rig.writable(513);
    assert_eq!(rig.request(0, &[h1, h2, back]), 513);
    let bytes = rig.bytes(back);
    assert_eq!(bytes[..512], [9; 512]);
    assert_eq!(bytes[512], OK);
}

#[test]
fn request_outside_the_disk_or_of_part_sectors_is_an_error() {
    let file = disk();
    let mut rig = rig(&file, false);
    let (one, two, odd) = (rig.writable(512), rig.writable(1024), rig.writable(100));
    for (sector, buffer) in [
        (SECTORS, one),
        (SECTORS - 1, two),
        (u64::MAX, one),
        (u64::MAX / 512, one),
        (0, odd),
    ] {
        assert_eq!(
            ask(&mut rig, b::VIRTIO_BLK_T_IN, sector, &[], &[buffer]).0,
            IOERR,
            "sector {sector}"
        );
    }
    assert_eq!(
        ask(&mut rig, b::VIRTIO_BLK_T_OUT, SECTORS - 1, &[1; 1024], &[]).0,
        IOERR
    );
    assert_eq!(
        file.metadata().unwrap().len(),
        SECTORS * SECTOR,
        "the file did not grow"
    );
}

#[test]
fn a_read_only_disk_refuses_every_change() {
    let mut rig = rig(&disk(), true);
    let range = range(0, 1, 0);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_OUT, 0, &[1; 512], &[]).0, IOERR);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_DISCARD, 0, &range, &[]).0, IOERR);
    assert_eq!(
        ask(&mut rig, b::VIRTIO_BLK_T_WRITE_ZEROES, 0, &range, &[]).0,
        IOERR
    );
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_FLUSH, 0, &[], &[]).0, OK);
    let buffer = rig.writable(512);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 1, &[], &[buffer]).0, OK);
}

#[test]
fn with_no_backend_everything_fails_and_the_capacity_is_zero() {
    let mut rig = Rig::new(blk(DeviceId::Blk0), 0);
    assert_eq!(rig.device.config().bytes()[..8], [0; 8]);
    let buffer = rig.writable(512);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 0, &[], &[buffer]), (IOERR, 1));
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_FLUSH, 0, &[], &[]).0, IOERR);
}

#[test]
fn a_disk_attached_to_a_running_guest_is_told_and_works() {
    let mut rig = Rig::new(blk(DeviceId::Blk0), 0);
    let before = rig.device.config().generation();
    rig.device
        .attach(Backend::Disk { read_only: false }, vec![disk().into()])
        .unwrap();
    assert_eq!(rig.device.config().bytes()[..8], SECTORS.to_le_bytes());
    assert_ne!(rig.device.config().generation(), before);
    assert_eq!(rig.interrupt.reasons(), CONFIG_CHANGE);
    let buffer = rig.writable(512);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 1, &[], &[buffer]).0, OK);
}

/// Whether this process has the file open.
fn is_open(path: &std::path::Path) -> bool {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .any(|target| target == path)
}

#[test]
fn detached_disk_is_closed_and_requests_fail_until_the_next() {
    let named = tempfile::NamedTempFile::new().unwrap();
    named.as_file().set_len(SECTORS * SECTOR).unwrap();
    let path = named.path().to_owned();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let named = named.into_temp_path();
    let mut rig = Rig::new(blk(DeviceId::Blk1), 0);
    rig.device.detach().unwrap();
    assert_eq!(rig.interrupt.reasons(), 0, "nothing changed");
    rig.device
        .attach(Backend::Disk { read_only: false }, vec![file.into()])
        .unwrap();
    rig.interrupt.acknowledge(CONFIG_CHANGE);
    // One request is in progress when the disk is removed, and one comes afterwards.
    let parts = [
        rig.readable(&header(b::VIRTIO_BLK_T_OUT, 0)),
        rig.readable(&[7; 512]),
        rig.writable(1),
    ];
    let head = rig.submit(0, &parts);
    rig.device.detach().unwrap();
    assert!(!is_open(&path) && !rig.device.is_backed());
    assert_eq!(rig.device.config().bytes()[..8], [0; 8]);
    assert_eq!(rig.interrupt.reasons(), CONFIG_CHANGE);
    rig.kick(0).unwrap();
    assert_eq!((rig.used(0), rig.bytes(parts[2])), (vec![(head, 1)], vec![IOERR]));
    let buffer = rig.writable(512);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 0, &[], &[buffer]).0, IOERR);
    assert!(std::fs::read(&named).unwrap().iter().all(|byte| *byte == 0));

    rig.device
        .attach(Backend::Disk { read_only: true }, vec![disk().into()])
        .unwrap();
    assert_eq!(rig.device.config().bytes()[..8], SECTORS.to_le_bytes());
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 1, &[], &[buffer]).0, OK);
    assert_eq!(rig.bytes(buffer), [1; 512]);
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [
        &sector.to_le_bytes()[..],
        &sectors.to_le_bytes(),
        &flags.to_le_bytes(),
    ]
    .concat()
}

#[test]
fn zeroes_are_written_and_discards_free_space() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; 1 << 20]).unwrap();
    file.sync_all().unwrap();
    let mut rig = rig(&file, false);
    let two = [range(8, 8, 0), range(1024, 8, 1)].concat();
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_WRITE_ZEROES, 0, &two, &[]).0, OK);
    let mut content = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut content).unwrap();
    assert!(content[4096..8192].iter().all(|byte| *byte == 0));
    assert!(content[1024 * 512..1032 * 512].iter().all(|byte| *byte == 0));
    assert_eq!((content[4095], content[8192], content.len()), (7, 7, 1 << 20));

    let before = file.metadata().unwrap().blocks();
    assert_eq!(
        ask(&mut rig, b::VIRTIO_BLK_T_DISCARD, 0, &range(0, 2048, 0), &[]).0,
        OK
    );
    assert!(file.metadata().unwrap().blocks() < before);
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
}

#[test]
fn ranges_beyond_the_limits_are_refused() {
    let mut rig = rig(&disk(), false);
    let many = range(0, 1, 0).repeat(MAX_RANGES as usize + 1);
    for (kind, data, status) in [
        (b::VIRTIO_BLK_T_DISCARD, range(SECTORS, 1, 0), IOERR),
        (b::VIRTIO_BLK_T_DISCARD, range(u64::MAX, u32::MAX, 0), IOERR),
        (b::VIRTIO_BLK_T_DISCARD, range(0, 1, 1), UNSUPP),
        (b::VIRTIO_BLK_T_WRITE_ZEROES, range(0, 1, 2), UNSUPP),
        (b::VIRTIO_BLK_T_WRITE_ZEROES, range(0, MAX_ZEROES + 1, 0), IOERR),
        (b::VIRTIO_BLK_T_WRITE_ZEROES, many, IOERR),
        (b::VIRTIO_BLK_T_WRITE_ZEROES, vec![0; 15], IOERR),
        (b::VIRTIO_BLK_T_DISCARD, vec![], IOERR),
        (b::VIRTIO_BLK_T_DISCARD, range(0, 0, 0), OK),
    ] {
        assert_eq!(ask(&mut rig, kind, 0, &data, &[]).0, status, "{kind} {data:?}");
    }
}

#[test]
fn the_serial_names_the_slot() {
    let mut rig = rig(&disk(), false);
    let (id, short) = (rig.writable(20), rig.writable(3));
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_GET_ID, 0, &[], &[id]), (OK, 21));
    assert_eq!(rig.bytes(id), *b"blk1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_GET_ID, 0, &[], &[short]), (OK, 4));
}

#[test]
fn unknown_and_short_requests_are_answered() {
    let mut rig = rig(&disk(), false);
    assert_eq!(ask(&mut rig, 77, 0, &[], &[]).0, UNSUPP);
    let (short, status) = (rig.readable(&[0; 15]), rig.writable(1));
    rig.request(0, &[short, status]);
    assert_eq!(rig.bytes(status), [IOERR]);
}

#[test]
fn data_outside_memory_is_an_error_the_guest_learns() {
    let mut rig = rig(&disk(), false);
    let outside = Buf {
        address: NOWHERE,
        length: 512,
        write: true,
    };
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 0, &[], &[outside]).0, IOERR);
}

#[test]
fn a_request_without_a_status_byte_stops_the_device() {
    let file = disk();
    for status in [
        None,
        Some(Buf {
            address: NOWHERE,
            length: 1,
            write: true,
        }),
    ] {
        let mut rig = rig(&file, false);
        let header = rig.readable(&header(b::VIRTIO_BLK_T_FLUSH, 0));
        let chain: Vec<Buf> = std::iter::once(header).chain(status).collect();
        rig.submit(0, &chain);
        assert!(matches!(rig.kick(0), Err(DeviceError::Unanswerable { .. })));
    }
}

#[test]
fn an_empty_read_touches_nothing() {
    let mut rig = rig(&disk(), false);
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_IN, 0, &[], &[]), (OK, 1));
}

#[test]
fn what_is_no_disk_is_refused() {
    let mut blk = blk(DeviceId::Blk0);
    let mut attach = |fds: Vec<OwnedFd>| blk.attach(Backend::Disk { read_only: false }, fds).unwrap_err();
    let directory = File::open("/").unwrap();
    assert!(matches!(attach(vec![directory.into()]), AttachError::Invalid(_)));
    let named = tempfile::NamedTempFile::new().unwrap();
    let unwritable = File::open(named.path()).unwrap();
    assert!(matches!(attach(vec![unwritable.into()]), AttachError::Invalid(_)));
    assert!(matches!(attach(vec![]), AttachError::Descriptors { got: 0, .. }));
    assert!(matches!(
        attach(vec![disk().into(), disk().into()]),
        AttachError::Descriptors { got: 2, .. }
    ));
    assert!(matches!(
        blk.attach(Backend::Pmem, vec![disk().into()]),
        Err(AttachError::WrongKind(_))
    ));
}

proptest::proptest! {
    /// No request that a guest can make panics, changes the file's size, or stays unanswered.
    #[test]
    fn any_request_is_answered(
        kind in 0u32..16,
        sector in proptest::prop_oneof![0..SECTORS + 2, proptest::num::u64::ANY],
        out in proptest::collection::vec(proptest::num::u8::ANY, 0..80),
        back in 0u32..2048,
    ) {
        let file = disk();
        let mut rig = rig(&file, false);
        let data = rig.writable(back);
        let (status, used) = ask(&mut rig, kind, sector, &out, &[data]);
        assert!([OK, IOERR, UNSUPP].contains(&status));
        assert!(used <= back + 1);
        assert_eq!(file.metadata().unwrap().len(), SECTORS * SECTOR);
    }
}

fn disk_of(sectors: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(sectors * SECTOR).unwrap();
    file
}

fn attach(blk: &mut Blk, file: &File, read_only: bool) -> Result<(), AttachError> {
    blk.attach(
        Backend::Disk { read_only },
        vec![file.try_clone().unwrap().into()],
    )
}

#[test]
fn write_in_flight_at_the_freeze_reaches_the_new_disk_once() {
    use std::os::unix::fs::FileExt;
    let (old, new) = (disk_of(SECTORS), disk_of(2 * SECTORS));
    let mut rig = rig(&old, false);
    let parts = [
        rig.readable(&header(1, 3)),
        rig.readable(&[7; SECTOR as usize]),
        rig.writable(1),
    ];
    let head = rig.submit(0, &parts);

    let mut thawed = Rig::thaw(rig.freeze(), blk(DeviceId::Blk1));
    let before = thawed.device.config().generation();
    attach(&mut thawed.device, &new, false).unwrap();
    assert!(thawed.used(0).is_empty(), "nothing is answered while parked");
    assert_ne!(thawed.device.config().generation(), before);
    assert_eq!(thawed.device.config().bytes()[..8], (2 * SECTORS).to_le_bytes());
    thawed.start_work();
    assert_eq!(thawed.used(0), [(head, 1)]);
    assert_eq!(thawed.bytes(parts[2]), [0]);
    assert_eq!(
        thawed.interrupt.reasons(),
        USED_BUFFER | CONFIG_CHANGE,
        "the new capacity is told"
    );
    let mut sector = [0; SECTOR as usize];
    new.read_exact_at(&mut sector, 3 * SECTOR).unwrap();
    assert_eq!(sector, [7; SECTOR as usize]);
    old.read_exact_at(&mut sector, 3 * SECTOR).unwrap();
    assert_eq!(
        sector, [0; SECTOR as usize],
        "the frozen one's disk is not written by a clone"
    );
    thawed.start_work();
    assert!(thawed.used(0).is_empty());
}

#[test]
fn disk_smaller_or_less_writable_than_frozen_is_refused() {
    let mut frozen = rig(&disk_of(SECTORS), false);
    let mut thawed = Rig::thaw(frozen.freeze(), blk(DeviceId::Blk1));
    for (file, read_only) in [(disk_of(SECTORS - 1), false), (disk_of(2 * SECTORS), true)] {
        let refused = attach(&mut thawed.device, &file, read_only);
        assert!(matches!(refused, Err(AttachError::Frozen(_))));
        assert!(!thawed.device.is_backed());
    }
    attach(&mut thawed.device, &disk_of(SECTORS), false).unwrap();

    let mut frozen = rig(&disk_of(SECTORS), true);
    let mut thawed = Rig::thaw(frozen.freeze(), blk(DeviceId::Blk1));
    attach(&mut thawed.device, &disk_of(SECTORS), true).unwrap();

    let mut empty = Rig::new(blk(DeviceId::Blk0), 0);
    let mut thawed = Rig::thaw(empty.freeze(), blk(DeviceId::Blk0));
    attach(&mut thawed.device, &disk_of(1), true).unwrap();
}
