//! The guest kernel's command line: the one every guest is booted with, and the words that weaken a guest for a test.

use thaw_protocol::handshake::WARM;

/// The guest kernel's command line; `guest-kernel-config/README.md` gives the reason for each word. One CPU comes up at boot, and the agent
/// brings the others online. As under docker, every user may use ports below 1024, and a process may reserve more memory than exists: only
/// touched pages count, and a process that touches too many is killed.
const CMDLINE: &str = "console=ttyS0 loglevel=3 reboot=k panic=-1 root=/dev/pmem0 rootfstype=erofs rootflags=dax \
                       rootwait ro init=/sbin/init pci=off tsc=reliable swiotlb=noforce noreplace-smp maxcpus=1 \
                       rcupdate.rcu_expedited=1 memhp_default_state=online dummy.numdummies=0 \
                       sysctl.net.ipv4.ip_unprivileged_port_start=0 sysctl.vm.overcommit_memory=1";

/// Additional words, for debugging a guest that does not start.
const KERNEL_ARGUMENTS: &str = "THAW_KERNEL_ARGS";
/// Prefix of words that weaken the guest for a test.
const TEST_WORD: &str = "thaw.test=";

/// The command line of a template of this process, which is one of the template's ingredients. Its agent does work ahead that each clone
/// would do first.
pub fn command_line() -> String {
    format!("{} {WARM}", cold_command_line())
}

/// The command line of a booted sandbox.
pub fn cold_command_line() -> String {
    with_words(std::env::var(KERNEL_ARGUMENTS).ok().as_deref())
}

fn with_words(more: Option<&str>) -> String {
    match more {
        Some(more) if !more.trim().is_empty() => format!("{CMDLINE} {}", more.trim()),
        _ => CMDLINE.into(),
    }
}

/// Whether a guest booted with this command line is weaker than it must be outside tests.
pub fn has_test_hooks(command_line: &str) -> bool {
    command_line
        .split_whitespace()
        .any(|word| word.starts_with(TEST_WORD))
}

/// The word for a test guest without an agent.
const BARE: &str = "thaw.test=bare";

/// Whether guests booted with this command line are bare.
pub fn is_bare(command_line: &str) -> bool {
    command_line.split_whitespace().any(|word| word == BARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_added_and_test_hooks_are_seen() {
        assert_eq!(with_words(None), CMDLINE);
        assert_eq!(with_words(Some("  ")), CMDLINE);
        assert!(!has_test_hooks(CMDLINE));
        let weak = with_words(Some(" thaw.test=keep-entropy "));
        assert!(weak.ends_with(" thaw.test=keep-entropy") && has_test_hooks(&weak));
        assert!(!has_test_hooks("xthaw.test=no"));
    }

    #[test]
    fn bare_guest_is_one_by_its_word() {
        assert!(is_bare("console=ttyS0 thaw.test=bare"));
        assert!(!is_bare("thaw.test=barely thaw.test=keep-entropy"));
    }
}
