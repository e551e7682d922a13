//! The CPUID of each vCPU: the host's features as KVM supports them, with a topology of the machine's own.
//!
//! The topology is one package of single-threaded cores; core n has APIC id n. Leaves are those of the Intel
//! SDM vol. 2A (CPUID) and AMD APM vol. 3 appendix E. The machine lacks nested virtualisation, because its
//! state is not saved; performance counters, because templates cannot carry them between hosts; and KVM's
//! asynchronous page faults, because a freeze would lose pending ones.

mod baseline;
#[cfg(test)]
mod baseline_test;
mod compatible;
mod features;

pub use baseline::Baseline;
pub use compatible::{missing, required};

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use crate::{Error, Result};

const LEAF_FEATURES: u32 = 0x1;
const LEAF_CACHE: u32 = 0x4;
const LEAF_PERFORMANCE: u32 = 0xa;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM: u32 = 0x4000_0000;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_EXTENDED_FEATURES: u32 = 0x8000_0001;
const LEAF_ADDRESS_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_CACHE: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;
const LEAF_AMD_PERFORMANCE: u32 = 0x8000_0022;
const LEAF_AMD_TOPOLOGY_V2: u32 = 0x8000_0026;

const ECX1_VMX: u32 = 1 << 5;
const ECX1_PDCM: u32 = 1 << 15;
const ECX1_TSC_DEADLINE: u32 = 1 << 24;
const ECX1_HYPERVISOR: u32 = 1 << 31;
const EDX1_HTT: u32 = 1 << 28;
const ECX8_1_CMP_LEGACY: u32 = 1 << 1;
const ECX8_1_SVM: u32 = 1 << 2;
const ECX8_1_PERFCTR_CORE: u32 = 1 << 23;
/// KVM_FEATURE_ASYNC_PF, _ASYNC_PF_VMEXIT, _ASYNC_PF_INT (asm/kvm_para.h).
const KVM_ASYNC_PAGE_FAULTS: u32 = 1 << 4 | 1 << 10 | 1 << 14;

/// The CPUID of vCPU `index` of `vcpus`. `supported` is the CPUID that KVM supports ([`crate::Kvm::supported_cpuid`]), possibly limited to
/// a [`Baseline`].
///
/// # Errors
/// [`Error::Missing`] if KVM does not offer its own leaf, which describes the clock every guest relies on.
pub fn for_vcpu(supported: &CpuId, index: u8, vcpus: u8) -> Result<CpuId> {
    let topology = Topology {
        id: index.into(),
        cores: vcpus.into(),
    };
    let amd = is_amd(supported);
    let highest = supported
        .as_slice()
        .iter()
        .find(|e| e.function == 0)
        .map_or(0, |e| e.eax);
    let mut entries: Vec<kvm_cpuid_entry2> = Vec::with_capacity(supported.as_slice().len() + 3);
    for &entry in supported.as_slice() {
        let mut entry = entry;
        match entry.function {
            LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2 => continue,
            // Zero means that the leaf is absent; guests then use the older topology leaves.
            LEAF_PERFORMANCE | LEAF_AMD_PERFORMANCE | LEAF_AMD_TOPOLOGY_V2 => clear(&mut entry),
            LEAF_FEATURES => topology.features(&mut entry),
            LEAF_CACHE => {
                topology.cache(&mut entry);
                if entry.eax & 0x1f != 0 {
                    entry.eax = entry.eax & !(0x3f << 26) | (topology.cores - 1) << 26;
                }
            }
            LEAF_AMD_CACHE => topology.cache(&mut entry),
            LEAF_EXTENDED_FEATURES => {
                entry.ecx &= !(ECX8_1_SVM | ECX8_1_PERFCTR_CORE | ECX8_1_CMP_LEGACY);
                if amd && topology.cores > 1 {
                    entry.ecx |= ECX8_1_CMP_LEGACY;
                }
            }
            LEAF_ADDRESS_SIZES if amd => {
                entry.ecx = entry.ecx & !0xf0ff | topology.id_bits() << 12 | (topology.cores - 1);
            }
            LEAF_AMD_TOPOLOGY => {
                (entry.eax, entry.ebx, entry.ecx) = (topology.id, topology.id, 0);
            }
            LEAF_KVM => entry.eax = LEAF_KVM_FEATURES,
            LEAF_KVM_FEATURES => entry.eax &= !KVM_ASYNC_PAGE_FAULTS,
            _ => {}
        }
        entries.push(entry);
    }
    if !entries.iter().any(|e| e.function == LEAF_KVM_FEATURES) {
        return Err(Error::Missing("the KVM CPUID leaf 0x40000001"));
    }
    for leaf in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2] {
        if highest >= leaf {
            entries.extend(topology.levels(leaf));
        }
    }
    CpuId::from_entries(&entries).map_err(|_| Error::Missing("room for that many CPUID entries"))
}

/// Number of guest-physical address bits of a vCPU (leaf 0x80000008; 36 if it is absent).
pub fn physical_address_bits(supported: &CpuId) -> u8 {
    supported
        .as_slice()
        .iter()
        .find(|e| e.function == LEAF_ADDRESS_SIZES)
        .map_or(36, |e| e.eax as u8)
}

/// The position of a vCPU: core `id` of `cores` in the only package.
struct Topology {
    id: u32,
    cores: u32,
}

impl Topology {
    /// Number of APIC id bits that number the cores.
    fn id_bits(&self) -> u32 {
        self.cores.next_power_of_two().trailing_zeros()
    }

    fn features(&self, entry: &mut kvm_cpuid_entry2) {
        entry.ebx = entry.ebx & 0xffff | self.id << 24 | (1 << self.id_bits()) << 16;
        entry.ecx = entry.ecx & !(ECX1_VMX | ECX1_PDCM) | ECX1_TSC_DEADLINE | ECX1_HYPERVISOR;
        entry.edx &= !EDX1_HTT;
        if self.cores > 1 {
            entry.edx |= EDX1_HTT;
        }
    }

    /// The sharing of a cache: levels 1 and 2 belong to a core, higher ones to the package.
    fn cache(&self, entry: &mut kvm_cpuid_entry2) {
        let (kind, level) = (entry.eax & 0x1f, entry.eax >> 5 & 0x7);
        if kind != 0 {
            let sharers = if level >= 3 { 1 << self.id_bits() } else { 1 };
            entry.eax = entry.eax & !(0xfff << 14) | (sharers - 1) << 14;
        }
    }

    /// The extended topology leaf: threads per core, cores per package, end.
    fn levels(&self, leaf: u32) -> [kvm_cpuid_entry2; 3] {
        let level = |number: u32, kind: u32, shift: u32, processors: u32| kvm_cpuid_entry2 {
            function: leaf,
            index: number,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: processors,
            ecx: kind << 8 | number,
            edx: self.id,
            ..Default::default()
        };
        [
            level(0, 1, 0, 1),
            level(1, 2, self.id_bits(), self.cores),
            level(2, 0, 0, 0),
        ]
    }
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

fn is_amd(cpuid: &CpuId) -> bool {
    let vendor = cpuid
        .as_slice()
        .iter()
        .find(|e| e.function == 0)
        .map(|e| (e.ebx, e.edx, e.ecx));
    let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
    vendor == Some((word(b"Auth"), word(b"enti"), word(b"cAMD")))
        || vendor == Some((word(b"Hygo"), word(b"nGen"), word(b"uine")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, regs: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = regs;
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn supported(vendor: [&[u8; 4]; 3]) -> CpuId {
        let [b, d, c] = vendor.map(|w| u32::from_le_bytes(*w));
        CpuId::from_entries(&[
            entry(0, 0, [0x1f, b, c, d]),
            entry(
                1,
                0,
                [0x800f12, 0x0504_0800, ECX1_VMX | ECX1_PDCM | 1, EDX1_HTT | 1],
            ),
            entry(4, 0, [0x21 | 1 << 14 | 3 << 26, 7, 8, 9]),
            entry(4, 1, [0x63 | 15 << 14 | 3 << 26, 7, 8, 9]),
            entry(4, 2, [0; 4]),
            entry(0xa, 0, [1, 2, 3, 4]),
            entry(0xb, 0, [9, 9, 9, 9]),
            entry(LEAF_KVM, 0, [0, 1, 2, 3]),
            entry(LEAF_KVM_FEATURES, 0, [!0, 0, 0, 0]),
            entry(0x8000_0001, 0, [0, 0, ECX8_1_SVM | ECX8_1_PERFCTR_CORE | 1, 0]),
            entry(0x8000_0008, 0, [0x3028, 0, 0x700f, 0]),
            entry(0x8000_001e, 0, [7, 7, 7, 7]),
            entry(0x8000_0026, 0, [7, 7, 7, 7]),
        ])
        .unwrap()
    }

    const INTEL: [&[u8; 4]; 3] = [b"Genu", b"ineI", b"ntel"];
    const AMD: [&[u8; 4]; 3] = [b"Auth", b"enti", b"cAMD"];

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid
            .as_slice()
            .iter()
            .find(|e| e.function == function && e.index == index)
            .unwrap()
    }

    #[test]
    fn every_vcpu_has_its_own_apic_id_in_one_package() {
        for vcpus in 1..=16u8 {
            for index in 0..vcpus {
                let cpuid = for_vcpu(&supported(INTEL), index, vcpus).unwrap();
                let one = leaf(&cpuid, 1, 0);
                assert_eq!(one.ebx >> 24, u32::from(index));
                assert!(one.ebx >> 16 & 0xff >= u32::from(vcpus));
                assert_eq!(one.edx & EDX1_HTT != 0, vcpus > 1);
                let (threads, cores, end) =
                    (leaf(&cpuid, 0xb, 0), leaf(&cpuid, 0xb, 1), leaf(&cpuid, 0xb, 2));
                assert_eq!((threads.edx, cores.edx), (u32::from(index), u32::from(index)));
                assert_eq!((threads.ebx, cores.ebx, end.ebx), (1, u32::from(vcpus), 0));
                // All APIC ids agree above the core bits, so there is one package.
                assert_eq!(u32::from(index) >> cores.eax, 0);
                assert_eq!(cpuid.as_slice().iter().filter(|e| e.function == 0xb).count(), 3);
            }
        }
    }

    #[test]
    fn amd_leaves_agree_with_the_topology() {
        let cpuid = for_vcpu(&supported(AMD), 3, 6).unwrap();
        let sizes = leaf(&cpuid, 0x8000_0008, 0);
        assert_eq!(
            (sizes.ecx & 0xff, sizes.ecx >> 12 & 0xf, sizes.eax),
            (5, 3, 0x3028)
        );
        let topology = leaf(&cpuid, 0x8000_001e, 0);
        assert_eq!((topology.eax, topology.ebx, topology.ecx), (3, 3, 0));
        assert_ne!(leaf(&cpuid, 0x8000_0001, 0).ecx & ECX8_1_CMP_LEGACY, 0);
        assert_eq!(
            leaf(&cpuid, 0x8000_0026, 0).ebx,
            0,
            "the host's own topology shows"
        );
    }

    #[test]
    fn what_cannot_be_saved_is_not_offered() {
        for vendor in [INTEL, AMD] {
            let cpuid = for_vcpu(&supported(vendor), 0, 1).unwrap();
            assert_eq!(leaf(&cpuid, 1, 0).ecx & (ECX1_VMX | ECX1_PDCM), 0);
            assert_ne!(leaf(&cpuid, 1, 0).ecx & ECX1_TSC_DEADLINE, 0);
            assert_eq!(
                leaf(&cpuid, 0x8000_0001, 0).ecx & (ECX8_1_SVM | ECX8_1_PERFCTR_CORE),
                0
            );
            assert_eq!(leaf(&cpuid, LEAF_KVM_FEATURES, 0).eax & KVM_ASYNC_PAGE_FAULTS, 0);
            assert_eq!(leaf(&cpuid, 0xa, 0).eax, 0);
        }
    }

    #[test]
    fn caches_are_shared_by_the_cores_that_are_there() {
        let cpuid = for_vcpu(&supported(INTEL), 0, 4).unwrap();
        assert_eq!(leaf(&cpuid, 4, 0).eax, 0x21 | 3 << 26);
        assert_eq!(leaf(&cpuid, 4, 1).eax, 0x63 | 3 << 14 | 3 << 26);
        assert_eq!(leaf(&cpuid, 4, 2).eax, 0);
    }

    #[test]
    fn a_kvm_that_hides_its_leaf_is_refused() {
        let without: Vec<_> = supported(INTEL)
            .as_slice()
            .iter()
            .copied()
            .filter(|e| e.function != LEAF_KVM_FEATURES)
            .collect();
        assert!(matches!(
            for_vcpu(&CpuId::from_entries(&without).unwrap(), 0, 1),
            Err(Error::Missing(_))
        ));
    }
}
