//! Everything that must differ between clones, and the clocks, which must not go wrong.

use std::fs;
use std::io::Read;

use serde_json::{Value, json};

use crate::initial_sequence;

/// 16 bytes from getrandom(2).
pub fn random() -> Vec<u8> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).unwrap();
    bytes.to_vec()
}

pub fn all(first: &[u8]) -> Value {
    let mut urandom = [0u8; 16];
    fs::File::open("/dev/urandom")
        .unwrap()
        .read_exact(&mut urandom)
        .unwrap();
    json!({
        "getrandom": hex(first),
        "urandom": hex(&urandom),
        "at_random": hex(&at_random()),
        "boot_id": text("/proc/sys/kernel/random/boot_id"),
        "hostname": text("/proc/sys/kernel/hostname"),
        "mac": text("/sys/class/net/eth0/address"),
        "isn": initial_sequence::sample(),
        "realtime_ns": now(libc::CLOCK_REALTIME),
        "monotonic_ns": now(libc::CLOCK_MONOTONIC),
        "cpus": std::thread::available_parallelism().unwrap().get(),
        "memory_kib": memory_kib(),
    })
}

/// The bytes the kernel gave this process for its stack canary and pointer guard.
fn at_random() -> [u8; 16] {
    // SAFETY: AT_RANDOM is the address of 16 bytes the kernel put on this process's stack (getauxval(3)).
    unsafe { *(libc::getauxval(libc::AT_RANDOM) as *const [u8; 16]) }
}

fn memory_kib() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap();
    let total = info.lines().find(|l| l.starts_with("MemTotal")).unwrap();
    total.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn now(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the clock exists and the structure is ours.
    assert_eq!(unsafe { libc::clock_gettime(clock, &mut time) }, 0);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_string()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
