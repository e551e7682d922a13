//! Whether guests may execute from huge pages. On some processors that lets a guest crash the host (iTLB multihit, CVE-2018-12207).
//!
//! KVM guards such processors by splitting huge pages, and starts a thread for each machine that joins them again. Other processors do not
//! need this. A file of the kernel states which kind this processor is; it is read before the jail closes.

use std::fs;

/// The kernel's file (Documentation/admin-guide/hw-vuln/multihit.rst).
const FILE: &str = "/sys/devices/system/cpu/vulnerabilities/itlb_multihit";

/// Whether this host's processor has the erratum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Multihit {
    /// The kernel says that the processor does not have the erratum.
    NotAffected,
    /// The processor has the erratum, or the kernel does not say. KVM's guard stays on.
    Guarded,
}

impl Multihit {
    /// Reads the kernel's file. Must be called before the jail closes, while paths can be opened.
    pub fn of_host() -> Multihit {
        Multihit::parse(fs::read(FILE).ok().as_deref())
    }

    /// `told`: the file's contents, or `None` if the file could not be read.
    fn parse(told: Option<&[u8]>) -> Multihit {
        match told.map(<[u8]>::trim_ascii) {
            Some(b"Not affected") => Multihit::NotAffected,
            _ => Multihit::Guarded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_not_affected_needs_no_guard() {
        for told in ["Not affected\n", "Not affected"] {
            assert_eq!(Multihit::parse(Some(told.as_bytes())), Multihit::NotAffected);
        }
    }

    #[test]
    fn parse_anything_else_keeps_the_guard() {
        for told in [
            "KVM: Mitigation: Split huge pages\n",
            "KVM: Mitigation: VMX disabled\n",
            "KVM: Mitigation: VMX unsupported\n",
            "KVM: Vulnerable\n",
            "Processor vulnerable\n",
            "Not affected: or is it\n",
            "not affected\n",
            "Unknown\n",
            "",
            "\n",
        ] {
            assert_eq!(
                Multihit::parse(Some(told.as_bytes())),
                Multihit::Guarded,
                "{told:?}"
            );
        }
    }

    #[test]
    fn parse_unreadable_file_keeps_the_guard() {
        assert_eq!(Multihit::parse(None), Multihit::Guarded);
        assert_eq!(Multihit::parse(Some(&[0xff, 0])), Multihit::Guarded);
    }
}
