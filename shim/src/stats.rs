//! A container's resource usage in containerd's form: cgroup v2, which the guest uses whatever the host has.

use thaw_protocol::agent::agent::{BlkioStatsEntry, CgroupStats, StatsContainerResponse};
use thaw_protocol::shim::cgroup2::*;
use thaw_protocol::shim::{Any, Message, MessageField};

use crate::error::{Error, Result};

/// Most devices reported. A guest has a few, unless it is hostile.
const MAX_DEVICES: usize = 256;
/// The message name of the metrics.
const METRICS: &str = "io.containerd.cgroups.v2.Metrics";

/// Metrics encoded for containerd.
pub fn metrics(stats: &StatsContainerResponse) -> Result<Any> {
    let none = CgroupStats::new();
    let cgroup = stats.cgroup_stats.as_ref().unwrap_or(&none);
    let network = stats.network_stats.iter().map(|n| NetworkStat {
        name: n.name.clone(),
        rx_bytes: n.rx_bytes,
        rx_packets: n.rx_packets,
        rx_errors: n.rx_errors,
        rx_dropped: n.rx_dropped,
        tx_bytes: n.tx_bytes,
        tx_packets: n.tx_packets,
        tx_errors: n.tx_errors,
        tx_dropped: n.tx_dropped,
        ..Default::default()
    });
    let huge = cgroup.hugetlb_stats.iter().map(|(size, h)| HugeTlbStat {
        current: h.usage,
        max: h.max_usage,
        pagesize: size.clone(),
        failcnt: h.failcnt,
        ..Default::default()
    });
    let metrics = Metrics {
        pids: MessageField::some(PidsStat {
            current: cgroup.pids_stats.current,
            limit: cgroup.pids_stats.limit,
            ..Default::default()
        }),
        cpu: MessageField::some(cpu(cgroup)),
        memory: MessageField::some(memory(cgroup)),
        io: MessageField::some(io(cgroup)),
        hugetlb: huge.collect(),
        memory_events: MessageField::some(MemoryEvents {
            max: cgroup.memory_stats.usage.failcnt,
            oom_kill: *cgroup.memory_stats.stats.get("oom_kill").unwrap_or(&0),
            ..Default::default()
        }),
        network: network.collect(),
        ..Default::default()
    };
    encoded(&metrics)
}

/// Encodes metrics as an `Any`.
pub fn encoded(metrics: &Metrics) -> Result<Any> {
    let value = metrics
        .write_to_bytes()
        .map_err(|e| Error::Invalid(e.to_string()))?;
    Ok(Any {
        type_url: METRICS.into(),
        value,
        ..Default::default()
    })
}

/// Converts the agent's nanoseconds.
fn cpu(cgroup: &CgroupStats) -> CPUStat {
    let (usage, throttled) = (&cgroup.cpu_stats.cpu_usage, &cgroup.cpu_stats.throttling_data);
    CPUStat {
        usage_usec: usage.total_usage / 1000,
        user_usec: usage.usage_in_usermode / 1000,
        system_usec: usage.usage_in_kernelmode / 1000,
        nr_periods: throttled.periods,
        nr_throttled: throttled.throttled_periods,
        throttled_usec: throttled.throttled_time / 1000,
        ..Default::default()
    }
}

fn memory(cgroup: &CgroupStats) -> MemoryStat {
    let memory = &cgroup.memory_stats;
    let line = |name: &str| memory.stats.get(name).copied().unwrap_or(0);
    MemoryStat {
        anon: line("anon"),
        file: line("file"),
        kernel_stack: line("kernel_stack"),
        slab: line("slab"),
        sock: line("sock"),
        shmem: line("shmem"),
        file_mapped: line("file_mapped"),
        file_dirty: line("file_dirty"),
        file_writeback: line("file_writeback"),
        anon_thp: line("anon_thp"),
        inactive_anon: line("inactive_anon"),
        active_anon: line("active_anon"),
        inactive_file: line("inactive_file"),
        active_file: line("active_file"),
        unevictable: line("unevictable"),
        slab_reclaimable: line("slab_reclaimable"),
        slab_unreclaimable: line("slab_unreclaimable"),
        pgfault: line("pgfault"),
        pgmajfault: line("pgmajfault"),
        pgscan: line("pgscan"),
        pgsteal: line("pgsteal"),
        usage: memory.usage.usage,
        usage_limit: limit(memory.usage.limit),
        swap_usage: memory.swap_usage.usage,
        swap_limit: limit(memory.swap_usage.limit),
        max_usage: memory.usage.max_usage,
        ..Default::default()
    }
}

/// The agent reports no limit as 0, containerd expects the maximum.
fn limit(reported: u64) -> u64 {
    match reported {
        0 => u64::MAX,
        limit => limit,
    }
}

fn io(cgroup: &CgroupStats) -> IOStat {
    let mut usage: Vec<IOEntry> = Vec::new();
    let mut add = |from: &BlkioStatsEntry, field: fn(&mut IOEntry) -> &mut u64| {
        let at = usage
            .iter()
            .position(|e| (e.major, e.minor) == (from.major, from.minor));
        let at = match at {
            Some(at) => at,
            None if usage.len() < MAX_DEVICES => {
                usage.push(IOEntry {
                    major: from.major,
                    minor: from.minor,
                    ..Default::default()
                });
                usage.len() - 1
            }
            None => return,
        };
        let field = field(&mut usage[at]);
        *field = field.saturating_add(from.value);
    };
    for entry in &cgroup.blkio_stats.io_service_bytes_recursive {
        match entry.op.as_str() {
            "Read" => add(entry, |e| &mut e.rbytes),
            "Write" => add(entry, |e| &mut e.wbytes),
            _ => {}
        }
    }
    for entry in &cgroup.blkio_stats.io_serviced_recursive {
        match entry.op.as_str() {
            "Read" => add(entry, |e| &mut e.rios),
            "Write" => add(entry, |e| &mut e.wios),
            _ => {}
        }
    }
    IOStat {
        usage,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::agent::agent::{BlkioStats, CpuStats, CpuUsage, MemoryData, MemoryStats};

    #[test]
    fn statistics_are_in_containerds_units() {
        let entry = |op: &str, value| BlkioStatsEntry {
            major: 254,
            op: op.into(),
            value,
            ..Default::default()
        };
        let stats = StatsContainerResponse {
            cgroup_stats: MessageField::some(CgroupStats {
                cpu_stats: MessageField::some(CpuStats {
                    cpu_usage: MessageField::some(CpuUsage {
                        total_usage: 5_000_000,
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                memory_stats: MessageField::some(MemoryStats {
                    usage: MessageField::some(MemoryData {
                        usage: 7,
                        ..Default::default()
                    }),
                    stats: [("anon".to_owned(), 3), ("oom_kill".to_owned(), 2)].into(),
                    ..Default::default()
                }),
                blkio_stats: MessageField::some(BlkioStats {
                    io_service_bytes_recursive: vec![entry("Read", 4096), entry("Write", 1)],
                    io_serviced_recursive: vec![entry("Read", 2)],
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let any = metrics(&stats).unwrap();
        assert_eq!(any.type_url, "io.containerd.cgroups.v2.Metrics");
        let told = Metrics::parse_from_bytes(&any.value).unwrap();
        assert_eq!(told.cpu.usage_usec, 5000);
        assert_eq!(
            (told.memory.usage, told.memory.anon, told.memory.usage_limit),
            (7, 3, u64::MAX)
        );
        assert_eq!(told.memory_events.oom_kill, 2);
        let io = &told.io.usage[..];
        assert_eq!(io.len(), 1);
        assert_eq!(
            (io[0].major, io[0].rbytes, io[0].wbytes, io[0].rios),
            (254, 4096, 1, 2)
        );
        metrics(&StatsContainerResponse::new()).unwrap();
    }

    #[test]
    fn hostile_guest_statistics_are_bounded() {
        let entry = |major| BlkioStatsEntry {
            major,
            op: "Read".into(),
            value: u64::MAX,
            ..Default::default()
        };
        let told = io(&CgroupStats {
            blkio_stats: MessageField::some(BlkioStats {
                io_service_bytes_recursive: (0..1000)
                    .flat_map(|major| [entry(major), entry(major)])
                    .collect(),
                ..Default::default()
            }),
            ..Default::default()
        });
        assert_eq!(told.usage.len(), MAX_DEVICES);
        assert!(told.usage.iter().all(|device| device.rbytes == u64::MAX));
    }
}
