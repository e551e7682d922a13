//! A workload made of all that a freeze could break: an open file, a mapped file, a timer, a tree of processes, a TCP
//! connection, a thread that reads without pause, a file that is written. Every check compares with what must have
//! happened, never with a clock alone: a frozen guest does not feel the time.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::json;
use thaw_e2e::probe::{TICKS, pattern};

use crate::identity;

const TICK: Duration = Duration::from_millis(100);

pub fn forever(path: &str) -> ! {
    let mut kept = File::open(path).unwrap();
    let mapped = map(&kept);
    let mut timer = timer();
    let mut tree = process_tree();
    let mut echo = echo();
    let mut ticks = OpenOptions::new().create(true).append(true).open(TICKS).unwrap();
    let passes = Arc::new(AtomicU64::new(0));
    let reader = (path.to_string(), passes.clone());
    thread::spawn(move || read_without_pause(&reader.0, &reader.1));

    let mut expirations = 0;
    for tick in 0u64.. {
        thread::sleep(TICK);
        let at = (tick as usize * 4099) % (mapped.len() - 1);
        check("mapped file", mapped[at] == pattern(at));
        let mut byte = [0];
        kept.seek(SeekFrom::Start(at as u64)).unwrap();
        kept.read_exact(&mut byte)
            .unwrap_or_else(|e| fail(&format!("open file: {e}")));
        check("open file", byte[0] == pattern(at));
        let mut count = [0; 8];
        timer
            .read_exact(&mut count)
            .unwrap_or_else(|e| fail(&format!("timer: {e}")));
        expirations += u64::from_ne_bytes(count);
        let descendant =
            ask(&mut tree.0, &mut tree.1, tick).unwrap_or_else(|e| fail(&format!("process tree: {e}")));
        check("process tree", descendant == tick + 2);
        let answered = exchange(&mut echo, tick).unwrap_or_else(|e| fail(&format!("TCP: {e}")));
        check("TCP", answered == tick);
        let line = json!({
            "tick": tick, "timer": expirations, "passes": passes.load(Ordering::Relaxed),
            "random": identity::random(), "hostname": std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim(),
        });
        writeln!(ticks, "{line}").unwrap_or_else(|e| fail(&format!("written file: {e}")));
        println!("{line}");
    }
    unreachable!("no program counts that far");
}

fn check(what: &str, right: bool) {
    if !right {
        fail(&format!("{what}: wrong bytes"));
    }
}

fn fail(what: &str) -> ! {
    println!("FAIL {what}");
    exit(3);
}

fn map(file: &File) -> &'static [u8] {
    let length = file.metadata().unwrap().len() as usize;
    // SAFETY: a private read-only mapping of a file nobody changes, never unmapped.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts(at.cast(), length)
    }
}

/// Fires 20 times a second.
fn timer() -> File {
    let period = libc::timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    let setting = libc::itimerspec {
        it_interval: period,
        it_value: period,
    };
    // SAFETY: the descriptor is new and owned by the file; the setting is ours.
    unsafe {
        let fd = libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC);
        assert!(fd >= 0);
        assert_eq!(libc::timerfd_settime(fd, 0, &setting, std::ptr::null_mut()), 0);
        File::from_raw_fd(fd)
    }
}

/// A child with a child of its own, each of which adds one to the number it is given: (to the child, from the grandchild).
fn process_tree() -> (File, File) {
    let [to_child, from_parent] = pipe();
    let [to_grandchild, from_child] = pipe();
    let [to_us, from_grandchild] = pipe();
    // SAFETY: called before any thread was made; the children only read and write their pipes.
    unsafe {
        if libc::fork() == 0 {
            if libc::fork() == 0 {
                add_one(from_child, to_us);
            }
            add_one(from_parent, to_grandchild);
        }
    }
    (to_child, from_grandchild)
}

/// [written to, read from]
fn pipe() -> [File; 2] {
    let (read, write) = rustix::pipe::pipe().unwrap();
    [write.into(), read.into()]
}

fn add_one(mut from: File, mut to: File) -> ! {
    let mut number = [0; 8];
    while from.read_exact(&mut number).is_ok() {
        let more = u64::from_ne_bytes(number) + 1;
        if to.write_all(&more.to_ne_bytes()).is_err() {
            break;
        }
    }
    exit(0)
}

/// A connection to a thread that sends back what it gets.
fn echo() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        let mut bytes = [0; 8];
        while peer.read_exact(&mut bytes).is_ok() && peer.write_all(&bytes).is_ok() {}
    });
    TcpStream::connect(address).unwrap()
}

fn exchange(echo: &mut TcpStream, number: u64) -> std::io::Result<u64> {
    let mut reading = echo.try_clone()?;
    ask(echo, &mut reading, number)
}

fn ask(to: &mut impl Write, from: &mut impl Read, number: u64) -> std::io::Result<u64> {
    to.write_all(&number.to_ne_bytes())?;
    let mut answer = [0; 8];
    from.read_exact(&mut answer)?;
    Ok(u64::from_ne_bytes(answer))
}

/// Reads the file over and over, each time from the device: its pages are dropped before every pass.
fn read_without_pause(path: &str, passes: &AtomicU64) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let mut file = File::open(path).unwrap();
        // SAFETY: advice on an open descriptor.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let mut position = 0;
        loop {
            let length = file
                .read(&mut buffer)
                .unwrap_or_else(|e| fail(&format!("reading thread: {e}")));
            if length == 0 {
                break;
            }
            let right = buffer[..length]
                .iter()
                .enumerate()
                .all(|(i, byte)| *byte == pattern(position + i));
            check("reading thread", right);
            position += length;
        }
        passes.fetch_add(1, Ordering::Relaxed);
    }
}
