//! Checks of memory: its size, page sharing, swap, huge pages and error correction.
//!
//! docs/production-hosts.md explains why each matters.

use super::{Check, Host};

pub(super) fn checks(host: &Host) -> Vec<Check> {
    vec![
        available(host),
        merging(host),
        swap(host),
        huge_pages(host),
        reserved_huge_pages(host),
        error_correction(host),
    ]
}

/// A line of /proc/meminfo, in KiB.
fn meminfo(host: &Host, name: &str) -> Option<u64> {
    host.read("/proc/meminfo")?.lines().find_map(|line| {
        line.strip_prefix(name)?
            .strip_prefix(':')?
            .trim()
            .strip_suffix(" kB")?
            .parse()
            .ok()
    })
}

fn available(host: &Host) -> Check {
    const NAME: &str = "memory";
    let fix = "stop something, or add memory";
    match meminfo(host, "MemAvailable").map(|kib| kib / 1024) {
        None => Check::warn(
            NAME,
            "unknown",
            "cannot tell how many sandboxes fit",
            "mount /proc",
        ),
        Some(mib) if mib < 256 => {
            Check::missing(NAME, format!("{mib} MiB available"), "a sandbox hardly fits", fix).essential()
        }
        Some(mib) if mib < 1024 => Check::warn(
            NAME,
            format!("{mib} MiB available"),
            "only a few sandboxes fit",
            fix,
        ),
        Some(mib) => Check::ok(NAME, format!("{mib} MiB available")).essential(),
    }
}

fn merging(host: &Host) -> Check {
    const NAME: &str = "KSM";
    const COST: &str = "where pages of sandboxes are merged, the time a write takes tells a guest what another one has in memory";
    match host.read("/sys/kernel/mm/ksm/run").as_deref() {
        Some("0" | "2") => Check::ok(NAME, "off"),
        Some(_) => Check::warn(
            NAME,
            "on",
            COST,
            "echo 2 > /sys/kernel/mm/ksm/run, and stop what turns it on (ksm, ksmtuned)",
        ),
        None if host.exists("/sys/kernel/mm") => Check::ok(NAME, "not in this kernel"),
        None => Check::warn(NAME, "unknown", COST, "mount -t sysfs none /sys"),
    }
}

fn swap(host: &Host) -> Check {
    const NAME: &str = "swap";
    const COST: &str = "memory of pods, templates and thawd may be written to a disk, and stays there";
    let Some(table) = host.read("/proc/swaps") else {
        return Check::warn(NAME, "unknown", COST, "mount -t proc none /proc");
    };
    let places: Vec<&str> = table
        .lines()
        .skip(1)
        .filter_map(|line| line.split_ascii_whitespace().next())
        .collect();
    let disks: Vec<&str> = places
        .iter()
        .copied()
        .filter(|place| !place.starts_with("/dev/zram"))
        .collect();
    match (places.is_empty(), disks.is_empty()) {
        (true, _) => Check::ok(NAME, "none"),
        (false, true) => Check::ok(NAME, "zram alone, which is memory"),
        (false, false) => Check::warn(
            NAME,
            disks.join(", "),
            COST,
            "swapoff -a, and remove it from /etc/fstab; or encrypt it with a key that is made at each boot",
        ),
    }
}

fn huge_pages(host: &Host) -> Check {
    const NAME: &str = "transparent huge pages";
    const COST: &str =
        "memory beyond the template's comes to a guest in pages of 4 KiB: up to 512 times as many faults";
    let told = host.read("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = told
        .as_deref()
        .and_then(|words| words.split_once('[')?.1.split_once(']'))
        .map(|(word, _)| word);
    match chosen {
        Some("never") => Check::warn(
            NAME,
            "never",
            COST,
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Some(word) => Check::ok(NAME, word),
        None => Check::warn(
            NAME,
            "none, or unknown",
            COST,
            "mount -t sysfs none /sys; a kernel built with CONFIG_TRANSPARENT_HUGEPAGE",
        ),
    }
}

fn reserved_huge_pages(host: &Host) -> Check {
    const NAME: &str = "reserved huge pages";
    match meminfo(host, "Hugetlb") {
        Some(kib) if kib > 0 => Check::warn(
            NAME,
            format!("{} MiB", kib / 1024),
            "sandboxes use none of them, and cannot use that memory otherwise",
            "sysctl vm.nr_hugepages=0, and no hugepages= on the kernel's command line, unless something else here needs them",
        ),
        _ => Check::ok(NAME, "none"),
    }
}

fn error_correction(host: &Host) -> Check {
    const NAME: &str = "ECC memory";
    if host.cpu_has("hypervisor") {
        return Check::ok(NAME, "that of the machine below this one");
    }
    let is_controller = |name: &str| {
        name.strip_prefix("mc")
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let controllers = host
        .names("/sys/devices/system/edac/mc")
        .unwrap_or_default()
        .iter()
        .filter(|name| is_controller(name))
        .count();
    if controllers > 0 {
        return Check::ok(NAME, format!("{controllers} controllers report errors"));
    }
    Check::warn(
        NAME,
        "no memory controller reports errors",
        "bits that flip go unnoticed, also those that a guest flips in memory beside its own (Rowhammer)",
        "use ECC memory, and load the driver of its controller (drivers/edac: amd64_edac, skx_edac, i10nm_edac, ...)",
    )
}

#[cfg(test)]
mod tests {
    use super::super::{State, tests::host_with};
    use super::*;

    fn with(check: fn(&Host) -> Check, path: &str, text: &str) -> Check {
        check(&host_with(&[(path, text)]).1)
    }

    #[test]
    fn little_memory_is_told_from_enough() {
        let of = |kib: u64| {
            let text = format!("MemTotal: 1 kB\nMemAvailable: {kib} kB\n");
            with(available, "/proc/meminfo", &text).state
        };
        assert_eq!(
            (of(100_000), of(500_000), of(9_000_000)),
            (State::Missing, State::Warn, State::Ok)
        );
    }

    #[test]
    fn merging_is_off_where_the_kernel_has_none() {
        let run = |text: &str| with(merging, "/sys/kernel/mm/ksm/run", text).state;
        assert_eq!(
            (run("0\n"), run("1\n"), run("2\n")),
            (State::Ok, State::Warn, State::Ok)
        );
        assert_eq!(
            with(merging, "/sys/kernel/mm/lru_gen/enabled", "0x0007\n").state,
            State::Ok
        );
        assert_eq!(merging(&host_with(&[]).1).found, "unknown");
    }

    #[test]
    fn swap_on_a_disk_is_named_and_zram_is_memory() {
        const HEAD: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        let of = |lines: &str| with(swap, "/proc/swaps", &format!("{HEAD}{lines}"));
        let zram = "/dev/zram0                              partition\t4194300\t0\t100\n";
        assert_eq!(of("").found, "none");
        assert_eq!(of(zram).state, State::Ok);
        let disk = of(&format!(
            "{zram}/swap.img                               file\t\t2097148\t0\t-2\n"
        ));
        assert_eq!((disk.state, disk.found.as_str()), (State::Warn, "/swap.img"));
        assert_eq!(swap(&host_with(&[]).1).state, State::Warn);
    }

    #[test]
    fn huge_pages_the_chosen_word_counts() {
        let of = |words: &str| with(huge_pages, "/sys/kernel/mm/transparent_hugepage/enabled", words);
        assert_eq!(of("always [madvise] never\n").found, "madvise");
        assert_eq!(of("[always] madvise never\n").state, State::Ok);
        assert_eq!(of("always madvise [never]\n").state, State::Warn);
        assert_eq!(of("\n").state, State::Warn);
    }

    #[test]
    fn reserved_huge_pages_of_all_sizes_are_memory_lost() {
        let of = |kib: u64| {
            let text = format!("HugePages_Total:       4\nHugetlb:         {kib} kB\n");
            with(reserved_huge_pages, "/proc/meminfo", &text)
        };
        assert_eq!(of(0).state, State::Ok);
        let some = of(8 << 20);
        assert_eq!((some.state, some.found.as_str()), (State::Warn, "8192 MiB"));
    }

    #[test]
    fn error_correction_needs_a_controller() {
        let name = |file: &str| {
            with(
                error_correction,
                &format!("/sys/devices/system/edac/mc/{file}/mc_name"),
                "x",
            )
            .state
        };
        assert_eq!(name("mc0"), State::Ok);
        assert_eq!(name("power"), State::Warn);
        assert_eq!(error_correction(&host_with(&[]).1).state, State::Warn);
        let guest = with(error_correction, "/proc/cpuinfo", "flags : hypervisor\n");
        assert_eq!(guest.state, State::Ok);
    }
}
