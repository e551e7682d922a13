//! Can this host be what a saved vCPU says it is?
//!
//! Only what a guest may have come to rely on counts: feature bits, the vendor, where registers lie in an XSAVE area, the
//! width of addresses. Topology, caches, family and model do not.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::features::{Class, WORDS};
use super::{LEAF_ADDRESS_SIZES, physical_address_bits};

const LEAF_XSAVE: u32 = 0xd;

/// What `saved`, a vCPU's CPUID, has and `supported` ([`crate::Kvm::supported_cpuid`]) lacks, for people: the names of
/// feature bits (`CPUID 7.0 ecx bit 30` where there is none), and sentences about the rest. Empty: the vCPU can be
/// restored here. Of any CPUID, hostile ones too.
pub fn missing(saved: &CpuId, supported: &CpuId) -> Vec<String> {
    let (saved_entries, host_entries) = (saved.as_slice(), supported.as_slice());
    let mut missing = Vec::new();
    let (vendor, host) = (vendor(saved_entries), vendor(host_entries));
    if vendor != host {
        missing.push(format!("a processor of vendor {vendor:?} (this host: {host:?})"));
    }
    for word in WORDS {
        let counted = word.bits_where(|class| class != Class::Free);
        let lacking = word.read(saved_entries) & !word.read(host_entries) & counted;
        missing.extend(word.names(lacking));
    }
    missing_xsave(saved_entries, host_entries, &mut missing);
    if saved_entries.iter().any(|e| e.function == LEAF_ADDRESS_SIZES) {
        let (wanted, host) = (physical_address_bits(saved), physical_address_bits(supported));
        if wanted > host {
            missing.push(format!("{wanted} bits of physical address (this host: {host})"));
        }
    }
    missing
}

/// XSAVE components that are not there or lie elsewhere, and areas that are too small.
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

/// A sub-leaf of the XSAVE leaf; zeros where it is absent.
fn xsave(entries: &[kvm_cpuid_entry2], index: u32) -> kvm_cpuid_entry2 {
    entries
        .iter()
        .find(|e| (e.function, e.index) == (LEAF_XSAVE, index))
        .copied()
        .unwrap_or_default()
}

/// The vendor's twelve letters, if the leaf is there.
fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    let leaf = entries.iter().find(|e| e.function == 0);
    let letters = leaf.map(|e| [e.ebx, e.edx, e.ecx].map(u32::to_le_bytes).concat());
    String::from_utf8_lossy(&letters.unwrap_or_default()).into_owned()
}
