//! Tests of a VMM's states against a fake VMM. `vmm/tests` use the real one.

use super::*;
use rustix::net::{AddressFamily, SocketFlags, socketpair};
use std::fs::File;
use thaw_protocol::control::{CONTROL_VERSION, CpuBaseline, ErrorCode};

fn spec(tethered: bool) -> MachineSpec {
    MachineSpec {
        vcpus: 1,
        memory_mib: 64,
        cpu: CpuBaseline::Host,
        tethered,
    }
}

fn file(text: &str) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&fd, text.as_bytes()).unwrap();
    fd
}

fn read(fd: &OwnedFd) -> String {
    use std::os::unix::fs::FileExt;
    let mut text = [0; 64];
    let n = File::from(fd.try_clone().unwrap()).read_at(&mut text, 0).unwrap();
    String::from_utf8_lossy(&text[..n]).into_owned()
}

/// A program as the shell's child writes it: no other test's child can hold it open for writing.
fn sleeper(directory: &Path) -> PathBuf {
    let program = directory.join("fake-vmm");
    let write = "printf '#!/bin/sh\\nexec sleep 60\\n' > \"$0\" && chmod 755 \"$0\"";
    let mut shell = std::process::Command::new("/bin/sh");
    let written = shell.args(["-c", write]).arg(&program).status();
    assert!(written.unwrap().success());
    program
}

fn options(directory: &Path, tethered: bool) -> VmmOptions {
    VmmOptions {
        control: directory.join("control.sock"),
        log: directory.join("log"),
        tethered,
        jail: Jail::AsHostAllows,
    }
}

/// A process, and our end of its control socket.
fn with_peer(directory: &Path) -> (Process, OwnedFd) {
    let mut process = Process::start(&sleeper(directory), &options(directory, true)).unwrap();
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    process.vmm.control = ours;
    (process, theirs)
}

type Asked = (Command, Vec<OwnedFd>);

/// Answers each request with the next of `answers`. Returns the requests.
fn answering(
    peer: OwnedFd,
    answers: Vec<Result<(Response, Vec<OwnedFd>), ControlError>>,
) -> std::thread::JoinHandle<Vec<Asked>> {
    std::thread::spawn(move || {
        let mut asked = Vec::new();
        for answer in answers {
            let (Request { id, command }, fds) = packet::receive::<Request>(&peer).unwrap();
            asked.push((command, fds));
            let (result, fds) = match answer {
                Ok((response, fds)) => (Ok(response), fds),
                Err(e) => (Err(e), Vec::new()),
            };
            let beside: Vec<BorrowedFd<'_>> = fds.iter().map(|f| f.as_fd()).collect();
            packet::send(&peer, &FromVmm::Reply { id, result }, &beside).unwrap();
        }
        asked
    })
}

fn snapshot() -> SnapshotFiles {
    SnapshotFiles {
        state: file("state"),
        memory: vec![file("bottom"), file("top")],
        working_set: Some(file("working set")),
    }
}

fn restored() -> Response {
    Response::Restored {
        regions: Vec::new(),
        populated_pages: 7,
        populate_ns: 8,
    }
}

#[test]
fn create_uses_the_newest_version_the_vmm_takes() {
    let refusal = |code| {
        Err(ControlError {
            code,
            message: "no".into(),
        })
    };
    let done = || Ok((Response::Done, vec![]));
    let kvm = file("kvm");
    for (answers, versions, is_made) in [
        (vec![done()], vec![7], true),
        (vec![refusal(ErrorCode::Invalid), done()], vec![7, 6], true),
        (
            [(); 3].map(|()| refusal(ErrorCode::Invalid)).into(),
            vec![7, 6, 5],
            false,
        ),
        (vec![refusal(ErrorCode::Kvm)], vec![7], false),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (process, peer) = with_peer(directory.path());
        let vmm = answering(peer, answers);
        let shell = process.create(kvm.as_fd(), spec(false));
        let asked: Vec<u32> = vmm
            .join()
            .unwrap()
            .into_iter()
            .map(|(command, fds)| match command {
                Command::Create { version, .. } if fds.len() == 1 => version,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(asked, versions);
        assert_eq!(shell.is_ok(), is_made);
        if let Ok(shell) = shell {
            assert_eq!(Some(&Vm::Shell(shell).control_version()), versions.last());
        }
    }
}

#[test]
fn doorbell_without_a_guest_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (process, peer) = with_peer(directory.path());
    let vmm = std::thread::spawn(move || {
        packet::receive::<Request>(&peer).unwrap();
        let ring = FromVmm::Event(Event::Doorbell { at: 1 });
        while packet::send(&peer, &ring, &[]).is_ok() {}
    });
    let kvm = file("kvm");
    let made = process.create(kvm.as_fd(), spec(false));
    assert!(matches!(made, Err(MachineError::UnexpectedAnswer)));
    vmm.join().unwrap();
}

#[test]
fn steps_send_the_right_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let (process, peer) = with_peer(directory.path());
    let answers = vec![Ok((Response::Done, vec![])), Ok((restored(), vec![]))];
    let vmm = answering(peer, answers);
    let kvm = file("kvm");
    let shell = process.create(kvm.as_fd(), spec(false)).unwrap();
    let parked = shell.restore(&snapshot(), MemoryMode::Cow, None).unwrap();
    assert!(parked.machine().tethered, "as the process was started");
    assert_eq!(
        (parked.restored().populated_pages, parked.restored().populate_ns),
        (7, 8)
    );
    let asked = vmm.join().unwrap();
    let texts = |fds: &[OwnedFd]| fds.iter().map(read).collect::<Vec<_>>();
    assert!(
        matches!(&asked[0].0, Command::Create { version: CONTROL_VERSION, machine } if *machine == spec(true))
    );
    assert_eq!(texts(&asked[0].1), ["kvm"]);
    let restore = Command::Restore {
        layers: 2,
        working_set: true,
        mode: MemoryMode::Cow,
    };
    assert_eq!(asked[1].0, restore);
    assert_eq!(texts(&asked[1].1), ["state", "bottom", "top", "working set"]);
    let vm = Vm::Parked(parked);
    assert_eq!(vm.state(), "parked");
    let (_, _, said) = vm.into_parts();
    assert_eq!(said.unwrap().populated_pages, 7);
}

#[test]
fn userfaultfd_restore_sends_no_memory_and_returns_it() {
    let directory = tempfile::tempdir().unwrap();
    let (process, peer) = with_peer(directory.path());
    let vmm = answering(
        peer,
        vec![Ok((Response::Done, vec![])), Ok((restored(), vec![file("uffd")]))],
    );
    let shell = process.create(file("kvm").as_fd(), spec(true)).unwrap();
    let device = file("device");
    let parked = shell
        .restore(&snapshot(), MemoryMode::Uffd, Some(device.as_fd()))
        .unwrap();
    assert_eq!(read(parked.restored().userfault.as_ref().unwrap()), "uffd");
    let asked = vmm.join().unwrap();
    assert!(matches!(asked[1].0, Command::Restore { layers: 1, .. }));
    assert_eq!(
        asked[1].1.iter().map(read).collect::<Vec<_>>(),
        ["state", "device", "working set"]
    );
}

#[test]
fn refusal_and_end_differ_and_leave_no_process() {
    let refusal = ControlError {
        code: ErrorCode::Kvm,
        message: "no irqchip".into(),
    };
    let directory = tempfile::tempdir().unwrap();
    let (process, peer) = with_peer(directory.path());
    let record = process.process().record();
    let vmm = answering(peer, vec![Err(refusal.clone())]);
    match process.create(file("kvm").as_fd(), spec(true)) {
        Err(MachineError::Refused(e)) => assert_eq!(e, refusal),
        other => panic!("{other:?}"),
    }
    assert!(!record.lives());
    vmm.join().unwrap();

    let (process, peer) = with_peer(directory.path());
    let record = process.process().record();
    drop(peer);
    let ended = process.create(file("kvm").as_fd(), spec(true));
    assert!(matches!(ended, Err(MachineError::Ended)), "{ended:?}");
    assert!(!record.lives());

    let (process, peer) = with_peer(directory.path());
    packet::send(&peer, &FromVmm::Event(Event::Exited(ExitReason::Reset)), &[]).unwrap();
    let exited = process.create(file("kvm").as_fd(), spec(true));
    assert!(
        matches!(exited, Err(MachineError::Exited(ExitReason::Reset))),
        "{exited:?}"
    );
}

#[test]
fn process_is_checked_and_ends_when_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let program = sleeper(directory.path());
    let (tethered, free) = (options(directory.path(), true), options(directory.path(), false));
    let vm = Vm::Process(Process::start(&program, &tethered).unwrap());
    assert!(!tethered.control.exists(), "nobody else is to connect");
    vm.check().unwrap();
    let record = vm.process().record();
    vm.process().kill();
    while record.lives() {
        std::thread::yield_now();
    }
    assert!(vm.check().is_err());

    let vm = Vm::Process(Process::start(&program, &free).unwrap());
    assert!(free.control.exists());
    let record = vm.process().record();
    drop(vm);
    assert!(!record.lives());
    std::fs::remove_file(&free.control).unwrap();
    assert!(Process::start(Path::new("/nowhere/thaw-vmm"), &tethered).is_err());
}
