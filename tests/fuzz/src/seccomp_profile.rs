//! A caller's seccomp profile, in docker's or the OCI's JSON.

use thaw_sandbox::container::seccomp_profile::fuzz_rules;

pub fn run(json: &[u8]) {
    let Some(section) = fuzz_rules(json) else { return };
    for rule in &section.Syscalls {
        assert!(!rule.Names.is_empty() && rule.Names.is_sorted_by(|a, b| a < b));
        assert!(rule.Args.len() <= 64 && rule.Args.iter().all(|argument| argument.Index <= 5));
    }
}
