//! Rate limits of disks: a container takes as long as it should, beside another that does not; set at its start, changed while
//! it runs, kept by a clone.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use thaw_e2e::home::Home;
use thaw_e2e::{image, run};

/// Writes 4 MiB to the disk, not to the guest's page cache alone.
const WRITE: &str = "dd if=/dev/zero of=/file bs=64k count=64 conv=fsync 2>/dev/null && sync";
/// 4 MiB at 512 KiB a second, of which 512 KiB come at once.
const LIMIT: &str = "512k";
const LEAST: Duration = Duration::from_millis(6500);

fn start(home: &Home, name: &str, flags: &[&str]) {
    let busybox = image("busybox");
    let line = [
        &["run", "-d", "--name", name],
        flags,
        &[&busybox, "sh", "-c", "while :; do sleep 1000; done"],
    ];
    run(&mut home.thaw(&line.concat())).ok();
}

/// How long a write in a sandbox takes.
fn write(home: &Home, name: &str) -> Duration {
    let since = Instant::now();
    run(&mut home.thaw(&["exec", name, "sh", "-c", WRITE])).ok();
    since.elapsed()
}

#[test]
#[ignore = "long: run with --all yes"]
fn limited_disk_is_as_slow_as_it_shall_and_its_neighbour_is_not() {
    let home = Home::new();
    start(&home, "slow", &["--disk-bps", LIMIT]);
    start(&home, "fast", &[]);
    // What the first write of each does besides is done.
    for name in ["slow", "fast"] {
        run(&mut home.thaw(&["exec", name, "sh", "-c", "echo >/first && sync"])).ok();
    }
    let (limited, neighbours) = std::thread::scope(|scope| {
        let limited = scope.spawn(|| write(&home, "slow"));
        let neighbours: Vec<Duration> = (0..3).map(|_| write(&home, "fast")).collect();
        (limited.join().unwrap(), neighbours)
    });
    assert!(limited > LEAST, "{limited:?}");
    // The quickest: the emulated processor may stop any of them for seconds.
    let quickest = neighbours.iter().min().unwrap();
    assert!(*quickest * 2 < limited, "{neighbours:?} beside {limited:?}");
    run(&mut home.thaw(&["limit", "slow", "--disk-bps", "none"])).ok();
    // The quickest, as above.
    let lifted = (0..3).map(|_| write(&home, "slow")).min().unwrap();
    assert!(
        lifted * 2 < limited,
        "{lifted:?} without a limit, {limited:?} with it"
    );
    run(&mut home.thaw(&["limit", "fast", "--disk-bps", LIMIT])).ok();
    let changed = write(&home, "fast");
    assert!(changed > LEAST, "{changed:?} with a limit set while it ran");
    run(&mut home.thaw(&["rm", "slow", "fast"])).ok();
}

#[test]
#[ignore = "long: run with --all yes"]
fn limited_sandbox_is_frozen_at_once_and_its_clone_is_limited() {
    let home = Home::new();
    start(&home, "slow", &[]);
    let flags = ["--disk-bps", "16k", "--net-out-bps", "1m:4m"];
    run(&mut home.thaw(&[&["limit", "slow"], &flags[..]].concat())).ok();
    // What is then in its queue, and dirty, takes minutes.
    let busy = "(dd if=/dev/zero of=/file bs=64k count=64 conv=fsync) >/dev/null 2>&1 &";
    run(&mut home.thaw(&["exec", "slow", "sh", "-c", busy])).ok();
    std::thread::sleep(Duration::from_secs(2));
    let directory = home.data().join("frozen");
    let place = directory.to_str().unwrap();
    let since = Instant::now();
    run(&mut home.thaw(&["freeze", "--stop", "slow", place])).ok();
    let frozen = since.elapsed();
    assert!(frozen < Duration::from_secs(60), "{frozen:?}");
    // The limits are in the snapshot, but where a flag says otherwise.
    let line = ["thaw", "-d", "--name", "clone", "--disk-bps", LIMIT, place];
    let id = run(&mut home.thaw(&line)).ok();
    let record = home.run().join("sandboxes").join(id.trim()).join("record.json");
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    let limits = &record["terms"]["rate_limits"];
    assert_eq!(limits["disk"]["bytes_per_s"], 512 << 10, "{record}");
    assert_eq!(limits["net_out"]["burst_bytes"], 4 << 20, "{record}");
    let limited = write(&home, "clone");
    assert!(limited > LEAST, "{limited:?}");
    run(&mut home.thaw(&["rm", "clone"])).ok();
}

#[test]
fn limits_that_cannot_be_are_refused_by_their_flag() {
    let home = Home::new();
    let busybox = image("busybox");
    for (flag, value) in [
        ("--disk-bps", "0"),
        ("--disk-bps", "-1"),
        ("--disk-iops", "0"),
        ("--net-in-pps", "99999999999999999999"),
        ("--net-out-bps", "2t"),
    ] {
        let flag_value = format!("{flag}={value}");
        let done = run(&mut home.thaw(&["run", &flag_value, &busybox, "true"]));
        assert!(
            !done.status.success() && done.stderr.contains(flag),
            "{}",
            done.stderr
        );
    }
}
