use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::path::PathBuf;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::thread::UnshareFlags;

use super::*;
use crate::container::fork;

/// A cgroup for this test, or why there is none.
fn cgroup() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|words| words.get(2) == Some(&"cgroup2"));
    let root = PathBuf::from(root?.get(1)?);
    let path = root.join(format!("thaw-listens-{}", std::process::id()));
    std::fs::create_dir(&path).ok().map(|()| path)
}

#[test]
fn listening_sockets_are_reported_after_a_flood() {
    let Some(path) = cgroup() else {
        thaw_test_skip::skip("no cgroup can be made here");
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _within = runtime.enter();
    let mut listens = ListenWatch::watch(&path, 8080).unwrap();
    let (wait, go) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (done, tell) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let pid = fork::fork(|| {
        let _ = std::fs::write(path.join("cgroup.procs"), "0");
        // In its own network namespace the port is free.
        let _ = thaw_sys::jail::unshare(UnshareFlags::NEWNET);
        let listen = |ip: IpAddr, port: u16| drop(TcpListener::bind((ip, port)).unwrap());
        listen(Ipv4Addr::UNSPECIFIED.into(), 8081);
        listen(Ipv4Addr::UNSPECIFIED.into(), 8080);
        let _ = rustix::io::write(&tell, b"1");
        let _ = rustix::io::read(&wait, &mut [0]);
        for _ in 0..3000 {
            listen(Ipv6Addr::UNSPECIFIED.into(), 8080);
        }
        let _ = rustix::io::write(&tell, b"2");
        let _ = rustix::io::read(&wait, &mut [0]);
        listen(Ipv4Addr::UNSPECIFIED.into(), 8080);
        fork::exit(0);
    })
    .unwrap();
    let next = |listens: &mut ListenWatch| runtime.block_on(listens.next()).unwrap();
    // Only the requested port is reported.
    assert_eq!(next(&mut listens), [Ipv4Addr::UNSPECIFIED]);
    rustix::io::read(&done, &mut [0]).unwrap();
    rustix::io::write(&go, b"1").unwrap();
    rustix::io::read(&done, &mut [0]).unwrap();
    let flood = next(&mut listens);
    assert!(flood.iter().all(|address| *address == Ipv6Addr::UNSPECIFIED));
    assert!(
        flood.len() < 3000,
        "{}: as many as there is room for",
        flood.len()
    );
    rustix::io::write(&go, b"2").unwrap();
    assert_eq!(next(&mut listens), [Ipv4Addr::UNSPECIFIED]);
    let pid = rustix::process::Pid::from_raw(pid);
    rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
    drop(listens);
    std::fs::remove_dir(path).unwrap();
}

#[test]
fn reported_addresses_are_in_network_byte_order() {
    let event = |family: i32, words: [u32; 5]| {
        let [a, b, c, d, e] = words;
        address([family as u32, a, b, c, d, e])
    };
    let four = u32::from_ne_bytes([127, 0, 0, 1]);
    assert_eq!(
        event(libc::AF_INET, [four, 0, 0, 0, 0]),
        Some(Ipv4Addr::LOCALHOST.into())
    );
    let one = u32::from_ne_bytes([0, 0, 0, 1]);
    assert_eq!(
        event(libc::AF_INET6, [0, 0, 0, 0, one]),
        Some(Ipv6Addr::LOCALHOST.into())
    );
    assert_eq!(event(libc::AF_UNIX, [0; 5]), None);
}
