//! How a clone has its memory: page by page from another process, and what was read of it before.

use super::deltas::{STEPS, stepping};
use super::*;

/// Fills pages from a memory file whose regions are `regions`, until the machine is gone.
fn serve(uffd: std::os::fd::OwnedFd, regions: &[MappedRegion], memory: &File) {
    #[repr(C)]
    struct UffdioCopy {
        dst: u64,
        src: u64,
        len: u64,
        mode: u64,
        copy: i64,
    }
    /// `_IOWR(0xAA, 3, struct uffdio_copy)` of linux/userfaultfd.h.
    const UFFDIO_COPY: libc::Ioctl = 0xC028_AA03;
    // struct uffd_msg: the event in byte 0 (0x12: a page fault), the address at byte 16.
    let mut message = [0; 32];
    loop {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut ready = [PollFd::new(&uffd, PollFlags::IN)];
        poll(&mut ready, None).unwrap();
        match rustix::io::read(&uffd, &mut message) {
            Ok(32) => {}
            Err(rustix::io::Errno::AGAIN) => continue,
            other => panic!("{other:?}"),
        }
        assert_eq!(message[0], 0x12);
        let address = u64::from_le_bytes(message[16..24].try_into().unwrap()) & !4095;
        let mut before = 0;
        let mut offset = None;
        for region in regions {
            match address.checked_sub(region.host_address) {
                Some(inside) if inside < region.size => offset = Some(before + inside),
                _ => before += region.size,
            }
        }
        let mut page = [0u8; 4096];
        memory.read_exact_at(&mut page, offset.unwrap()).unwrap();
        let mut copy = UffdioCopy {
            dst: address,
            src: page.as_ptr() as u64,
            len: 4096,
            mode: 0,
            copy: 0,
        };
        // SAFETY: it reads a page of ours and fills one of another process's.
        let done = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&uffd), UFFDIO_COPY, &raw mut copy) };
        if done != 0 {
            // ESRCH: that process has ended.
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ESRCH));
            return;
        }
    }
}

#[test]
fn missing_memory_is_filled_over_userfaultfd_also_for_kvm() {
    let Ok(device) = File::options().read(true).write(true).open("/dev/userfaultfd") else {
        thaw_test_skip::skip("this host has no /dev/userfaultfd, or not for us");
        return;
    };
    // The guest tells KVM where its clock is (MSR 0x4b564d01): mov ecx, 0x4b564d01; mov eax, 3 MiB + 1; cdq; wrmsr
    let clocked = Code::default().raw(&[
        0xb9, 0x01, 0x4d, 0x56, 0x4b, 0xb8, 1, 0, 0x30, 0, 0x99, 0x0f, 0x30,
    ]);
    let snapshot = frozen_at(&stepping(clocked).kernel(), STEPS_READY);
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let command = Command::Restore {
        layers: 1,
        working_set: false,
        mode: MemoryMode::Uffd,
    };
    let fds = [&snapshot.state, &device].map(std::os::fd::AsFd::as_fd);
    let (response, mut beside) = control.request_for_fds(command, &fds).unwrap();
    let Response::Restored { regions, .. } = response else {
        panic!("{response:?}")
    };
    assert_eq!((regions.len(), beside.len()), (1, 1));
    assert_eq!((regions[0].guest_address, regions[0].size), (0, 64 * MIB));
    let (uffd, memory) = (beside.remove(0), snapshot.layers[0].try_clone().unwrap());
    // It ends with the test's process.
    std::thread::spawn(move || serve(uffd, &regions, &memory));
    let mut console = control.console();
    thaw(&mut control).unwrap();
    assert_eq!(read_exactly(&mut console, 1), b"\n");
    // Frozen from there, it is whole.
    control.request(Command::Pause, &[]).unwrap();
    let full = Snapshot::full(&vmm, &mut control);
    assert_eq!(read_exactly(&mut full.thawed(spec(1, 64)).2, 1), b"\n");
}

/// Reads one word of every page from 2 MiB up to `mib`, then prints a newline, when its generation changes; before, it
/// writes them.
fn rereading(mib: u32) -> Code {
    let sweep = |code: Code, access: [u8; 2]| {
        // mov edi, 2 MiB; 1: ACCESS; add edi, 4096; cmp edi, end; jb 1b
        code.raw(&[0xbf])
            .raw(&STEPS.to_le_bytes())
            .raw(&access)
            .raw(&[0x81, 0xc7, 0, 0x10, 0, 0, 0x81, 0xff])
            .raw(&(mib * MIB as u32).to_le_bytes())
            .raw(&[0x72, 0xf0])
    };
    // mov [edi], edi; then mov esi, GENERATION_ID; mov ebx, [esi]
    let code = sweep(Code::default(), [0x89, 0x3f])
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY)
        // 1: cmp ebx, [esi]; je 1b
        .raw(&[0x3b, 0x1e, 0x74, 0xfc]);
    // mov eax, [edi]
    let code = sweep(code, [0x8b, 0x07]).print("\n");
    let end = code.0.len();
    code.repeat_from(end)
}

#[test]
fn recorded_working_set_spares_most_page_faults() {
    let snapshot = frozen_at(&rereading(32).kernel(), STEPS_READY);
    let (vmm, mut control, mut console) = snapshot.thawed(spec(1, 64));
    read_exactly(&mut console, 1);
    let without = control.faults_when_stopped();
    let (set, pagemap) = (empty(), vmm.pagemap());
    let fds = [&set, &pagemap].map(std::os::fd::AsFd::as_fd);
    assert_eq!(control.request(Command::WorkingSet, &fds), Ok(Response::Done));
    assert!(set.metadata().unwrap().len() > 0);
    assert_eq!(control.state(), MachineState::Running);

    let restore_with = |mode: MemoryMode, set: Option<&File>| {
        let vmm = Vmm::spawn();
        let mut control = vmm.connect();
        control.create(spec(1, 64)).unwrap();
        let response = snapshot.restore_as(&mut control, mode, set).unwrap();
        let Response::Restored { populated_pages, .. } = response else {
            panic!("{response:?}")
        };
        let mut console = control.console();
        thaw(&mut control).unwrap();
        read_exactly(&mut console, 1);
        (populated_pages, control.faults_when_stopped())
    };
    assert_eq!(restore_with(MemoryMode::Cow, None).0, 0);
    for (mode, set) in [(MemoryMode::Cow, Some(&set)), (MemoryMode::Populate, None)] {
        let (populated, with) = restore_with(mode, set);
        assert!(
            populated >= 30 * 256,
            "{mode:?}: {populated} pages were populated"
        );
        assert!(
            with * 5 <= without,
            "{mode:?}: {with} faults with, {without} without"
        );
    }

    let mut damaged = contents(&set);
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let damaged = thaw_tiny_guest::memfd(&damaged);
    let refused = snapshot
        .restore_as(&mut control, MemoryMode::Cow, Some(&damaged))
        .unwrap_err();
    assert_eq!(refused.code, ErrorCode::Snapshot);
    assert_eq!(control.state(), MachineState::Created);
}
