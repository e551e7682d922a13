//! The capacity of the host: its memory and CPUs, times the configured ratios.

use std::fs;

use thaw_protocol::api::TenantLimits;

use crate::config::quotas::CapacityConfig;
use crate::error::Error;

const MEMINFO: &str = "/proc/meminfo";

/// What the machines may have together.
///
/// # Errors
/// There is a ratio of the memory, and the memory cannot be read.
pub(super) fn of_host(config: &CapacityConfig) -> Result<TenantLimits, Error> {
    let fail = |e: std::io::Error| Error::system(format!("cannot read the host's memory in {MEMINFO}"), &e);
    let memory_mib = match config.memory_overcommit {
        None => None,
        Some(ratio) => {
            let text = fs::read_to_string(MEMINFO).map_err(fail)?;
            let missing = || fail(std::io::Error::other("it has no MemTotal"));
            let mib = total_kib(&text).ok_or_else(missing)? >> 10;
            Some((mib as f64 * ratio) as u64)
        }
    };
    let vcpus = config.vcpu_overcommit.map(|ratio| {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        (cpus as f64 * ratio) as u32
    });
    Ok(TenantLimits {
        memory_mib,
        vcpus,
        ..TenantLimits::default()
    })
}

fn total_kib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_has_its_memory_and_cpus_times_the_ratios() {
        assert_eq!(
            of_host(&CapacityConfig::default()).unwrap(),
            TenantLimits::default()
        );
        let of = |ratio| {
            let config = CapacityConfig {
                memory_overcommit: Some(ratio),
                vcpu_overcommit: Some(ratio),
            };
            of_host(&config).unwrap()
        };
        let (one, two) = (of(1.0), of(2.0));
        let (mib, cpus) = (one.memory_mib.unwrap(), one.vcpus.unwrap());
        assert!(mib > 0 && cpus > 0);
        assert_eq!((two.memory_mib, two.vcpus), (Some(2 * mib), Some(2 * cpus)));
    }

    #[test]
    fn total_memory_is_read_from_its_line() {
        let text = "MemFree:  1 kB\nMemTotal:       16316412 kB\n";
        assert_eq!(total_kib(text), Some(16_316_412));
        for bad in ["", "MemTotal: x kB", "MemTotal: 5"] {
            assert_eq!(total_kib(bad), None, "{bad}");
        }
    }
}
