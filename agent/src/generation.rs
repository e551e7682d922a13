//! The generation of this guest: a file whose content changes at every thaw, so that a program can learn that it goes on in another sandbox.
//!
//! Invariant: the file is written in place, in one write of always the same length. So an inotify(7) watch and the bind mounts of
//! containers stay with it.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use thaw_protocol::agent::layout::GENERATION;

use crate::entropy;
use crate::error::{Result, WithContext};

/// Writes a new generation: 32 hexadecimal digits from the kernel's generator, and a newline.
pub fn renew() -> Result<()> {
    write(Path::new(GENERATION), &(entropy::next_bytes()? + "\n"))
}

fn write(path: &Path, generation: &str) -> Result<()> {
    let what = || format!("write {}", path.display());
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(what)?;
    }
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).mode(0o444).open(path);
    file.and_then(|mut file| file.write_all(generation.as_bytes()))
        .with_context(what)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn generation_is_replaced_in_the_same_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("thaw/generation");
        write(&path, "one\n").unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(first.mode() & 0o777, 0o444);
        // Only root may open a read-only file for writing.
        if rustix::process::geteuid().is_root() {
            write(&path, "two\n").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
            assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());
        }
    }
}
