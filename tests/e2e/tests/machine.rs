//! The machine as the guest sees it: both sides of the MMIO hole, several vCPUs, the overlay, devices, and a view of
//! the jail from outside.

#![allow(clippy::unwrap_used)]

use thaw_e2e::{image, run, thaw, wait_for_line};

#[test]
#[ignore = "long: run with --all yes"]
fn guest_above_4_gib_uses_memory_on_both_sides_of_the_hole() {
    // A zone that starts above 4 GiB (page 1048576) has the memory that did not fit below the hole.
    let script = "awk '/MemTotal/{print ($2 > 4500000) ? \"large\" : \"small\"}' /proc/meminfo; \
                  awk '/present/{p=$2} /start_pfn/{if (p > 0 && $2 >= 1048576) n=p} END{print n}' /proc/zoneinfo; \
                  dd if=/dev/zero of=/dev/shm/fill bs=1M count=48 2>/dev/null && md5sum </dev/shm/fill";
    let busybox = image("busybox");
    // In pages: booted, 5 GiB less the 3 below the hole; thawed, all but the template's 128 MiB, plugged above 4 GiB.
    for (how, above) in [(&["--cold"][..], "524288"), (&[], "1277952")] {
        let what = ["--memory", "5g", "--cpus", "4", &busybox, "sh", "-c", script];
        let out = run(&mut thaw(&[&["run", "--rm"], how, &what].concat())).ok();
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(
            lines,
            ["large", above, "f6a7b2f72130b8e4033094cb3b4ab80c  -"],
            "{how:?}"
        );
    }
}

#[test]
fn thawed_guest_has_the_limits_of_one_booted_with_its_memory() {
    // Of the files below /proc/sys those that a container sees; one name and its numbers a line.
    let script = "cd /proc/sys; for f in kernel/threads-max fs/file-max fs/inotify/max_user_watches \
                  fs/fanotify/max_user_marks fs/epoll/max_user_watches net/ipv4/tcp_mem net/ipv4/udp_mem \
                  net/netfilter/nf_conntrack_max user/max_user_namespaces user/max_net_namespaces; do \
                  [ ! -e $f ] || echo $f $(cat $f); done; \
                  awk '/^Max processes/{print \"processes\", $3}' /proc/self/limits";
    let limits = |how: &[&str]| -> Vec<(String, Vec<u64>)> {
        let what = ["--memory", "3g", &image("busybox"), "sh", "-c", script];
        let out = run(&mut thaw(&[&["run", "--rm"], how, &what].concat())).ok();
        let line = |line: &str| {
            let (name, numbers) = line.split_once(' ').unwrap();
            let numbers = numbers.split_whitespace().map(|number| number.parse().unwrap());
            (name.to_owned(), numbers.collect())
        };
        out.lines().map(line).collect()
    };
    let (booted, thawed) = (limits(&["--cold"]), limits(&[]));
    let names =
        |limits: &[(String, Vec<u64>)]| limits.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&booted), names(&thawed));
    for name in [
        "kernel/threads-max",
        "fs/file-max",
        "fs/inotify/max_user_watches",
        "user/max_user_namespaces",
        "processes",
    ] {
        assert!(
            booted.iter().any(|(there, _)| there == name),
            "{name} is missing: {booted:?}"
        );
    }
    for ((name, booted), (_, thawed)) in booted.iter().zip(&thawed) {
        assert_eq!(booted.len(), thawed.len(), "{name}");
        for (booted, thawed) in booted.iter().zip(thawed) {
            assert!(
                booted.abs_diff(*thawed) * 20 <= *booted,
                "{name}: booted {booted}, thawed {thawed}"
            );
        }
    }
}

#[test]
fn a_disk_has_the_size_that_was_asked_for() {
    // Half as much again as what is made ready, and less than is: both are grown in the guest.
    for (size, least, most) in [("12g", 11 << 20, 12 << 20), ("100m", 80 << 10, 100 << 10)] {
        let script = "df -k / | awk 'END{print $2}'; dd if=/dev/zero of=/last bs=1M count=40 2>/dev/null && stat -c %s /last";
        let what = ["run", "--disk", size, &image("busybox"), "sh", "-c", script];
        let out = run(&mut thaw(&what)).ok();
        let numbers: Vec<u64> = out.lines().map(|l| l.parse().unwrap()).collect();
        assert!((least..=most).contains(&numbers[0]), "{size}: {out}");
        assert_eq!(numbers[1], 40 << 20, "{out}");
    }
    let refused = run(&mut thaw(&["run", "--disk", "1m", &image("busybox"), "true"]));
    assert!(refused.stderr.contains("64 to 1048576"), "{refused:?}");
}

#[test]
fn each_container_is_confined_as_docker_confines_it() {
    let script = "grep -E '^(CapBnd|Seccomp|NoNewPrivs):' /proc/self/status; ls /proc/1/root >/dev/null && echo own pid 1; \
                  cat /proc/sysrq-trigger 2>&1 | head -n 1; mount | grep -c ' / type overlay'";
    let out = run(&mut thaw(&["run", "--rm", &image("busybox"), "sh", "-c", script])).ok();
    assert!(
        out.contains("CapBnd:\t00000000a80425fb"),
        "docker's default capabilities: {out}"
    );
    assert!(out.contains("own pid 1"), "{out}");
}

#[test]
fn the_vmm_has_an_empty_root_no_capabilities_and_a_filter() {
    let name = format!("jail-{}", std::process::id());
    let busybox = image("busybox");
    let mut child = thaw(&[
        "run",
        "--rm",
        "--name",
        &name,
        &busybox,
        "sh",
        "-c",
        "echo up; exec sleep 1000",
    ])
    .spawn()
    .unwrap();
    let rest = wait_for_line(&mut child, "up");
    let listed = run(&mut thaw(&["--json", "ps"])).ok();
    let all: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let ours = all
        .as_array()
        .unwrap()
        .iter()
        .find(|s| s["name"] == name.as_str())
        .unwrap_or_else(|| panic!("{listed}"));
    let pid = ours["vmm_pid"].as_u64().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in [
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "Seccomp:\t2",
        "NoNewPrivs:\t1",
    ] {
        assert!(status.contains(line), "{line} not in {status}");
    }
    assert_eq!(
        std::fs::read_dir(format!("/proc/{pid}/root")).unwrap().count(),
        0,
        "the VMM's root is empty"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    drop(rest);
}

#[test]
fn the_guest_and_its_host_end_reach_each_other() {
    let script = "ip -o -4 addr show dev eth0 | grep -c inet; gateway=$(ip route | awk '/^default/{print $3}'); \
                  ping -c 2 -W 5 -s 1400 $gateway | grep -o '2 packets received'";
    let out = run(&mut thaw(&["run", "--rm", &image("busybox"), "sh", "-c", script])).ok();
    assert_eq!(out, "1\n2 packets received\n");
    let none = run(&mut thaw(&[
        "run",
        "--rm",
        "--network",
        "none",
        &image("busybox"),
        "ip",
        "-o",
        "route",
    ]))
    .ok();
    assert_eq!(none, "");
}
