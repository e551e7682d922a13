//! CPU baselines: fewer features than the host's CPU has, so that a snapshot thaws on several kinds of host.
//!
//! Invariant: of the feature bits that programs use, a limited CPUID has exactly those of its level. The
//! XSAVE leaves describe exactly the remaining registers.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::features::{Class, WORDS};
use crate::{Error, Result};

const LEAF_XSAVE: u32 = 0xd;
/// Size of the legacy area and the header of an XSAVE area, in bytes.
const XSAVE_HEAD: u32 = 576;
/// XCR0: x87, SSE and AVX; and in addition the opmasks and upper halves of AVX-512.
const XCR0_AVX: u32 = 0x7;
const XCR0_AVX512: u32 = XCR0_AVX | 0xe0;

/// The CPU features of a cold-booted machine: the host's, or an x86-64 level of the psABI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Baseline {
    /// Every feature that this host's KVM supports.
    #[default]
    Host,
    /// x86-64-v2: up to SSE4.2 and popcnt, without XSAVE.
    V2,
    /// x86-64-v3: up to AVX2, BMI and FMA.
    V3,
    /// x86-64-v4: AVX-512 F, BW, CD, DQ, VL.
    V4,
}

impl Baseline {
    /// Reduces what KVM supports to this baseline, for [`super::for_vcpu`].
    ///
    /// # Errors
    /// [`Error::BelowBaseline`], which names the level's features that this host lacks.
    pub fn limit(self, supported: &CpuId) -> Result<CpuId> {
        let Some(level) = self.level() else {
            return Ok(supported.clone());
        };
        let missing: Vec<String> = WORDS
            .iter()
            .flat_map(|word| {
                let wanted = word.bits_where(|class| matches!(class, Class::Level(l) if l <= level));
                // The level requires XSAVE itself, not how a kernel uses it.
                let wanted = if word.leaf == LEAF_XSAVE { 0 } else { wanted };
                word.names(wanted & !word.read(supported.as_slice()))
            })
            .collect();
        if !missing.is_empty() {
            return Err(Error::BelowBaseline {
                level,
                missing: missing.join(", "),
            });
        }
        let mut entries = supported.as_slice().to_vec();
        for word in WORDS {
            let kept = word.bits_where(|class| match class {
                Class::System | Class::Free => true,
                Class::Level(l) => l <= level,
                Class::Beyond => false,
            });
            entries.iter_mut().for_each(|entry| word.mask(entry, kept));
        }
        limit_xsave(&mut entries, self.xcr0());
        CpuId::from_entries(&entries).map_err(|_| Error::Missing("room for that many CPUID entries"))
    }

    fn level(self) -> Option<u8> {
        match self {
            Baseline::Host => None,
            Baseline::V2 => Some(2),
            Baseline::V3 => Some(3),
            Baseline::V4 => Some(4),
        }
    }

    /// The XSAVE components of the level's registers.
    fn xcr0(self) -> u32 {
        match self {
            Baseline::Host => u32::MAX,
            Baseline::V2 => 0,
            Baseline::V3 => XCR0_AVX,
            Baseline::V4 => XCR0_AVX512,
        }
    }
}

/// Keeps only the components of `xcr0` in leaf 0xD (Intel SDM vol. 1, 13.2).
fn limit_xsave(entries: &mut [kvm_cpuid_entry2], xcr0: u32) {
    let is_left = |component: u32| component < 32 && xcr0 >> component & 1 != 0;
    let end = entries
        .iter()
        .filter(|e| e.function == LEAF_XSAVE && e.index >= 2 && is_left(e.index))
        .map(|e| e.eax.saturating_add(e.ebx))
        .fold(XSAVE_HEAD, u32::max);
    for entry in entries.iter_mut().filter(|e| e.function == LEAF_XSAVE) {
        match entry.index {
            _ if xcr0 == 0 => super::clear(entry),
            // EBX is the size of what XCR0 enables, which KVM keeps up to date; ECX is the size of
            // everything.
            0 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (entry.eax & xcr0, XSAVE_HEAD, end, 0),
            // No supervisor components: they belong to kernel features, which no level contains.
            1 => (entry.ebx, entry.ecx, entry.edx) = (0, 0, 0),
            component if !is_left(component) => super::clear(entry),
            _ => {}
        }
    }
}
