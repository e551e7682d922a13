//! The log that a thaw-vmm or thaw-share writes into its sandbox's directory, and its last lines for an error.

use std::path::Path;

use crate::failure::{end_of, last_lines};

/// Name of the VMM's log in the sandbox's directory.
pub(super) use crate::failure::VMM_LOG as LOG;
/// Number of lines shown with a failure, and the number of bytes searched for them.
const LOG_LINES: usize = 10;
const LOG_BYTES: u64 = 64 << 10;

/// The last lines of a VMM's log.
pub(super) fn log_tail(path: &Path) -> Vec<String> {
    let text = end_of(path, LOG_BYTES).unwrap_or_default();
    let lines = last_lines(&text, LOG_LINES).into_iter();
    lines.map(|line| format!("thaw-vmm: {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_tail_of_a_huge_log_is_its_last_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(LOG);
        assert!(log_tail(&path).is_empty());
        std::fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(log_tail(&path), ["thaw-vmm: one", "thaw-vmm: two"]);
        let file = std::fs::File::create(&path).unwrap();
        // Sparse: reading all of it would need more memory than the host has.
        file.set_len(1 << 40).unwrap();
        let mut file = std::fs::File::options().append(true).open(&path).unwrap();
        let lines: String = (0..20).map(|number| format!("\nline {number}")).collect();
        std::io::Write::write_all(&mut file, lines.as_bytes()).unwrap();
        let tail = log_tail(&path);
        assert_eq!((tail.len(), tail[9].as_str()), (LOG_LINES, "thaw-vmm: line 19"));
    }
}
