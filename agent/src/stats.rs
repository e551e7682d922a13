//! A container's resource usage, from its cgroup and network namespace, for `StatsContainer`.

use std::fs;

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::{
    BlkioStats, BlkioStatsEntry, CgroupStats, CpuStats, CpuUsage, HugetlbStats, MemoryData, MemoryStats,
    NetworkStats, PidsStats, StatsContainerResponse, ThrottlingData,
};

use crate::container::Container;
use crate::container::cgroup::Cgroup;

/// Reads all statistics. Those of a missing controller are zero.
pub fn read(container: &Container) -> StatsContainerResponse {
    let cgroup = &container.cgroup;
    let stats = CgroupStats {
        cpu_stats: MessageField::some(cpu(cgroup)),
        memory_stats: MessageField::some(memory(cgroup)),
        pids_stats: MessageField::some(PidsStats {
            current: number(cgroup, "pids.current"),
            limit: number(cgroup, "pids.max"),
            ..Default::default()
        }),
        blkio_stats: MessageField::some(blkio(&cgroup.read("io.stat").unwrap_or_default())),
        hugetlb_stats: hugetlb(cgroup),
        ..Default::default()
    };
    let network =
        fs::read_to_string(format!("/proc/{}/net/dev", container.init.child.pid)).unwrap_or_default();
    StatsContainerResponse {
        cgroup_stats: MessageField::some(stats),
        network_stats: network_devices(&network),
        ..Default::default()
    }
}

/// Reads a file with one number. `max` and a missing file are 0, which Kata defines as no limit.
fn number(cgroup: &Cgroup, file: &str) -> u64 {
    cgroup.read(file).and_then(|t| t.trim().parse().ok()).unwrap_or(0)
}

fn cpu(cgroup: &Cgroup) -> CpuStats {
    let ns = |key| cgroup.read_key("cpu.stat", key).unwrap_or(0) * 1000;
    let count = |key| cgroup.read_key("cpu.stat", key).unwrap_or(0);
    CpuStats {
        cpu_usage: MessageField::some(CpuUsage {
            total_usage: ns("usage_usec"),
            usage_in_kernelmode: ns("system_usec"),
            usage_in_usermode: ns("user_usec"),
            ..Default::default()
        }),
        throttling_data: MessageField::some(ThrottlingData {
            periods: count("nr_periods"),
            throttled_periods: count("nr_throttled"),
            throttled_time: ns("throttled_usec"),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn memory(cgroup: &Cgroup) -> MemoryStats {
    let event = |key| cgroup.read_key("memory.events", key).unwrap_or(0);
    let mut stats: std::collections::HashMap<String, u64> =
        flat(&cgroup.read("memory.stat").unwrap_or_default()).collect();
    stats.insert("oom_kill".into(), event("oom_kill"));
    MemoryStats {
        cache: stats.get("file").copied().unwrap_or(0),
        usage: MessageField::some(MemoryData {
            usage: number(cgroup, "memory.current"),
            max_usage: number(cgroup, "memory.peak"),
            failcnt: event("max"),
            limit: number(cgroup, "memory.max"),
            ..Default::default()
        }),
        swap_usage: MessageField::some(MemoryData {
            usage: number(cgroup, "memory.swap.current"),
            limit: number(cgroup, "memory.swap.max"),
            ..Default::default()
        }),
        use_hierarchy: true,
        stats,
        ..Default::default()
    }
}

fn flat(text: &str) -> impl Iterator<Item = (String, u64)> {
    text.lines()
        .filter_map(|l| l.split_once(' '))
        .filter_map(|(k, v)| Some((k.to_owned(), v.trim().parse().ok()?)))
}

/// `MAJ:MIN rbytes=… wbytes=… rios=… wios=… dbytes=… dios=…`
fn blkio(io_stat: &str) -> BlkioStats {
    let mut stats = BlkioStats::new();
    for line in io_stat.lines() {
        let mut words = line.split_whitespace();
        let Some((Ok(major), Ok(minor))) = words
            .next()
            .and_then(|d| d.split_once(':'))
            .map(|(a, b)| (a.parse(), b.parse()))
        else {
            continue;
        };
        for (key, value) in words.filter_map(|w| w.split_once('=')) {
            let (list, op) = match key {
                "rbytes" => (&mut stats.io_service_bytes_recursive, "Read"),
                "wbytes" => (&mut stats.io_service_bytes_recursive, "Write"),
                "dbytes" => (&mut stats.io_service_bytes_recursive, "Discard"),
                "rios" => (&mut stats.io_serviced_recursive, "Read"),
                "wios" => (&mut stats.io_serviced_recursive, "Write"),
                "dios" => (&mut stats.io_serviced_recursive, "Discard"),
                _ => continue,
            };
            let value = value.parse().unwrap_or(0);
            list.push(BlkioStatsEntry {
                major,
                minor,
                op: op.into(),
                value,
                ..Default::default()
            });
        }
    }
    stats
}

fn hugetlb(cgroup: &Cgroup) -> std::collections::HashMap<String, HugetlbStats> {
    let entries = fs::read_dir(cgroup.path()).into_iter().flatten().flatten();
    let names = entries.filter_map(|e| e.file_name().into_string().ok());
    let sizes = names.filter_map(|n| Some(n.strip_prefix("hugetlb.")?.strip_suffix(".current")?.to_owned()));
    sizes
        .map(|size| {
            let stats = HugetlbStats {
                usage: number(cgroup, &format!("hugetlb.{size}.current")),
                failcnt: cgroup
                    .read_key(&format!("hugetlb.{size}.events"), "max")
                    .unwrap_or(0),
                ..Default::default()
            };
            (size, stats)
        })
        .collect()
}

/// proc_net_dev: two heading lines, then `name: 8 receive counters 8 transmit counters`.
fn network_devices(text: &str) -> Vec<NetworkStats> {
    text.lines()
        .skip(2)
        .filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            let n: Vec<u64> = rest.split_whitespace().map(|w| w.parse().unwrap_or(0)).collect();
            (n.len() >= 12).then(|| NetworkStats {
                name: name.trim().into(),
                rx_bytes: n[0],
                rx_packets: n[1],
                rx_errors: n[2],
                rx_dropped: n[3],
                tx_bytes: n[8],
                tx_packets: n[9],
                tx_errors: n[10],
                tx_dropped: n[11],
                ..Default::default()
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_their_columns() {
        let text = "Inter-|\n face |\n    lo: 10 2 3 4 0 0 0 0 50 6 7 8 0 0 0 0\nbroken: 1 2\n";
        let stats = network_devices(text);
        assert_eq!(stats.len(), 1);
        let s = &stats[0];
        assert_eq!(
            (
                s.name.as_str(),
                s.rx_bytes,
                s.rx_dropped,
                s.tx_bytes,
                s.tx_dropped
            ),
            ("lo", 10, 4, 50, 8)
        );
    }

    #[test]
    fn io_is_told_by_device_and_direction() {
        let s = blkio("254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\nnonsense\n");
        assert_eq!(s.io_service_bytes_recursive.len(), 3);
        let write = &s.io_service_bytes_recursive[1];
        assert_eq!(
            (write.major, write.minor, write.op.as_str(), write.value),
            (254, 0, "Write", 8192)
        );
        assert_eq!(s.io_serviced_recursive[0].value, 1);
    }
}
