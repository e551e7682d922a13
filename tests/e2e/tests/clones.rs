//! Sandboxes thawed from one template: alike in nothing that must differ, right in what must be right, of any size.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use thaw_e2e::home::with_thawd;
use thaw_e2e::{image, probe, run, thaw};

/// How many clones the comparison takes where `THAW_CLONES` does not say; `make soak` asks for 100.
const CLONES: usize = 30;
/// Sandboxes started at once: one a CPU of the smallest machine this runs on.
const AT_ONCE: usize = 2;
/// What no two clones may share.
const UNIQUE: [&str; 5] = ["getrandom", "urandom", "at_random", "boot_id", "hostname"];
/// Kernel words that leave fresh randomness to the agent alone, and make it tell what the kernel's generator gives next
/// once it has done its part.
const AGENT_ALONE: &str = "loglevel=4 initcall_blacklist=vmgenid_driver_init thaw.test=show-entropy";
/// The same without the agent's part.
const WITHOUT_RESEED: &str =
    "loglevel=4 initcall_blacklist=vmgenid_driver_init thaw.test=show-entropy thaw.test=keep-entropy";

/// How far a clone's wall clock may be off, beyond half of the round trip in which it was told the time.
const CLOCK_MARGIN_NS: u64 = 10_000_000;

/// A clone, and when it was made: nanoseconds since the epoch.
struct Clone {
    /// What it says of itself.
    identity: Value,
    started: u64,
    ended: u64,
    /// How long it waited when it asked the time.
    round_trip_ns: u64,
    /// What its kernel's generator gave first, if it was to tell.
    first_bytes: Option<String>,
}

/// Makes `count` clones.
fn clones(count: usize, kernel_arguments: &str) -> Vec<Clone> {
    let folder = tempfile::tempdir().unwrap();
    let reference = probe::image(folder.path(), env!("CARGO_BIN_EXE_thaw-probe"));
    let left = Mutex::new(count);
    let found = Mutex::new(Vec::new());
    let next = || {
        let mut left = left.lock().unwrap();
        *left = left.checked_sub(1)?;
        Some(())
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while next().is_some() {
                    let mut command = thaw(&["run", "--rm", &reference, "/probe", "identity"]);
                    if !kernel_arguments.is_empty() {
                        command.env("THAW_KERNEL_ARGS", kernel_arguments);
                    }
                    command.env("THAW_LOG", "warn,thaw_sandbox=debug,thaw_cli=debug,console=debug");
                    let started = now();
                    let outcome = run(&mut command);
                    let ended = now();
                    assert!(outcome.status.success(), "{outcome:?}");
                    let said = &outcome.stdout;
                    found.lock().unwrap().push(Clone {
                        identity: serde_json::from_str(said).unwrap_or_else(|e| panic!("{e}: {said}")),
                        started,
                        ended,
                        round_trip_ns: round_trip_ns(&outcome.stderr),
                        first_bytes: first_bytes(&outcome.stderr),
                    });
                }
            });
        }
    });
    found.into_inner().unwrap()
}

/// From the log: how long the guest waited for the time. The last entry counts: one that made the template tells of the template's guest first.
fn round_trip_ns(log: &str) -> u64 {
    let entry = log.rsplit_once("round_trip_us=");
    let number = entry
        .map(|(_, rest)| rest)
        .and_then(|rest| rest.split_whitespace().next());
    let us: u64 = number
        .and_then(|n| n.parse().ok())
        .unwrap_or_else(|| panic!("no round trip is told: {log}"));
    us * 1000
}

/// From the console: the bytes the agent told.
fn first_bytes(log: &str) -> Option<String> {
    let told = log.split("thaw.test=show-entropy: ").nth(1)?;
    let bytes: String = told.chars().take_while(char::is_ascii_hexdigit).collect();
    assert_eq!(bytes.len(), 32, "{log}");
    Some(bytes)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

/// Every value that two clones share, by name. `isn` for TCP secrets.
fn shared(identities: &[&Value]) -> Vec<String> {
    let mut found = Vec::new();
    for name in UNIQUE {
        let mut seen = BTreeMap::new();
        for identity in identities {
            *seen
                .entry(identity[name].as_str().unwrap().to_string())
                .or_insert(0) += 1;
        }
        if seen.values().any(|times| *times > 1) || seen.contains_key("") {
            found.push(name.to_string());
        }
    }
    let sequences: Vec<Vec<u32>> = identities.iter().map(|i| differences(&i["isn"])).collect();
    let same_secret = |a: &[u32], b: &[u32]| {
        a.iter()
            .zip(b)
            .all(|(a, b)| a.wrapping_sub(*b).wrapping_add(NEAR) <= 2 * NEAR)
    };
    let pairs = sequences
        .iter()
        .enumerate()
        .flat_map(|(i, a)| sequences[..i].iter().map(move |b| (a, b)));
    if pairs.into_iter().any(|(a, b)| same_secret(a, b)) {
        found.push("isn".to_string());
    }
    found
}

/// How far apart two numbers of one secret may be for the time between them: a second, in units of 64 ns.
const NEAR: u32 = 1 << 24;

/// The sequence numbers relative to the first, which the time they were made at is not in.
fn differences(numbers: &Value) -> Vec<u32> {
    let numbers: Vec<u32> = numbers
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_u64().unwrap() as u32)
        .collect();
    assert!(
        numbers.len() > 3,
        "too few sequence numbers to compare: {numbers:?}"
    );
    numbers
        .iter()
        .skip(1)
        .map(|n| n.wrapping_sub(numbers[0]))
        .collect()
}

#[test]
fn no_two_clones_share_randomness_identity_or_a_secret() {
    let count = std::env::var("THAW_CLONES").map_or(CLONES, |n| n.parse().unwrap());
    let found = clones(count, "");
    assert_eq!(found.len(), count);
    let all: Vec<&Value> = found.iter().map(|c| &c.identity).collect();
    assert_eq!(shared(&all), Vec::<String>::new());
    for clone in &found {
        let wall = clone.identity["realtime_ns"].as_u64().unwrap();
        let margin = CLOCK_MARGIN_NS + clone.round_trip_ns / 2;
        let right = clone.started - margin..=clone.ended + margin;
        assert!(right.contains(&wall), "wall clock {wall} outside {right:?}");
    }
    // A guest's own time goes on from its template's freeze, however long ago that was.
    let up = |clone: &Clone| clone.identity["monotonic_ns"].as_u64().unwrap();
    let first = found.iter().min_by_key(|c| c.started).unwrap();
    let last = found.iter().max_by_key(|c| c.started).unwrap();
    let lain = last.started - first.started;
    assert!(up(first) > 0, "no time at all");
    assert!(
        up(last) < up(first) + lain / 2,
        "CLOCK_MONOTONIC {}, and {lain} ns later {}: it ran while the template lay there",
        up(first),
        up(last)
    );
}

/// The first bytes after the handshake's first step, with the kernel's own answer to a new generation ID switched off:
/// different when the agent reseeds, and the same, noticed by the same comparison, when it does not.
#[test]
fn clones_first_random_bytes_differ_only_by_agents_reseed() {
    let all_differ = |kernel_arguments: &str| {
        let found = clones(4, kernel_arguments);
        let told = found
            .iter()
            .map(|c| c.first_bytes.clone().expect("the agent told no bytes"));
        let different: BTreeSet<String> = told.collect();
        different.len() == found.len()
    };
    assert!(
        all_differ(AGENT_ALONE),
        "clones are alike though they were reseeded"
    );
    assert!(
        !all_differ(WITHOUT_RESEED),
        "clones differ without being reseeded: this test sees nothing"
    );
}

#[test]
fn template_serves_many_sizes_without_a_cold_boot() {
    let folder = tempfile::tempdir().unwrap();
    let reference = probe::image(folder.path(), env!("CARGO_BIN_EXE_thaw-probe"));
    let mut templates = Vec::new();
    // A template for up to 4 CPUs serves 1 too, if it is there; the other way round another one is built.
    for (memory, mib, cpus) in [("128m", 128, 2), ("512m", 512, 1), ("2g", 2048, 4)] {
        let size = ["--memory", memory, "--cpus", &cpus.to_string()];
        let line = [
            &["run", "--timings"],
            &size[..],
            &[&reference, "/probe", "identity"],
        ]
        .concat();
        let outcome = run(&mut thaw(&line));
        let stages = |name: &str| {
            outcome
                .stderr
                .lines()
                .any(|l| l.split_whitespace().next() == Some(name))
        };
        assert!(
            stages("restore") && stages("thaw") && !stages("kernel"),
            "{outcome:?}"
        );
        let said = outcome.ok();
        let identity: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(identity["cpus"], cpus, "{said}");
        // MemTotal lacks what the kernel took for itself: its own image, and 1/64 for page structures.
        let kib = identity["memory_kib"].as_u64().unwrap();
        assert!(
            (mib * 1024 * 80 / 100..=mib * 1024).contains(&kib),
            "--memory {memory} gave {kib} KiB"
        );
        templates.push(the_templates());
    }
    templates.dedup();
    assert_eq!(templates.len(), 1, "another template was built: {templates:?}");
}

#[test]
fn size_in_demand_gets_a_template_of_its_own() {
    with_thawd(|home| {
        let busybox = image("busybox");
        // How many regions of the guest's memory virtio-mem has plugged.
        let plugged = || {
            let guest = ["run", "--rm", "-m", "512m", &busybox];
            let counts = ["grep", "-c", "virtio_mem", "/proc/iomem"];
            run(&mut home.thaw(&[&guest[..], &counts[..]].concat())).stdout
        };
        assert_eq!(plugged(), "1\n");
        let since = Instant::now();
        while plugged() != "0\n" {
            assert!(since.elapsed() < Duration::from_secs(300), "no template is made");
        }
        let listed = run(&mut home.thaw(&["template", "ls"])).ok();
        assert!(
            listed.contains("128 MiB") && listed.contains("512 MiB"),
            "{listed}"
        );
    });
}

/// The keys of the templates that are used here now.
fn the_templates() -> Vec<String> {
    let listed = run(&mut thaw(&["--json", "template", "ls"])).ok();
    let all: Value = serde_json::from_str(&listed).unwrap_or_else(|e| panic!("{e}: {listed}"));
    let all = all.as_array().unwrap().iter();
    // Other tests have other guests, so other templates.
    all.filter(|t| t["stale"].is_null())
        .map(|t| t["key"].as_str().unwrap().to_string())
        .collect()
}

#[test]
fn a_cold_boot_is_there_for_who_asks() {
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        "--cold",
        "--timings",
        &image("busybox"),
        "echo",
        "booted",
    ]));
    assert!(
        out.stderr.contains("kernel"),
        "a cold boot has the stage kernel: {out:?}"
    );
    assert_eq!(out.ok(), "booted\n");
}
