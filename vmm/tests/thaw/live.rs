//! Freezes that the guest runs through: a guest that never stops writing, and snapshots of one moment.

use super::deltas::STEPS;
use super::support::Connection;
use super::*;

/// Bytes that the guest below writes over and over.
const SWEPT: u32 = 8 * MIB as u32;

/// A guest that counts, and writes the count to each page of [`SWEPT`] bytes from [`STEPS`]. It checks first that the page has the count
/// before; if not, it resets. After each sweep it prints a newline.
fn sweeping() -> File {
    let failure = Code::default().out(0x602, 1).0;
    let code = Code::default()
        // xor ebx, ebx
        .raw(&[0x31, 0xdb])
        .print(STEPS_READY);
    let sweep = code.0.len();
    code
        // inc ebx; mov edi, STEPS
        .raw(&[0x43, 0xbf])
        .raw(&STEPS.to_le_bytes())
        // 1: lea eax, [ebx - 1]; cmp [edi], eax; je +failure
        .raw(&[0x8d, 0x43, 0xff, 0x39, 0x07, 0x74, failure.len() as u8])
        .raw(&failure)
        // mov [edi], ebx; add edi, 4096; cmp edi, STEPS + SWEPT; jb 1b
        .raw(&[0x89, 0x1f, 0x81, 0xc7, 0, 0x10, 0, 0, 0x81, 0xff])
        .raw(&(STEPS + SWEPT).to_le_bytes())
        .raw(&[0x72, (-(23 + failure.len() as i8)) as u8])
        .print("\n")
        .repeat_from(sweep)
        .kernel()
}

/// The files of a freeze.
struct Files {
    state: File,
    memory: File,
}

impl Files {
    fn new() -> Files {
        let file = || thaw_tiny_guest::memfd(b"");
        Files {
            state: file(),
            memory: file(),
        }
    }

    fn prepare(
        &self,
        vmm: &Vmm,
        control: &mut Connection,
        kind: FreezeKind,
    ) -> Result<Response, ControlError> {
        let (pagemap, device) = (vmm.pagemap(), userfaultfd().unwrap());
        let fds = [self.memory.as_fd(), pagemap.as_fd(), device.as_fd()];
        control.request(Command::PrepareFreeze { kind }, &fds)
    }

    fn begin(&self, control: &mut Connection) -> Result<Response, ControlError> {
        control.request(Command::Pause, &[]).unwrap();
        let begun = control.request(Command::BeginFreeze, &[self.state.as_fd()]);
        control.request(Command::Resume, &[]).unwrap();
        begun
    }
}

/// Freezes a running machine. Its memory files stay in memory, so that a machine restored from them can be protected.
fn frozen(vmm: &Vmm, control: &mut Connection, below: &[File], kind: FreezeKind) -> (Snapshot, u64) {
    let files = Files::new();
    files.prepare(vmm, control, kind).unwrap();
    let stopped = std::time::Instant::now();
    files.begin(control).unwrap();
    let stopped = stopped.elapsed();
    assert_eq!(control.state(), MachineState::Running);
    let answer = control.request(Command::FinishFreeze, &[]).unwrap();
    let Response::Frozen { memory_bytes } = answer else {
        panic!("{answer:?}")
    };
    eprintln!("{kind:?}: {memory_bytes:#x} bytes, stopped for {stopped:?}");
    let mut layers: Vec<File> = below.iter().map(|file| file.try_clone().unwrap()).collect();
    layers.push(files.memory);
    let state = files.state;
    (Snapshot { state, layers }, memory_bytes)
}

/// The swept pages have one count up to some page, and the count before from there on.
fn is_of_one_moment(memory: &File) {
    let count = |page: u32| {
        let mut count = [0; 4];
        memory
            .read_exact_at(&mut count, u64::from(STEPS + page * 4096))
            .unwrap();
        u32::from_le_bytes(count)
    };
    let pages = SWEPT / 4096;
    let (first, last) = (count(0), count(pages - 1));
    assert!(first == last || first == last + 1, "{first} {last}");
    let turned = (0..pages)
        .position(|page| count(page) != first)
        .unwrap_or(pages as usize);
    assert!((turned as u32..pages).all(|page| count(page) == last));
}

#[test]
fn a_guest_that_never_stops_writing_is_frozen_at_one_moment() {
    if userfaultfd().is_none() {
        thaw_test_skip::skip("this host has no /dev/userfaultfd, or not for us");
        return;
    }
    let machine = spec(1, 64);
    let (vmm, mut control, mut console) = started(machine.clone(), &sweeping());
    read_exactly(&mut console, STEPS_READY.len() + 3);
    let mut full = None;
    for _ in 0..3 {
        let (snapshot, bytes) = frozen(&vmm, &mut control, &[], FreezeKind::Full);
        assert!(
            bytes >= u64::from(SWEPT) && bytes < 2 * u64::from(SWEPT),
            "{bytes:#x}"
        );
        is_of_one_moment(&snapshot.layers[0]);
        // The guest goes on, and finds nothing wrong.
        while readable(&console, std::time::Duration::ZERO) {
            std::io::Read::read(&mut console, &mut [0; 65536]).unwrap();
        }
        read_exactly(&mut console, 2);
        full = Some(snapshot);
    }
    let full = full.unwrap();
    let (clone, mut control, mut console) = full.thawed(machine.clone());
    read_exactly(&mut console, 2);
    let (delta, bytes) = frozen(&clone, &mut control, &full.layers, FreezeKind::Delta);
    assert!(
        bytes >= u64::from(SWEPT) && bytes < 2 * u64::from(SWEPT),
        "{bytes:#x}"
    );
    is_of_one_moment(&delta.layers[1]);
    let (_vmm, mut control, mut console) = delta.thawed(machine);
    read_exactly(&mut console, 2);
    assert_eq!(control.state(), MachineState::Running);
}

#[test]
fn a_live_freeze_that_fails_leaves_the_machine_running() {
    if userfaultfd().is_none() {
        thaw_test_skip::skip("this host has no /dev/userfaultfd, or not for us");
        return;
    }
    let vmm = Vmm::spawn_with_file_limit(MIB);
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let mut console = control.console();
    control.boot(&sweeping()).unwrap();
    read_exactly(&mut console, STEPS_READY.len() + 1);
    let wrong = |result: Result<Response, ControlError>| {
        assert_eq!(result.unwrap_err().code, ErrorCode::WrongState);
    };
    wrong(control.request(Command::FinishFreeze, &[]));
    let files = Files::new();
    wrong(files.begin(&mut control));
    // The file cannot be written.
    files.prepare(&vmm, &mut control, FreezeKind::Full).unwrap();
    wrong(files.prepare(&vmm, &mut control, FreezeKind::Full));
    files.begin(&mut control).unwrap();
    let failed = control.request(Command::FinishFreeze, &[]).unwrap_err();
    assert_eq!(failed.code, ErrorCode::System, "{failed}");
    wrong(control.request(Command::FinishFreeze, &[]));
    // Cancelled before and after it has begun; by the end of the connection.
    for begins in [false, true] {
        let files = Files::new();
        files.prepare(&vmm, &mut control, FreezeKind::Full).unwrap();
        if begins {
            files.begin(&mut control).unwrap();
        }
        control.request(Command::CancelFreeze, &[]).unwrap();
        wrong(control.request(Command::FinishFreeze, &[]));
    }
    Files::new()
        .prepare(&vmm, &mut control, FreezeKind::Full)
        .unwrap();
    drop(control);
    let mut control = vmm.connect();
    Files::new()
        .prepare(&vmm, &mut control, FreezeKind::Full)
        .unwrap();
    assert_eq!(control.state(), MachineState::Running);
    control.request(Command::Pause, &[]).unwrap();
    wrong(freeze(&vmm, &mut control, FreezeKind::Full, &empty(), &empty()));
    control.request(Command::CancelFreeze, &[]).unwrap();
}

#[test]
fn memory_mapped_from_a_disk_is_frozen_only_when_stopped() {
    if userfaultfd().is_none() {
        thaw_test_skip::skip("this host has no /dev/userfaultfd, or not for us");
        return;
    }
    let snapshot = frozen_at(&sweeping(), STEPS_READY);
    let (vmm, mut control, mut console) = snapshot.thawed(spec(1, 64));
    match Files::new().prepare(&vmm, &mut control, FreezeKind::Full) {
        Ok(_) => thaw_test_skip::skip("files of this host's temporary directory are in memory"),
        Err(e) => assert_eq!(e.code, ErrorCode::Unprotected, "{e}"),
    }
    read_exactly(&mut console, 2);
    control.request(Command::CancelFreeze, &[]).unwrap();
    control.request(Command::Pause, &[]).unwrap();
    Snapshot::full(&vmm, &mut control);
}
