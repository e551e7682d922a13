//! The size of a pod's microVM: what its containers may use together, as far as that is known at its
//! creation, plus what the guest itself needs.
//!
//! CRI gives a pod's sum in annotations of its sandbox (containerd 1.6.4 and later, if the kubelet sends it).
//! For a pod of one container it is that container's limits. Kata's settings replace the guest's own part,
//! and the total if there are no limits.

use crate::kata::Settings;
use crate::spec::config::Spec;

/// Defaults without any limits: MiB, and thousandths of a CPU.
const DEFAULT_MEMORY_MIB: u64 = 512;
const DEFAULT_CPUS: u64 = 1000;
/// Memory of the guest itself in MiB. Together with the VMM's memory it is the overhead of the RuntimeClass
/// (docs/kubernetes.md).
const OWN_MEMORY_MIB: u64 = 128;
/// Largest size (docs/operations.md).
const MAX_MEMORY_MIB: u64 = 65536;
const MAX_CPUS: u64 = 16;

const MEMORY: &str = "io.kubernetes.cri.sandbox-memory";
const QUOTA: &str = "io.kubernetes.cri.sandbox-cpu-quota";
const PERIOD: &str = "io.kubernetes.cri.sandbox-cpu-period";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub cpus: u32,
    pub memory_mib: u32,
}

/// The size for a pod with this specification and these settings of Kata.
pub fn shape(spec: &Spec, kata: &Settings) -> Shape {
    let annotation = |name: &str| {
        spec.annotations
            .get(name)
            .and_then(|text| text.parse::<i64>().ok())
    };
    let resources = &spec.linux.resources;
    let memory = annotation(MEMORY).or_else(|| resources.memory.as_ref().and_then(|m| m.limit));
    let memory = memory
        .and_then(|bytes| u64::try_from(bytes).ok())
        .filter(|bytes| *bytes > 0);
    let cpu = resources.cpu.as_ref();
    let quota = annotation(QUOTA).or_else(|| cpu.and_then(|c| c.quota));
    let period = annotation(PERIOD).or_else(|| cpu.and_then(|c| i64::try_from(c.period?).ok()));
    // Thousandths of a CPU, as in Kata: fractions are added before the sum is rounded up.
    let asked = match (quota, period) {
        (Some(quota @ 1..), Some(period @ 1..)) => Some(
            quota
                .unsigned_abs()
                .saturating_mul(1000)
                .div_ceil(period.unsigned_abs()),
        ),
        _ => None,
    };
    let base = kata.vcpus.map(|vcpus| (f64::from(vcpus) * 1000.0).round() as u64);
    let cpus = match (base, asked) {
        (None, None) => DEFAULT_CPUS,
        (base, asked) => base.unwrap_or(0).saturating_add(asked.unwrap_or(0)),
    };
    let base = kata.memory_mib.map(u64::from);
    let memory = match (base, memory) {
        (None, None) => DEFAULT_MEMORY_MIB,
        (Some(base), None) => base,
        (base, Some(bytes)) => bytes
            .div_ceil(1 << 20)
            .saturating_add(base.unwrap_or(OWN_MEMORY_MIB)),
    };
    let most = |told: Option<u32>, most: u64| told.map_or(most, |told| u64::from(told).min(most));
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Shape {
        cpus: small(cpus.div_ceil(1000).clamp(1, most(kata.max_vcpus, MAX_CPUS))),
        memory_mib: small(memory.min(most(kata.max_memory_mib, MAX_MEMORY_MIB))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::config::{Cpu, Memory};

    #[test]
    fn pod_size_is_its_limits_plus_the_guests_overhead() {
        let mut spec = Spec::default();
        let default = Shape {
            cpus: 1,
            memory_mib: 512,
        };
        assert_eq!(shape(&spec, &Settings::default()), default);
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
            shape(&spec, &Settings::default()),
            Shape {
                cpus: 2,
                memory_mib: 228
            }
        );
        for (name, value) in [(MEMORY, "1073741824"), (QUOTA, "-1"), (PERIOD, "100000")] {
            spec.annotations.insert(name.into(), value.into());
        }
        assert_eq!(
            shape(&spec, &Settings::default()),
            Shape {
                cpus: 1,
                memory_mib: 1152
            }
        );
        spec.annotations.insert(MEMORY.into(), i64::MAX.to_string());
        spec.annotations.insert(QUOTA.into(), i64::MAX.to_string());
        assert_eq!(
            shape(&spec, &Settings::default()),
            Shape {
                cpus: 16,
                memory_mib: 65536
            }
        );
    }

    #[test]
    fn runtime_class_overhead_is_added() {
        const VMM_MIB: u64 = 32;
        let overhead = format!("memory: {}Mi", OWN_MEMORY_MIB + VMM_MIB);
        for file in ["kubernetes/runtimeclass.yaml", "helm/thaw/values.yaml"] {
            let path = format!("{}/../packaging/{file}", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(&overhead), "{path}: {overhead}");
        }
    }

    #[test]
    fn kata_settings_set_the_overhead_and_bound_the_pod_size() {
        let mut spec = Spec::default();
        let mut kata = Settings {
            vcpus: Some(0.5),
            memory_mib: Some(256),
            ..Settings::default()
        };
        let (cpus, memory_mib) = (1, 256);
        assert_eq!(shape(&spec, &kata), Shape { cpus, memory_mib });
        for (name, value) in [(MEMORY, "1073741824"), (QUOTA, "150000"), (PERIOD, "100000")] {
            spec.annotations.insert(name.into(), value.into());
        }
        let (cpus, memory_mib) = (2, 1280);
        assert_eq!(shape(&spec, &kata), Shape { cpus, memory_mib });
        kata.vcpus = Some(0.6);
        assert_eq!(shape(&spec, &kata).cpus, 3);
        (kata.max_vcpus, kata.max_memory_mib) = (Some(2), Some(1000));
        let (cpus, memory_mib) = (2, 1000);
        assert_eq!(shape(&spec, &kata), Shape { cpus, memory_mib });
        // A pod cannot exceed the largest size by asking for more.
        (kata.vcpus, kata.max_vcpus) = (Some(f32::MAX), Some(u32::MAX));
        assert_eq!(shape(&spec, &kata).cpus, 16);
    }
}
