//! Which features of a frozen vCPU this host lacks, before a machine is made for it.
//!
//! thaw-vmm makes the same comparison of every vCPU when it restores one.

use std::path::Path;

use thaw_hypervisor::cpuid::{for_vcpu, missing};
use thaw_hypervisor::{CpuId, Kvm};

use super::files::open_kvm;
use crate::error::{Error, ErrorKind};

/// Most features that a message names.
const NAMED: usize = 16;

/// Lists the features of a frozen vCPU that a host lacks, given the vCPUs of its machine.
pub(super) type Lacks = fn(&CpuId, u8) -> Result<Vec<String>, Error>;

/// The same of this host.
pub(super) fn lacks(frozen: &CpuId, vcpus: u8) -> Result<Vec<String>, Error> {
    let inadequate = |e: thaw_hypervisor::Error| Error::new(ErrorKind::KvmInadequate, e.to_string());
    let kvm = Kvm::from_fd(open_kvm(Path::new("/dev/kvm"))?).map_err(inadequate)?;
    let offered = for_vcpu(kvm.supported_cpuid(), 0, vcpus).map_err(inadequate)?;
    Ok(missing(frozen, &offered))
}

/// Refuses a snapshot whose vCPUs have features that this host lacks.
pub(super) fn check(lacks: Lacks, frozen: &CpuId, vcpus: u8, what: &str) -> Result<(), Error> {
    let lacking = lacks(frozen, vcpus)?;
    if lacking.is_empty() {
        return Ok(());
    }
    let named = lacking.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    let more = match lacking.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let what = format!("{what}: this host lacks what its vCPUs have: {named}{more}");
    Err(Error::new(ErrorKind::SnapshotIncompatible, what).remedy(
        "pull it where that is, or freeze a sandbox of a template with a lower baseline: thaw template build --baseline",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_some_of_many_missing_features() {
        let frozen = CpuId::from_entries(&[]).unwrap();
        assert!(check(|_, _| Ok(Vec::new()), &frozen, 1, "x").is_ok());
        let many: Lacks = |_, _| Ok((0..20).map(|n| format!("f{n}")).collect());
        let error = check(many, &frozen, 1, "reg/web:1").unwrap_err();
        assert_eq!(error.kind, ErrorKind::SnapshotIncompatible);
        assert!(
            error.what.starts_with("reg/web:1") && error.what.ends_with("f15 and 4 more"),
            "{error}"
        );
    }
}
