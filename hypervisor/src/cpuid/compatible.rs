//! Checks whether this host can provide the CPUID of a saved vCPU.
//!
//! It compares what a guest may rely on: feature bits, the vendor, the layout of the XSAVE area, and the
//! width of addresses. It ignores topology, caches, family and model.
//!
//! A saved CPUID may be forged to switch on what machines lack (nested virtualisation, performance counters,
//! another hypervisor's interface). It is therefore compared with what a vCPU would get on this host: a
//! register that is not known to be descriptive must have no bit beyond that, and entries that KVM could
//! confuse with others are refused.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::features::{Class, Register, WORDS, Word};
use super::{LEAF_ADDRESS_SIZES, physical_address_bits};

const LEAF_XSAVE: u32 = 0xd;

/// Lists the features of a vCPU's CPUID `saved` that `offered` ([`super::for_vcpu`] of this host) lacks, for messages: names of feature
/// bits (`CPUID 7.0 ecx bit 30` for one without a name), and sentences about the rest. If the list is empty, the vCPU can be restored here.
/// Accepts any CPUID, also a hostile one.
pub fn missing(saved: &CpuId, offered: &CpuId) -> Vec<String> {
    let (saved_entries, host_entries) = (saved.as_slice(), offered.as_slice());
    let mut missing = Vec::new();
    let (vendor, host) = (vendor(saved_entries), vendor(host_entries));
    if vendor != host {
        missing.push(format!("a processor of vendor {vendor:?} (this host: {host:?})"));
    }
    for (position, entry) in saved_entries.iter().enumerate() {
        if is_ambiguous(entry, &saved_entries[..position], host_entries) {
            missing.push(format!(
                "a second reading of CPUID {:#x}.{}",
                entry.function, entry.index
            ));
        }
        for register in Register::ALL {
            missing_bits(entry, register, host_entries, &mut missing);
        }
    }
    missing_xsave(saved_entries, host_entries, &mut missing);
    if saved_entries.iter().any(|e| e.function == LEAF_ADDRESS_SIZES) {
        let (wanted, host) = (physical_address_bits(saved), physical_address_bits(offered));
        if wanted > host {
            missing.push(format!("{wanted} bits of physical address (this host: {host})"));
        }
    }
    missing
}

/// The names of the feature bits of a vCPU's CPUID that depend on the host, for people: [`missing`] compares more than these.
pub fn required(saved: &CpuId) -> Vec<String> {
    let words = WORDS.iter().flat_map(|word| {
        let counted = word.bits_where(|class| class != Class::Free);
        word.names(word.read(saved.as_slice()) & counted)
    });
    words.collect()
}

/// Whether KVM could confuse the entry with another: an earlier one is equal, or it covers sub-leaves that
/// have entries of their own on this host.
fn is_ambiguous(entry: &kvm_cpuid_entry2, before: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> bool {
    let is_indexed = |e: &kvm_cpuid_entry2| e.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
    let same = |e: &kvm_cpuid_entry2| (e.function, e.index) == (entry.function, entry.index);
    let here = host.iter().find(|e| e.function == entry.function);
    before.iter().any(same) || here.is_some_and(|here| is_indexed(here) != is_indexed(entry))
}

/// Adds the relevant bits of a register that the host's lacks.
fn missing_bits(
    entry: &kvm_cpuid_entry2,
    register: Register,
    host: &[kvm_cpuid_entry2],
    missing: &mut Vec<String>,
) {
    let word = Word {
        leaf: entry.function,
        index: entry.index,
        register,
        bits: &[],
        unnamed: Class::System,
    };
    let beyond = word.read(std::slice::from_ref(entry)) & !word.read(host);
    if beyond == 0 || is_description(&word) {
        return;
    }
    let is_same = |w: &&Word| (w.leaf, w.index, w.register) == (word.leaf, word.index, word.register);
    let word = WORDS.iter().find(is_same).unwrap_or(&word);
    let counted = word.bits_where(|class| class != Class::Free);
    missing.extend(word.names(beyond & counted));
}

/// Whether a register is descriptive and switches nothing on: numbers, names, caches, topology, and bits that have no effect without a
/// compared feature bit. Vendor, XSAVE leaf and address width are compared separately.
pub(super) fn is_description(word: &Word) -> bool {
    use Register::{Eax, Ebx, Ecx, Edx};
    match (word.leaf, word.index, word.register) {
        (0, 0, _) | (1, 0, Eax | Ebx) | (2 | 4 | 9 | 0xb | 0x1f, _, _) => true,
        (7, 0, Eax) => true,
        (LEAF_XSAVE, 0, _) | (LEAF_XSAVE, 1, Ebx | Ecx | Edx) | (LEAF_XSAVE, 2.., _) => true,
        // AVX10: a version, and vector widths.
        (0x24, _, Eax | Ebx) => true,
        (0x8000_0000, ..) | (0x8000_0001, _, Eax | Ebx) | (0x8000_0002..=0x8000_0006, ..) => true,
        (LEAF_ADDRESS_SIZES, _, Eax | Ecx) => true,
        // Properties of SVM, without which they have no effect.
        (0x8000_000a, ..) => true,
        (0x8000_0019 | 0x8000_001a | 0x8000_001d | 0x8000_001e | 0x8000_0026, ..) => true,
        (0x8000_001f, _, Ebx | Ecx | Edx) | (0x8000_0021, _, Ebx) | (0xc000_0000, ..) => true,
        _ => false,
    }
}

/// Adds XSAVE components that are absent or elsewhere, and areas that are too small.
fn missing_xsave(saved: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2], missing: &mut Vec<String>) {
    let (wanted, there) = (xsave(saved, 0), xsave(host, 0));
    let bits = |entry: &kvm_cpuid_entry2| u64::from(entry.edx) << 32 | u64::from(entry.eax);
    for component in (0..64).filter(|c| bits(&wanted) >> c & 1 != 0) {
        if bits(&there) >> component & 1 == 0 {
            missing.push(format!("XSAVE component {component}"));
        } else if component >= 2 {
            let (saved, host) = (xsave(saved, component), xsave(host, component));
            if (saved.eax, saved.ebx) != (host.eax, host.ebx) {
                missing.push(format!(
                    "XSAVE component {component} of {} bytes at byte {} (this host: {} at {})",
                    saved.eax, saved.ebx, host.eax, host.ebx
                ));
            }
        }
    }
    if wanted.ecx > there.ecx {
        missing.push(format!(
            "an XSAVE area of {} bytes (this host: {})",
            wanted.ecx, there.ecx
        ));
    }
    let (wanted, there) = (xsave(saved, 1), xsave(host, 1));
    let bits = |entry: &kvm_cpuid_entry2| u64::from(entry.edx) << 32 | u64::from(entry.ecx);
    let lacking = bits(&wanted) & !bits(&there);
    missing.extend(
        (0..64)
            .filter(|c| lacking >> c & 1 != 0)
            .map(|c| format!("supervisor XSAVE component {c}")),
    );
}

/// A sub-leaf of the XSAVE leaf; zeros if it is absent.
fn xsave(entries: &[kvm_cpuid_entry2], index: u32) -> kvm_cpuid_entry2 {
    entries
        .iter()
        .find(|e| (e.function, e.index) == (LEAF_XSAVE, index))
        .copied()
        .unwrap_or_default()
}

/// The vendor's twelve letters, if the leaf is present.
fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    let leaf = entries.iter().find(|e| e.function == 0);
    let letters = leaf.map(|e| [e.ebx, e.edx, e.ecx].map(u32::to_le_bytes).concat());
    String::from_utf8_lossy(&letters.unwrap_or_default()).into_owned()
}
