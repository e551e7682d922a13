//! Tiny guests on whatever KVM this host has: what the machine does for a guest that runs.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use support::{Connection, PATIENCE, readable, spec, started};
use thaw_protocol::control::{Command, ExitReason, MachineState, Response};
use thaw_tiny_guest::{Code, DATA, Guest};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn read_some(console: &mut File) -> String {
    assert!(readable(&*console, PATIENCE), "the console is silent");
    let mut bytes = [0u8; 65536];
    let count = console.read(&mut bytes).unwrap();
    String::from_utf8(bytes[..count].to_vec()).unwrap()
}

#[test]
fn a_guest_prints_and_powers_off() {
    let kernel = Code::default().print("hello\n").power_off().kernel();
    let (_vmm, mut control, mut console) = started(spec(1, 64), &kernel);
    assert_eq!(read_some(&mut console), "hello\n");
    assert_eq!(control.exit(), ExitReason::PowerOff);
    assert_eq!(control.state(), MachineState::Exited(ExitReason::PowerOff));
}

#[test]
fn an_unfinished_line_is_written_when_the_machine_ends() {
    let kernel = Code::default().print("no newline").power_off().kernel();
    let (_vmm, mut control, mut console) = started(spec(1, 64), &kernel);
    assert_eq!(control.exit(), ExitReason::PowerOff);
    assert_eq!(read_some(&mut console), "no newline");
}

#[test]
fn the_reset_register_and_the_keyboard_controller_reset() {
    for (port, value) in [(0x602, 1), (0x64, 0xfe)] {
        let (_vmm, mut control, _console) = started(spec(1, 64), &Code::default().out(port, value).kernel());
        assert_eq!(control.exit(), ExitReason::Reset, "port {port:#x}");
    }
}

#[test]
fn a_triple_fault_is_a_fault_that_says_so() {
    // ud2 without an interrupt descriptor table: lidt of six zero bytes first.
    let guest = Guest {
        code: Code::default()
            .raw(&[0x0f, 0x01, 0x1d])
            .raw(&DATA.to_le_bytes())
            .raw(&[0x0f, 0x0b])
            .0,
        data: vec![0; 6],
    };
    let (_vmm, mut control, _console) = started(spec(1, 64), &guest.kernel());
    match control.exit() {
        ExitReason::Fault(text) => assert!(text.contains("triple fault"), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn running_into_a_device_is_a_fault_that_says_where() {
    // mov eax, 0xd0000000; jmp eax
    let kernel = Code::default().raw(&[0xb8, 0, 0, 0, 0xd0, 0xff, 0xe0]).kernel();
    let (_vmm, mut control, _console) = started(spec(1, 64), &kernel);
    match control.exit() {
        ExitReason::Fault(text) => assert!(text.contains("vCPU 0 at 0xd0000000"), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_virtio_window_answers_and_nothing_else_does() {
    let mut code = Code::default();
    for slot in 0..13 {
        let window = 0xd000_0000 + slot * 0x1000;
        // MagicValue "virt", Version 2 (virtio 1.2 §4.2.2).
        code = code.expect(window, 0x7472_6976).expect(window + 4, 2);
    }
    code = code
        .expect(0xd000_d000, u32::MAX)
        .store(0xd000_d000, 1)
        .expect(0xc000_0000, u32::MAX);
    let (_vmm, mut control, _console) = started(spec(1, 64), &code.power_off().kernel());
    assert_eq!(control.exit(), ExitReason::PowerOff);
}

#[test]
fn the_start_info_has_the_magic_and_the_command_line() {
    // [ebx] is the magic; [ebx+24] the command line's address: check both by way of esi.
    let check = |code: Code, bytes: &[u8]| {
        let failure = Code::default().out(0x602, 1).0;
        code.raw(bytes).raw(&[0x74, failure.len() as u8]).raw(&failure)
    };
    let code = check(Code::default(), &[0x81, 0x3b, 0x78, 0xc5, 0x6e, 0x33]);
    let code = check(
        code.raw(&[0x8b, 0x73, 0x18]),
        &[&[0x81, 0x3e][..], b"quie"].concat(),
    );
    let vmm = support::Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let kernel = code.power_off().kernel();
    let boot = Command::Boot {
        cmdline: "quiet".into(),
    };
    control
        .request(boot, &[std::os::fd::AsFd::as_fd(&kernel)])
        .unwrap();
    assert_eq!(control.exit(), ExitReason::PowerOff);
}

/// A guest that maps the 2 MiB at each of `addresses` one after the other from 2 MiB up, writes to all, checks all, and
/// powers off; the one of `hole` shall read as all ones. Four-level paging, in 32-bit compatibility mode.
fn touching(addresses: &[u64], hole: u64) -> Guest {
    // A table of each level, one page each, all present and writable.
    let mut data = vec![0u8; 0x3000];
    let mut entry = |level: usize, index: usize, value: u64| {
        let at = level * 0x1000 + index * 8;
        data[at..at + 8].copy_from_slice(&(value | 3).to_le_bytes());
    };
    entry(0, 0, u64::from(DATA) + 0x1000);
    entry(1, 0, u64::from(DATA) + 0x2000);
    for (index, address) in [0].iter().chain(addresses).chain([&hole]).enumerate() {
        const LARGE_PAGE: u64 = 1 << 7;
        entry(2, index, address & !(2 * MIB - 1) | LARGE_PAGE);
    }
    let linear = |index: usize, address: u64| ((index as u64 + 1) * 2 * MIB + address % (2 * MIB)) as u32;
    let mut code = Code::default()
        // cr4.PAE; cr3
        .raw(&[0x0f, 0x20, 0xe0, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0, 0xb8])
        .raw(&DATA.to_le_bytes())
        .raw(&[0x0f, 0x22, 0xd8])
        // EFER.LME
        .raw(&[0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32, 0x0d, 0, 1, 0, 0, 0x0f, 0x30])
        // cr0.PG
        .raw(&[0x0f, 0x20, 0xc0, 0x0d, 0, 0, 0, 0x80, 0x0f, 0x22, 0xc0]);
    for (index, address) in addresses.iter().enumerate() {
        code = code.store(linear(index, *address), 0x5a00_0000 + index as u32);
    }
    for (index, address) in addresses.iter().enumerate() {
        code = code.expect(linear(index, *address), 0x5a00_0000 + index as u32);
    }
    code = code.expect(linear(addresses.len(), hole), u32::MAX);
    Guest {
        code: code.power_off().0,
        data,
    }
}

#[test]
fn memory_is_there_on_both_sides_of_the_hole_and_not_in_it() {
    for (vcpus, mib) in [(1, 64), (2, 3072), (4, 3074), (8, 8192), (16, 65536)] {
        let total = u64::from(mib) * MIB;
        let mut addresses = vec![4 * MIB, total.min(3 * GIB) - 4];
        if total > 3 * GIB {
            addresses.extend([4 * GIB, 4 * GIB + (total - 3 * GIB) - 4]);
        }
        let hole = if total < 3 * GIB { total } else { 3 * GIB };
        let (_vmm, mut control, _console) = started(spec(vcpus, mib), &touching(&addresses, hole).kernel());
        assert_eq!(control.exit(), ExitReason::PowerOff, "{vcpus} vCPUs, {mib} MiB");
    }
}

/// The boot vCPU wakes the others, each of which counts itself, and powers off when all have.
fn waking(vcpus: u8) -> Guest {
    const TRAMPOLINE: u32 = 0x8000;
    const COUNT: u32 = 0x9000;
    // 16-bit: lock inc byte [COUNT]; cli; hlt; jmp to hlt
    let trampoline = [0xf0, 0xfe, 0x06, 0x00, 0x90, 0xfa, 0xf4, 0xeb, 0xfd];
    let mut code = Code::default();
    // mov esi, DATA; mov edi, TRAMPOLINE; mov ecx, length; cld; rep movsb
    code = code
        .raw(&[0xbe])
        .raw(&DATA.to_le_bytes())
        .raw(&[0xbf])
        .raw(&TRAMPOLINE.to_le_bytes());
    code = code
        .raw(&[0xb9])
        .raw(&(trampoline.len() as u32).to_le_bytes())
        .raw(&[0xfc, 0xf3, 0xa4]);
    // The local APIC's interrupt command: INIT, then SIPI, to all but self.
    code = code
        .store(0xfee0_0300, 0x000c_4500)
        .store(0xfee0_0300, 0x000c_4600 | TRAMPOLINE >> 12);
    // cmp byte [COUNT], vcpus - 1; jne back
    code = code
        .raw(&[0x80, 0x3d])
        .raw(&COUNT.to_le_bytes())
        .raw(&[vcpus - 1, 0x75, 0xf7]);
    Guest {
        code: code.power_off().0,
        data: trampoline.to_vec(),
    }
}

#[test]
fn every_vcpu_can_be_woken() {
    for vcpus in [1, 2, 4, 16] {
        let (_vmm, mut control, _console) = started(spec(vcpus, 64), &waking(vcpus).kernel());
        assert_eq!(control.exit(), ExitReason::PowerOff, "{vcpus} vCPUs");
    }
}

/// Whether the console says anything in this time once it was emptied.
fn talks(console: &mut File, within: Duration) -> bool {
    while readable(&*console, Duration::ZERO) {
        read_some(console);
    }
    readable(&*console, within)
}

fn pause(control: &mut Connection) {
    assert_eq!(control.request(Command::Pause, &[]), Ok(Response::Done));
    assert_eq!(control.state(), MachineState::Paused);
}

fn resume(control: &mut Connection) {
    assert_eq!(control.request(Command::Resume, &[]), Ok(Response::Done));
    assert_eq!(control.state(), MachineState::Running);
}

#[test]
fn a_paused_guest_does_nothing_and_goes_on_where_it_was() {
    let kernel = Code::default().print("tick\n").repeat_from(0).kernel();
    let (_vmm, mut control, mut console) = started(spec(2, 64), &kernel);
    assert!(talks(&mut console, PATIENCE));
    for _ in 0..20 {
        pause(&mut control);
        assert!(!talks(&mut console, Duration::from_millis(100)));
        resume(&mut control);
        assert!(talks(&mut console, PATIENCE));
    }
}

fn faults(control: &mut Connection) -> u64 {
    match control.request(Command::Status, &[]).unwrap() {
        Response::Status { faults, .. } => faults,
        other => panic!("{other:?}"),
    }
}

#[test]
fn page_faults_of_a_running_guest_are_counted() {
    // Writes to 4000 pages, says so, and spins.
    let touch = Code::default()
        // mov edi, 4 MiB; 1: mov [edi], edi; add edi, 4096; cmp edi, end; jb 1b
        .raw(&[
            0xbf, 0, 0, 0x40, 0, 0x89, 0x3f, 0x81, 0xc7, 0, 0x10, 0, 0, 0x81, 0xff,
        ])
        .raw(&(4 * MIB as u32 + 4000 * 4096).to_le_bytes())
        .raw(&[0x72, 0xf0])
        .print("touched\n");
    let end = touch.0.len();
    let (_vmm, mut control, mut console) = started(spec(2, 64), &touch.repeat_from(end).kernel());
    assert_eq!(read_some(&mut console), "touched\n");
    // A vCPU that does not get a processor in time is counted as of its last answer: at first, none.
    let began = Instant::now();
    let mut first = faults(&mut control);
    while first < 8 && began.elapsed() < PATIENCE {
        first = faults(&mut control);
    }
    // At least one for each 2 MiB page, at most a few for each small one.
    assert!((8..12_000).contains(&first), "{first}");
    // To be counted, a vCPU's thread runs code for the first time, which may fault too.
    let same = first..first + 8;
    for _ in 0..20 {
        let now = faults(&mut control);
        assert!(same.contains(&now), "{now} after {first}");
    }
    pause(&mut control);
    let now = faults(&mut control);
    assert!(same.contains(&now), "{now} after {first}");
}

#[test]
fn guests_that_spin_or_sleep_can_be_paused() {
    for code in [
        Code::default().repeat_from(0),
        Code::default().raw(&[0xfa, 0xf4]).repeat_from(0),
    ] {
        let (_vmm, mut control, _console) = started(spec(16, 64), &code.kernel());
        for _ in 0..50 {
            pause(&mut control);
            resume(&mut control);
        }
    }
}

#[test]
fn limited_disk_of_a_jailed_vmm_goes_on_by_its_timer() {
    use std::num::NonZeroU64;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use thaw_protocol::control::{Backend, DeviceId, ErrorCode};
    use thaw_protocol::device_limits::{Bucket, DeviceLimit, DeviceLimits};
    use thaw_tiny_guest::disk::{TIMES, reader};

    const READS: u32 = 128;
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(TIMES + 4 * u64::from(READS)).unwrap();
    let number = |number| NonZeroU64::new(number).unwrap();
    let limit = DeviceLimit {
        bytes: None,
        operations: Some(Bucket {
            per_second: number(100),
            burst: number(8),
            once: 0,
        }),
    };
    let set = |device, limits| Command::Limit { device, limits };
    let vmm = support::Vmm::spawn();
    let mut control = vmm.connect();
    let before = control.request(set(DeviceId::Blk0, DeviceLimits::Disk(limit)), &[]);
    assert_eq!(before.unwrap_err().code, ErrorCode::WrongState, "no machine yet");
    control.create(spec(1, 64)).unwrap();
    let (device, backend) = (DeviceId::Blk0, Backend::Disk { read_only: false });
    control
        .request(Command::Attach { device, backend }, &[disk.as_fd()])
        .unwrap();
    control
        .request(set(device, DeviceLimits::Disk(limit)), &[])
        .unwrap();
    for (device, limits) in [
        (DeviceId::Net, DeviceLimits::Disk(limit)),
        (DeviceId::Rng, DeviceLimits::Disk(limit)),
        (DeviceId::Console, DeviceLimits::Disk(limit)),
    ] {
        let refused = control.request(set(device, limits), &[]).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Invalid, "{device:?}: {refused}");
    }
    let (since, cmdline) = (Instant::now(), String::new());
    let kernel = reader(READS).kernel();
    control
        .request(Command::Boot { cmdline }, &[kernel.as_fd()])
        .unwrap();
    assert_eq!(control.exit(), ExitReason::PowerOff);
    // 128 reads and the write of their times, of which 8 are a burst, at 100 a second.
    let (took, least) = (since.elapsed(), Duration::from_millis(1210));
    assert!(took >= least && took < least * 10, "{took:?}");
    let mut times = vec![0; 4 * READS as usize];
    disk.read_exact_at(&mut times, TIMES).unwrap();
    assert!(
        times.chunks(4).all(|time| time != [0; 4]),
        "every read was answered"
    );
}

#[test]
fn jailed_vmm_writes_to_the_layer_of_a_disk_and_not_to_its_base() {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use thaw_protocol::control::{Backend, DeviceId};
    use thaw_protocol::disk_layer::{BLOCK, Marks, file_bytes, marks_bytes, marks_offset};
    use thaw_tiny_guest::disk::{TIMES, reader};

    const READS: u32 = 128;
    const BYTES: u64 = TIMES + BLOCK;
    let [base, layer] = [BYTES, file_bytes(BYTES)].map(|bytes| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        file
    });
    base.write_all_at(&[7; BYTES as usize], 0).unwrap();
    let vmm = support::Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let (device, backend) = (DeviceId::Blk0, Backend::LayeredDisk);
    control
        .request(
            Command::Attach { device, backend },
            &[base.as_fd(), layer.as_fd()],
        )
        .unwrap();
    let kernel = reader(READS).kernel();
    let cmdline = String::new();
    control
        .request(Command::Boot { cmdline }, &[kernel.as_fd()])
        .unwrap();
    assert_eq!(control.exit(), ExitReason::PowerOff);

    let mut content = vec![0; BYTES as usize];
    base.read_exact_at(&mut content, 0).unwrap();
    assert!(content.iter().all(|byte| *byte == 7));
    let mut block = vec![0; BLOCK as usize];
    layer.read_exact_at(&mut block, TIMES).unwrap();
    let (times, rest) = block.split_at(4 * READS as usize);
    assert!(times.chunks(4).all(|time| time != [0; 4] && time != [7; 4]));
    assert!(
        rest.iter().all(|byte| *byte == 7),
        "the rest of the block is the base's"
    );
    let mut bits = vec![0; marks_bytes(BYTES) as usize];
    layer.read_exact_at(&mut bits, marks_offset(BYTES)).unwrap();
    let marks = Marks::from_bytes(BYTES, bits).unwrap();
    let marked: Vec<u64> = (0..marks.blocks()).filter(|block| marks.has(*block)).collect();
    assert_eq!(marked, [TIMES / BLOCK]);
}
