use super::*;

const SMALL: &str = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n000f0000-000fffff : Reserved\n\
    00100000-07ffffff : System RAM\n  01000000-0152ffff : Kernel code\nd0000000-d0000fff : LNRO0005:00\n\
    4000000000-4fffffffff : virtio8\n  4000000000-4017ffffff : System RAM (virtio_mem)\n";

/// A machine's sysfs: `blocks` of 128 MiB with their states, and `cpus` in addition to CPU 0.
fn machine(iomem: &str, blocks: &[(u64, &str)], cpus: &[(u8, &str)]) -> (tempfile::TempDir, Hotplug) {
    let dir = tempfile::tempdir().unwrap();
    let system = dir.path().join("system");
    fs::create_dir_all(system.join("memory")).unwrap();
    fs::write(system.join("memory/block_size_bytes"), "8000000\n").unwrap();
    for (n, state) in blocks {
        let block = system.join(format!("memory/memory{n}"));
        fs::create_dir_all(&block).unwrap();
        fs::write(block.join("state"), format!("{state}\n")).unwrap();
    }
    for (n, online) in cpus {
        let cpu = system.join(format!("cpu/cpu{n}"));
        fs::create_dir_all(&cpu).unwrap();
        fs::write(cpu.join("online"), format!("{online}\n")).unwrap();
    }
    fs::write(dir.path().join("iomem"), iomem).unwrap();
    let hotplug = Hotplug {
        system,
        iomem: dir.path().join("iomem"),
        patience: Duration::ZERO,
    };
    (dir, hotplug)
}

#[test]
fn boot_memory_counts_firmware_and_no_plugged_memory() {
    let small = boot_memory(SMALL).unwrap();
    assert_eq!((small.size, small.end), (128 * MIB, 128 * MIB));
    let large = "00100000-bfffffff : System RAM\n100000000-13fffffff : System RAM\n";
    let large = boot_memory(large).unwrap();
    assert_eq!((large.size, large.end), (4 * GIB, 5 * GIB));
    assert_eq!(
        boot_memory("00000000-00000000 : System RAM\n"),
        None,
        "as others than root see it"
    );
    assert_eq!(
        boot_memory("zz-yy : System RAM\nffffffffffffffff-ffffffffffffffff : System RAM\n"),
        None
    );
}

#[test]
fn offline_cpus_are_brought_online_and_missing_ones_named() {
    let (dir, hotplug) = machine(SMALL, &[], &[(1, "0"), (2, "1"), (3, "0")]);
    hotplug.cpus(3).unwrap();
    let online = |n: u8| fs::read_to_string(dir.path().join(format!("system/cpu/cpu{n}/online"))).unwrap();
    assert_eq!(
        (online(1).as_str(), online(3).as_str()),
        ("1", "0\n"),
        "no more than asked for"
    );
    let e = hotplug.cpus(6).unwrap_err().to_string();
    assert!(
        e.contains("of 6 CPUs") && e.contains("cpu4 (not in this machine), cpu5"),
        "{e}"
    );
    assert!(!e.contains("cpu3"), "{e}");
    hotplug.cpus(1).unwrap();
    hotplug.cpus(0).unwrap();
}

#[test]
fn memory_is_complete_once_its_blocks_are_online() {
    let (_dir, hotplug) = machine(SMALL, &[(0, "online"), (2048, "online"), (2049, "online")], &[]);
    for enough in [0, 64, 128, 131, 256, 300, 384, 387] {
        hotplug.memory(enough).unwrap_or_else(|e| panic!("{enough}: {e}"));
    }
}

#[test]
fn missing_memory_is_reported_with_what_came() {
    let (_dir, hotplug) = machine(SMALL, &[(0, "online"), (2048, "online"), (2049, "offline")], &[]);
    let e = hotplug.memory(384).unwrap_err().to_string();
    assert!(e.contains("128 MiB of the 256 MiB"), "{e}");
    let e = hotplug.memory(260).unwrap_err().to_string();
    assert!(e.contains("128 MiB of the 132 MiB"), "{e}");
}

#[test]
fn uevent_names_its_block() {
    assert_eq!(
        memory_event(b"online@/devices/system/memory/memory2048\0ACTION=online\0"),
        Some((2048, true))
    );
    assert_eq!(
        memory_event(b"offline@/devices/system/memory/memory7"),
        Some((7, false))
    );
    for other in [
        &b"add@/devices/system/memory/memory2048\0"[..],
        b"online@/devices/system/cpu/cpu1\0",
        b"online@/devices/system/memory/memoryx\0",
        b"\xff\0",
        b"",
    ] {
        assert_eq!(memory_event(other), None);
    }
}

proptest::proptest! {
    #[test]
    fn reading_anything_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..96)) {
        memory_event(&bytes);
        boot_memory(&String::from_utf8_lossy(&bytes));
    }
}
