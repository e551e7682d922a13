//! Resource usage of a sandbox, from its cgroup's controllers or, for values that they do not count, from the kernel's counters of the
//! VMM's process.
//!
//! Invariants: if another process has the VMM's pid now, its numbers are not reported. A value that is not counted is absent, not zero.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::param::{clock_ticks_per_second, page_size};

use crate::process::{ProcessRecord, Stat};

/// Usage since the sandbox was created, except where "now" is stated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time, including the guest's, nanoseconds.
    pub cpu_ns: Option<u64>,
    /// Memory now, in bytes: the cgroup's charge if it has a memory controller, or else the process's resident memory, including shared
    /// pages.
    pub memory_bytes: Option<u64>,
    /// Bytes read from disks.
    pub read_bytes: Option<u64>,
    /// Bytes written to disks, now or later.
    pub written_bytes: Option<u64>,
    /// Page faults that waited for a disk.
    pub major_faults: Option<u64>,
}

impl Usage {
    /// The usage of a VMM and its cgroup's directories, one per hierarchy. Reads files of the kernel, no disk.
    pub fn of(vmm: Option<ProcessRecord>, cgroup: &[PathBuf]) -> Usage {
        let process = vmm.map(of_process).unwrap_or_default();
        let counted = cgroup.iter().map(|directory| of_cgroup(directory));
        counted.fold(process, |other, counted| counted.or(other))
    }

    /// These numbers, with absent ones taken from `other`.
    fn or(self, other: Usage) -> Usage {
        Usage {
            cpu_ns: self.cpu_ns.or(other.cpu_ns),
            memory_bytes: self.memory_bytes.or(other.memory_bytes),
            read_bytes: self.read_bytes.or(other.read_bytes),
            written_bytes: self.written_bytes.or(other.written_bytes),
            major_faults: self.major_faults.or(other.major_faults),
        }
    }
}

fn of_process(vmm: ProcessRecord) -> Usage {
    let io = fs::read_to_string(format!("/proc/{}/io", vmm.pid)).unwrap_or_default();
    // Checked last: if it is still the same process, the earlier reads are of it.
    let Some(stat) = Stat::of(vmm.pid).filter(|stat| stat.start_time == vmm.start_time) else {
        return Usage::default();
    };
    let tick_ns = 1_000_000_000 / clock_ticks_per_second().max(1);
    Usage {
        cpu_ns: Some(stat.cpu_ticks.saturating_mul(tick_ns)),
        memory_bytes: Some(stat.resident_pages.saturating_mul(page_size() as u64)),
        read_bytes: field(&io, "read_bytes:"),
        written_bytes: field(&io, "write_bytes:"),
        major_faults: Some(stat.major_faults),
    }
}

/// The numbers in a cgroup's directory of v2 or of a v1 controller. Those of missing files are absent.
fn of_cgroup(directory: &Path) -> Usage {
    let read = |name: &str| fs::read_to_string(directory.join(name)).unwrap_or_default();
    let number = |name: &str| read(name).trim().parse::<u64>().ok();
    let microseconds = field(&read("cpu.stat"), "usage_usec");
    let io = read("io.stat");
    Usage {
        cpu_ns: microseconds
            .map(|us| us.saturating_mul(1000))
            .or_else(|| number("cpuacct.usage")),
        memory_bytes: number("memory.current").or_else(|| number("memory.usage_in_bytes")),
        read_bytes: of_all_devices(&io, "rbytes="),
        written_bytes: of_all_devices(&io, "wbytes="),
        major_faults: None,
    }
}

/// The number after a word that begins a line.
fn field(text: &str, word: &str) -> Option<u64> {
    let mut rest = text.lines().filter_map(|line| line.strip_prefix(word));
    rest.find_map(|rest| rest.trim().parse().ok())
}

/// The sum over the devices of cgroup v2's `io.stat`; `None` if it lists none.
fn of_all_devices(io: &str, key: &str) -> Option<u64> {
    let values = io
        .split_ascii_whitespace()
        .filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok());
    values.reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_from_controllers_then_process() {
        let root = tempfile::tempdir().unwrap();
        let myself = ProcessRecord::myself();
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        write("cpu.stat", "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n");
        write("memory.current", "4096\n");
        let directories = [root.path().to_owned()];
        let usage = Usage::of(myself, &directories);
        assert_eq!((usage.cpu_ns, usage.memory_bytes), (Some(1_500_000), Some(4096)));
        assert!(usage.major_faults.is_some(), "the process says so");
        write(
            "io.stat",
            "8:0 rbytes=10 wbytes=20 rios=1\n8:16 rbytes=1 wbytes=2\n",
        );
        let usage = Usage::of(None, &directories);
        assert_eq!((usage.read_bytes, usage.written_bytes), (Some(11), Some(22)));
        assert_eq!(usage.major_faults, None);
        write("memory.current", "max\n");
        assert_eq!(Usage::of(None, &directories).memory_bytes, None);
    }

    #[test]
    fn usage_of_v1_is_read_from_each_controller() {
        let root = tempfile::tempdir().unwrap();
        let [cpu, memory] = ["cpu", "memory"].map(|name| root.path().join(name));
        for directory in [&cpu, &memory] {
            fs::create_dir(directory).unwrap();
        }
        fs::write(cpu.join("cpuacct.usage"), "77\n").unwrap();
        fs::write(cpu.join("cpu.stat"), "nr_periods 0\nnr_throttled 0\n").unwrap();
        fs::write(memory.join("memory.usage_in_bytes"), "8192\n").unwrap();
        let usage = Usage::of(None, &[cpu, memory]);
        assert_eq!((usage.cpu_ns, usage.memory_bytes), (Some(77), Some(8192)));
    }

    #[test]
    fn usage_of_a_reused_pid_is_none() {
        let mut myself = ProcessRecord::myself().unwrap();
        assert!(Usage::of(Some(myself), &[]).memory_bytes.unwrap() > 0);
        myself.start_time += 1;
        assert_eq!(Usage::of(Some(myself), &[]), Usage::default());
        assert_eq!(Usage::of(None, &[]), Usage::default());
    }
}
