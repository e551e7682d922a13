//! Checks of the host's kernel: version, configuration and settings.

use std::process::{Command, Stdio};

use super::{Check, Host};

/// Kernel versions, and what an older kernel costs.
const COSTS: [((u32, u32), &str); 4] = [
    (
        (5, 11),
        "close_range with close-on-exec and EROFS chunk features are missing: sandboxes do not start",
    ),
    ((6, 9), "no pidfd for threads, slower teardown"),
    (
        (6, 14),
        "the nx-lpage-recovery thread delays VM starts by up to 100 ms unless kvm.nx_huge_pages is never",
    ),
    (
        (6, 17),
        "each irqfd registration is O(n) in VMs: 4 ms each at 800 VMs",
    ),
];

/// The parts of tc(8) that forward packets between a pod's namespace and its guest, and filter them.
const REDIRECTION: [&str; 6] = [
    "CONFIG_BPF_SYSCALL",
    "CONFIG_NET_CLS_ACT",
    "CONFIG_NET_SCH_INGRESS",
    "CONFIG_NET_CLS_BPF",
    "CONFIG_NET_CLS_U32",
    "CONFIG_NET_ACT_MIRRED",
];

pub(super) fn checks(host: &Host) -> Vec<Check> {
    vec![
        version(host),
        tick(host),
        mass_exits(host),
        threads(host),
        pod_networks(host),
        unprivileged_bpf(host),
        entropy(host),
    ]
}

fn version(host: &Host) -> Check {
    const NAME: &str = "kernel";
    let Some((major, minor, name)) = host.kernel() else {
        return Check::warn(
            NAME,
            "unknown version",
            "cannot tell what it lacks",
            "mount /proc",
        );
    };
    let costs: Vec<String> = COSTS
        .iter()
        .filter(|((a, b), _)| (major, minor) < (*a, *b))
        .map(|((a, b), cost)| format!("before {a}.{b}: {cost}"))
        .collect();
    if (major, minor) < COSTS[0].0 {
        return Check::missing(NAME, name, costs.join("; "), "use Linux 6.1 or later").essential();
    }
    if costs.is_empty() {
        return Check::ok(NAME, name);
    }
    Check::warn(
        NAME,
        name,
        costs.join("; "),
        "use Linux 6.17 or later where many sandboxes start at once",
    )
}

fn tick(host: &Host) -> Check {
    const NAME: &str = "timer tick";
    match configuration(host).and_then(|text| configured_hz(&text)) {
        None => Check::ok(NAME, "unknown: the kernel's configuration is not to be had"),
        Some(hz) if hz >= 1000 => Check::ok(NAME, format!("HZ={hz}")),
        Some(hz) => Check::warn(
            NAME,
            format!("HZ={hz}"),
            format!(
                "waits for an RCU grace period, as memory slots and irqfds do, last up to {} ms",
                1000 / hz.max(1)
            ),
            "a kernel built with CONFIG_HZ=1000; pools keep this off the path",
        ),
    }
}

/// How many VMMs can end at once before the work items that free their seccomp programs can fill the kernel's system work queue of a CPU
/// (kernel/workqueue.c `WQ_DFL_ACTIVE`, docs/operations.md). On which CPUs they end is the kernel's choice: it may be one.
fn mass_exits(host: &Host) -> Check {
    const NAME: &str = "mass exits";
    /// Work items of one queue that run at once on a CPU.
    const ACTIVE_WORKS: usize = 1024;
    match host
        .read("/proc/sys/net/core/bpf_jit_enable")
        .as_deref()
        .map(str::trim)
    {
        Some("0") => Check::ok(NAME, "seccomp programs are not compiled: nothing to free"),
        _ => Check::ok(
            NAME,
            format!("a VMM has one seccomp program: {ACTIVE_WORKS} can end at once"),
        ),
    }
}

/// How many threads the host can have, of which a VMM takes some 15 and thaw-share a few (proc_sys_kernel(5)). The kernel's own limit of 32,768
/// on a host with few CPUs is less than many hosts have memory for; systemd raises it to 4,194,304.
fn threads(host: &Host) -> Check {
    const NAME: &str = "threads";
    const FEW: u64 = 32_768;
    let limit = |name: &str| {
        let text = host.read(&format!("/proc/sys/kernel/{name}"))?;
        text.trim()
            .parse::<u64>()
            .ok()
            .map(|most| (most, name.to_owned()))
    };
    let lowest = ["pid_max", "threads-max"].into_iter().filter_map(limit).min();
    match lowest {
        Some((most, name)) if most <= FEW => Check::warn(
            NAME,
            format!("{most} at most (kernel.{name})"),
            format!(
                "no sandbox starts beyond some {}: a VMM has about 15 threads",
                most / 20
            ),
            format!("sysctl kernel.{name}=4194304"),
        ),
        Some((most, _)) => Check::ok(NAME, format!("{most} at most")),
        None => Check::warn(
            NAME,
            "unknown",
            "cannot tell how many sandboxes fit",
            "mount -t proc none /proc",
        ),
    }
}

fn pod_networks(host: &Host) -> Check {
    const NAME: &str = "pod networks";
    let Some(text) = configuration(host) else {
        return Check::ok(NAME, "unknown: the kernel's configuration is not to be had");
    };
    let is_built = |option: &str| {
        let value = |line| str::strip_prefix(line, option)?.strip_prefix('=');
        text.lines()
            .filter_map(value)
            .any(|value| matches!(value, "y" | "m"))
    };
    let lacking: Vec<_> = REDIRECTION
        .into_iter()
        .filter(|option| !is_built(option))
        .collect();
    if lacking.is_empty() {
        return Check::ok(NAME, "tc can redirect them into guests");
    }
    let found = format!("the kernel was built without {}", lacking.join(", "));
    let cost = "pods whose network a CNI plugin makes do not start";
    Check::missing(
        NAME,
        found,
        cost,
        "a kernel built with them, as distributions' are",
    )
}

fn unprivileged_bpf(host: &Host) -> Check {
    const NAME: &str = "unprivileged BPF";
    const COST: &str = "any user of this host may load programs by which the kernel can be read through speculation (Spectre v2, BHI)";
    match host.read("/proc/sys/kernel/unprivileged_bpf_disabled").as_deref() {
        Some("0") => Check::warn(NAME, "allowed", COST, "sysctl kernel.unprivileged_bpf_disabled=1"),
        Some(_) => Check::ok(NAME, "forbidden"),
        None if host.exists("/proc/sys/kernel") => Check::ok(NAME, "not in this kernel"),
        None => Check::warn(NAME, "unknown", COST, "mount -t proc none /proc"),
    }
}

/// Whether the host's getrandom(2), which seeds every guest, does not block (drivers/char/random.c).
fn entropy(host: &Host) -> Check {
    const NAME: &str = "entropy";
    const COST: &str = "sandboxes wait: each guest is seeded with random bytes of the host";
    let available = host
        .read("/proc/sys/kernel/random/entropy_avail")
        .and_then(|text| text.parse::<u32>().ok());
    // Linux 5.18 reports the bits that the generator got, up to 256; earlier kernels those in the pool, which is ready with 128.
    let enough = match host.kernel() {
        Some((major, minor, _)) if (major, minor) < (5, 18) => 128,
        _ => 256,
    };
    match available {
        Some(bits) if bits >= enough => Check::ok(NAME, format!("{bits} bits")),
        Some(bits) => Check::warn(
            NAME,
            format!("{bits} bits, of {enough}"),
            COST,
            "give the host a source: RDRAND or RDSEED, a TPM, or virtio-rng of the hypervisor below it",
        ),
        None => Check::warn(NAME, "unknown", COST, "mount -t proc none /proc"),
    }
}

/// The kernel's configuration: of /boot, or of the kernel itself, decompressed by zcat.
fn configuration(host: &Host) -> Option<String> {
    let (_, _, name) = host.kernel()?;
    host.read(&format!("/boot/config-{name}")).or_else(|| {
        let own = host.path("/proc/config.gz");
        if !own.exists() {
            return None;
        }
        let output = Command::new("zcat")
            .arg(own)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    })
}

fn configured_hz(configuration: &str) -> Option<u32> {
    configuration
        .lines()
        .find_map(|line| line.strip_prefix("CONFIG_HZ=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::super::{State, tests::host_with};
    use super::*;

    #[test]
    fn each_version_has_its_costs() {
        let at = |name: &str| {
            let (_r, host) = host_with(&[("/proc/sys/kernel/osrelease", name)]);
            version(&host)
        };
        assert_eq!(at("6.18.1").state, State::Ok);
        let cost = at("6.16.3-generic").cost;
        assert!(cost.contains("irqfd") && !cost.contains("nx-lpage"), "{cost}");
        assert!(at("6.1.0").cost.contains("nx-lpage"));
        assert_eq!(at("5.10.0").state, State::Missing);
    }

    #[test]
    fn what_pods_networks_need_of_tc_is_built_in_or_a_module() {
        let with = |text: &str| {
            let (_r, host) = host_with(&[
                ("/proc/sys/kernel/osrelease", "6.1.0"),
                ("/boot/config-6.1.0", text),
            ]);
            pod_networks(&host)
        };
        let all: String = REDIRECTION.map(|option| format!("{option}=m\n")).concat();
        assert_eq!(with(&all).state, State::Ok);
        let one = with(&all.replace("CONFIG_NET_CLS_U32=m", "# CONFIG_NET_CLS_U32 is not set"));
        assert_eq!(one.state, State::Missing);
        assert!(one.found.ends_with("without CONFIG_NET_CLS_U32"), "{}", one.found);
        assert!(!one.essential);
    }

    #[test]
    fn mass_exits_tell_how_many_vmms_can_end_at_once() {
        let with = |jit: &str| mass_exits(&host_with(&[("/proc/sys/net/core/bpf_jit_enable", jit)]).1);
        assert!(with("1\n").found.contains("1024"));
        assert!(with("0\n").found.contains("not compiled"));
    }

    #[test]
    fn the_lowest_limit_of_threads_is_told() {
        let with = |pids: &str, most: &str| {
            let files = [
                ("/proc/sys/kernel/pid_max", pids),
                ("/proc/sys/kernel/threads-max", most),
            ];
            threads(&host_with(&files).1)
        };
        assert_eq!(with("4194304\n", "192730\n").state, State::Ok);
        let few = with("32768\n", "192730\n");
        assert_eq!(few.state, State::Warn);
        assert!(
            few.found.contains("kernel.pid_max") && few.cost.contains("1638"),
            "{few:?}"
        );
        assert!(with("4194304\n", "16000\n").fix.contains("threads-max"));
        assert_eq!(threads(&host_with(&[]).1).state, State::Warn);
    }

    #[test]
    fn unprivileged_bpf_is_allowed_or_not() {
        let with = |text: &str| {
            let path = "/proc/sys/kernel/unprivileged_bpf_disabled";
            unprivileged_bpf(&host_with(&[(path, text)]).1).state
        };
        assert_eq!(
            (with("0\n"), with("1\n"), with("2\n")),
            (State::Warn, State::Ok, State::Ok)
        );
        let (_r, without) = host_with(&[("/proc/sys/kernel/osrelease", "6.1.0\n")]);
        assert_eq!(unprivileged_bpf(&without).found, "not in this kernel");
        assert_eq!(unprivileged_bpf(&host_with(&[]).1).state, State::Warn);
    }

    #[test]
    fn entropy_is_measured_as_the_kernel_counts_it() {
        let with = |kernel: &str, bits: &str| {
            let files = [
                ("/proc/sys/kernel/osrelease", kernel),
                ("/proc/sys/kernel/random/entropy_avail", bits),
            ];
            entropy(&host_with(&files).1).state
        };
        assert_eq!(with("6.1.0", "256\n"), State::Ok);
        assert_eq!(with("6.1.0", "255\n"), State::Warn);
        assert_eq!(with("5.11.0", "128\n"), State::Ok);
        assert_eq!(with("5.11.0", "127\n"), State::Warn);
        assert_eq!(with("6.1.0", "many\n"), State::Warn);
    }

    #[test]
    fn the_tick_is_read_from_the_configuration() {
        let (_r, host) = host_with(&[
            ("/proc/sys/kernel/osrelease", "6.1.0"),
            ("/boot/config-6.1.0", "CONFIG_HZ_250=y\nCONFIG_HZ=250\n"),
        ]);
        assert!(tick(&host).cost.contains("4 ms"));
    }
}
