use super::*;
use std::fs;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;

fn log() -> OwnedFd {
    rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

/// A script as the shell's child writes it: no other test's child can hold it open for writing.
fn script(directory: &Path, text: &str) -> PathBuf {
    let path = directory.join("fake-vmm");
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
    let mut shell = std::process::Command::new("/bin/sh");
    let written = shell.args(["-c", write]).arg(&path).arg(text).status();
    assert!(written.unwrap().success());
    path
}

#[test]
fn vmm_inherits_its_socket_and_no_other_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let program = script(directory.path(), "ls -l /proc/self/fd; env; echo pid $$");
    let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
    // A descriptor that a careless spawn would inherit.
    let stray = rustix::fs::memfd_create("stray", rustix::fs::MemfdFlags::empty()).unwrap();
    let log = log();
    let mut vmm = spawn(&program, &listener, &log, Jail::Whole).unwrap();
    assert!(vmm.wait().unwrap().unwrap().success());
    drop(stray);
    let mut text = String::new();
    let mut file = fs::File::from(log);
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    assert!(text.contains(" 3 -> socket:"), "{text}");
    assert!(text.contains(" 0 -> /dev/null"), "{text}");
    assert!(!text.contains("stray"), "{text}");
    assert!(!text.contains("HOME="), "{text}");
    assert!(text.contains("THAW_JAIL=whole"), "{text}");
    assert!(text.contains("pid 1\n"), "not in a PID namespace: {text}");
    let shares = shared_namespaces::get().is_some();
    assert_eq!(text.contains("THAW_NAMESPACES=4"), shares, "{text}");
    for (number, name) in (4..).zip(["net", "ipc", "uts", "cgroup", "mnt"]) {
        let line = format!(" {number} -> {name}:[");
        assert_eq!(text.contains(&line), shares, "{line}: {text}");
    }
}

#[test]
fn vmms_that_start_at_once_have_each_their_own_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let program = script(directory.path(), "exec readlink /proc/self/fd/3");
    // Fewer places than starts at once, so that some starts have none of these.
    reserve_descriptors(2).unwrap();
    let start = || {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let (mut read, write) = std::io::pipe().unwrap();
        let own = fs::read_link(format!("/proc/self/fd/{}", theirs.as_raw_fd())).unwrap();
        let log = OwnedFd::from(write);
        let mut vmm = spawn(&program, &theirs.into(), &log, Jail::AsHostAllows).unwrap();
        drop(log);
        // The pipe ends only when nobody has a copy of its other end.
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(Path::new(text.trim_end()), own);
        assert_eq!((&ours).read(&mut [0]).unwrap(), 0, "a copy of its socket is left");
        assert!(vmm.wait().unwrap().unwrap().success());
    };
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| (0..20).for_each(|_| start()));
        }
    });
}

#[test]
fn vmm_dies_with_its_owner_unless_released() {
    let directory = tempfile::tempdir().unwrap();
    let program = script(directory.path(), "exec sleep 60");
    let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
    let vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
    let record = vmm.record();
    assert!(record.lives());
    let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", record.pid)).unwrap();
    assert!(score.trim().parse::<i32>().unwrap() >= OOM_SCORE, "{score}");
    let files = || {
        let limits = fs::read_to_string(format!("/proc/{}/limits", record.pid)).unwrap();
        let files = limits
            .lines()
            .find_map(|l| l.strip_prefix("Max file size"))
            .unwrap();
        let mut words = files
            .split_whitespace()
            .map(|word| word.parse::<u64>().unwrap_or(0));
        (words.next().unwrap(), words.next().unwrap())
    };
    assert_eq!(files(), (LARGEST_FILE, LARGEST_FILE));
    vmm.limit_files(5 << 20).unwrap();
    assert_eq!(files(), (5 << 20, 5 << 20));
    drop(vmm);
    assert!(!record.lives());

    let mut vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
    vmm.release();
    let record = vmm.record();
    drop(vmm);
    assert!(record.lives());

    let adopted = VmmProcess::adopt(record).unwrap();
    drop(adopted);
    assert!(!record.lives());
    assert!(VmmProcess::adopt(record).is_none());
}

#[test]
fn ended_is_reported_before_it_is_reaped() {
    let directory = tempfile::tempdir().unwrap();
    let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
    let ended = |vmm: &VmmProcess| {
        process::await_end(&vmm.pidfd, process::END_LIMIT);
        (vmm.ended(), vmm.ended())
    };
    let program = script(directory.path(), "exit 7");
    let mut vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
    assert_eq!(ended(&vmm), (Some(Ended::Code(7)), Some(Ended::Code(7))));
    assert_eq!(
        vmm.wait().unwrap().unwrap().code(),
        Some(7),
        "it is still to be reaped"
    );
    assert_eq!(vmm.ended(), keeps_status().then_some(Ended::Code(7)));

    let program = script(directory.path(), "exec sleep 60");
    let vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
    assert_eq!(vmm.ended(), None, "it lives");
    vmm.kill();
    assert_eq!(ended(&vmm).0, Some(Ended::Signal(9)));
}

/// Whether a pidfd of this kernel keeps the status of a process that was reaped.
fn keeps_status() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(15))
}

#[test]
fn adopted_process_reports_how_it_ended() {
    let directory = tempfile::tempdir().unwrap();
    let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
    for (text, kills, end) in [
        ("exec sleep 60", true, Ended::Signal(9)),
        ("read line < fifo; exit 7", false, Ended::Code(7)),
    ] {
        let fifo = directory.path().join("fifo");
        let _ = fs::remove_file(&fifo);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let program = script(directory.path(), &text.replace("fifo", fifo.to_str().unwrap()));
        let mut vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
        let mut adopted = VmmProcess::adopt(vmm.record()).unwrap();
        adopted.release();
        assert_eq!(adopted.ended(), None, "it lives");
        match kills {
            true => adopted.kill(),
            false => fs::write(&fifo, "x\n").unwrap(),
        }
        process::await_end(&adopted.pidfd, process::END_LIMIT);
        assert_eq!(adopted.ended(), Some(end), "before its parent reaps it");
        vmm.wait().unwrap();
        assert_eq!(adopted.ended(), keeps_status().then_some(end), "after that");
    }
}

#[test]
fn sockets_work_at_paths_longer_than_an_address() {
    let directory = tempfile::tempdir().unwrap();
    let deep = directory.path().join("d".repeat(120));
    fs::create_dir(&deep).unwrap();
    let path = deep.join("control.sock");
    let listener = listen(&path, SocketType::SEQPACKET).unwrap();
    let ours = connect(&path, SocketType::SEQPACKET).unwrap();
    let theirs = rustix::net::accept(&listener).unwrap();
    thaw_protocol::packet::send(&ours, &5u32, &[]).unwrap();
    assert_eq!(thaw_protocol::packet::receive::<u32>(&theirs).unwrap().0, 5);
}

#[test]
fn socket_is_served_while_its_listener_lives() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    assert!(!is_served(&path));
    let listener = listen(&path, SocketType::STREAM).unwrap();
    assert!(is_served(&path));
    drop(listener);
    // A process that another test is starting may hold a copy of it for a moment.
    while is_served(&path) {
        std::thread::yield_now();
    }
    // A process that listens and is killed while its child has the socket.
    let script = "import os, socket, sys, time\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\n\
                  if os.fork() == 0:\n    print('ready', flush=True)\ntime.sleep(60)";
    let mut server = std::process::Command::new("python3")
        .args(["-c", script])
        .arg(directory.path().join("t"))
        .stdout(std::process::Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    server.stdout.take().unwrap().read_exact(&mut [0; 6]).unwrap();
    let path = directory.path().join("t");
    assert!(is_served(&path));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(connect(&path, SocketType::STREAM).is_ok() && !is_served(&path));
    rustix::process::kill_process_group(Pid::from_child(&server), Signal::KILL).unwrap();
}

#[test]
fn missing_vmm_binary_is_named() {
    let missing = Error::VmmMissing {
        looked: "/nowhere/thaw-vmm".into(),
    };
    assert!(missing.to_string().contains("/nowhere/thaw-vmm"));
    let directory = tempfile::tempdir().unwrap();
    let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
    let error = spawn(Path::new("/nowhere/thaw-vmm"), &listener, &log(), Jail::Whole).unwrap_err();
    assert!(error.to_string().contains("/nowhere/thaw-vmm"), "{error}");
}
