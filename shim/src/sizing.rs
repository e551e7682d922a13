//! How large a pod's microVM is: what its containers may use together, as far as that is known when it is made, and room for
//! the guest itself.
//!
//! CRI tells a pod's sum by annotations of its sandbox (containerd 1.6.4 and later, for kubelets that tell it). A pod of one
//! has it in its own limits.

use crate::spec::config::Spec;

/// What one has that says nothing; 0 leaves it to thawd.
const DEFAULT_MEMORY_MIB: u32 = 512;
const DEFAULT_CPUS: u32 = 1;
/// What the guest needs for itself.
const OWN_MEMORY_MIB: u64 = 128;
/// Most that can be had (docs/operations.md).
const MOST_MEMORY_MIB: u64 = 65536;
const MOST_CPUS: u64 = 16;

const MEMORY: &str = "io.kubernetes.cri.sandbox-memory";
const QUOTA: &str = "io.kubernetes.cri.sandbox-cpu-quota";
const PERIOD: &str = "io.kubernetes.cri.sandbox-cpu-period";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub cpus: u32,
    pub memory_mib: u32,
}

/// Of the pod with this specification.
pub fn shape(spec: &Spec) -> Shape {
    let told = |name: &str| {
        spec.annotations
            .get(name)
            .and_then(|text| text.parse::<i64>().ok())
    };
    let resources = &spec.linux.resources;
    let memory = told(MEMORY).or_else(|| resources.memory.as_ref().and_then(|m| m.limit));
    let memory = memory
        .and_then(|bytes| u64::try_from(bytes).ok())
        .filter(|bytes| *bytes > 0);
    let cpu = resources.cpu.as_ref();
    let quota = told(QUOTA).or_else(|| cpu.and_then(|c| c.quota));
    let period = told(PERIOD).or_else(|| cpu.and_then(|c| i64::try_from(c.period?).ok()));
    let cpus = match (quota, period) {
        (Some(quota @ 1..), Some(period @ 1..)) => Some(quota.unsigned_abs().div_ceil(period.unsigned_abs())),
        _ => None,
    };
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Shape {
        cpus: cpus.map_or(DEFAULT_CPUS, |n| small(n.clamp(1, MOST_CPUS))),
        memory_mib: memory.map_or(DEFAULT_MEMORY_MIB, |bytes| {
            small((bytes.div_ceil(1 << 20).saturating_add(OWN_MEMORY_MIB)).min(MOST_MEMORY_MIB))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::config::{Cpu, Memory};

    #[test]
    fn a_pod_is_as_large_as_what_it_may_use_and_what_the_guest_needs() {
        let mut spec = Spec::default();
        let default = Shape {
            cpus: 1,
            memory_mib: 512,
        };
        assert_eq!(shape(&spec), default);
        spec.linux.resources.memory = Some(Memory {
            limit: Some(100 << 20),
            ..Default::default()
        });
        spec.linux.resources.cpu = Some(Cpu {
            quota: Some(150_000),
            period: Some(100_000),
            ..Default::default()
        });
        assert_eq!(
            shape(&spec),
            Shape {
                cpus: 2,
                memory_mib: 228
            }
        );
        for (name, value) in [(MEMORY, "1073741824"), (QUOTA, "-1"), (PERIOD, "100000")] {
            spec.annotations.insert(name.into(), value.into());
        }
        assert_eq!(
            shape(&spec),
            Shape {
                cpus: 1,
                memory_mib: 1152
            }
        );
        spec.annotations.insert(MEMORY.into(), i64::MAX.to_string());
        spec.annotations.insert(QUOTA.into(), i64::MAX.to_string());
        assert_eq!(
            shape(&spec),
            Shape {
                cpus: 16,
                memory_mib: 65536
            }
        );
    }
}
