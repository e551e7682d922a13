//! Whether guests may execute from huge pages: on some processors that lets a guest crash the host (iTLB multihit,
//! CVE-2018-12207).
//!
//! KVM guards such processors by splitting huge pages, and starts a thread for each machine to join them again. Other
//! processors do not need it. The kernel tells which this one is in a file, read before the jail closes.

use std::fs;

/// Where the kernel tells (Documentation/admin-guide/hw-vuln/multihit.rst).
const FILE: &str = "/sys/devices/system/cpu/vulnerabilities/itlb_multihit";

/// What is known of this host's processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Multihit {
    /// The kernel says that the processor does not have the erratum.
    NotAffected,
    /// The processor has the erratum, or the kernel does not say. KVM's guard stays on.
    Guarded,
}

impl Multihit {
    /// Asks the kernel. While there are paths: before the jail closes.
    pub fn of_host() -> Multihit {
        Multihit::parse(fs::read(FILE).ok().as_deref())
    }

    /// `told`: the file's contents, if it could be read.
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
