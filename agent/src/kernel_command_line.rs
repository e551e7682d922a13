//! The kernel's command line.

/// Whether it contains `word`.
pub fn has(word: &str) -> bool {
    std::fs::read_to_string("/proc/cmdline")
        .is_ok_and(|line| line.split_whitespace().any(|there| there == word))
}
