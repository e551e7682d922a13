//! A snapshot as one file: a tar archive that preserves holes (GNU sparse files). containerd copies a
//! checkpoint's files byte by byte, and a snapshot's disk has gigabytes of holes.
//!
//! Invariant: whatever the archive contains, unpacking creates only regular files and directories below one
//! directory, at most [`ENTRIES`] and [`BYTES`] in total. A refused archive leaves nothing behind.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::rc::Rc;

use tar::{Archive, Builder, EntryType};

use thaw_protocol::api::DISK_MIB;
use thaw_protocol::control::{HOST_DISKS, MEMORY_MIB};

use crate::error::{Error, Result, WithContext};
use crate::warning;

/// Most files and directories in an archive: several times as many as a snapshot has.
const ENTRIES: usize = 64;
/// Most bytes of an archive's files, including holes: the largest memory and disks, plus the memory's size
/// again for the rest.
const BYTES: u64 =
    (2 * *MEMORY_MIB.end() as u64 + (1 + HOST_DISKS.len() as u64) * *DISK_MIB.end() as u64) << 20;
/// Most bytes of headers between two files: names and lists of holes (2.7 million entries). They are held in
/// memory.
const HEADERS: u64 = 64 << 20;

/// Packs a directory's files into an archive and removes the directory.
pub fn pack(directory: &Path, archive: &Path) -> Result<()> {
    let packed = || {
        let mut tar = Builder::new(BufWriter::new(File::create(archive)?));
        tar.follow_symlinks(false);
        tar.append_dir_all(".", directory)?;
        tar.into_inner()?.flush()
    };
    packed().with_context(|| format!("pack {} as {}", directory.display(), archive.display()))?;
    fs::remove_dir_all(directory).with_context(|| format!("remove {}", directory.display()))
}

/// Unpacks an archive into a directory.
///
/// # Errors
/// The archive is missing, exceeds a limit, or contains anything other than files and directories below its
/// root.
pub fn unpack(archive: &Path, directory: &Path) -> Result<()> {
    unpack_within(archive, directory, ENTRIES, BYTES).inspect_err(|_| {
        if let Err(e) = fs::remove_dir_all(directory)
            && e.kind() != io::ErrorKind::NotFound
        {
            warning!("cannot remove {}: {e}", directory.display());
        }
    })
}

fn unpack_within(archive: &Path, directory: &Path, most_entries: usize, most_bytes: u64) -> Result<()> {
    let what = || format!("unpack {}", archive.display());
    let file = File::open(archive).with_context(what)?;
    let budget = Rc::new(Cell::new(HEADERS));
    let mut read = Archive::new(Metered {
        from: BufReader::new(file),
        left: budget.clone(),
    });
    fs::create_dir_all(directory).with_context(what)?;
    let (mut entries, mut left) = (0, most_bytes);
    for entry in read.entries().with_context(what)? {
        let mut entry = entry.with_context(what)?;
        let refused = |why: String| Err(Error::malformed(archive, why));
        entries += 1;
        if entries > most_entries {
            return refused(format!(
                "it has more than {most_entries} entries, more than any snapshot"
            ));
        }
        left = match left.checked_sub(entry.size()) {
            Some(left) => left,
            None => {
                return refused(format!(
                    "its files have more than {most_bytes} bytes, more than any snapshot"
                ));
            }
        };
        budget.set(entry.size());
        let is_plain = matches!(
            entry.header().entry_type(),
            EntryType::Directory | EntryType::Regular | EntryType::GNUSparse
        );
        if !is_plain || !entry.unpack_in(directory).with_context(what)? {
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            return refused(format!("{name:?} is not a file or directory of a snapshot"));
        }
        budget.set(HEADERS);
    }
    Ok(())
}

/// A reader that fails after a number of bytes.
struct Metered<R> {
    from: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        let most = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        if most == 0 && !buffer.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the names or holes of its files take more room than those of any snapshot",
            ));
        }
        let read = self.from.read(&mut buffer[..most])?;
        self.left.set(left - read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn packed_snapshot_unpacks_equal_and_sparse() {
        const DISK: u64 = 8 << 30;
        let root = tempfile::tempdir().unwrap();
        let (from, archive, to) = (
            root.path().join("from"),
            root.path().join("tar"),
            root.path().join("to"),
        );
        fs::create_dir_all(from.join("disks")).unwrap();
        fs::write(from.join("state"), b"state").unwrap();
        let disk = File::create(from.join("disks/blk0")).unwrap();
        disk.set_len(DISK).unwrap();
        for at in [0, 5 << 30, DISK - 4096] {
            disk.write_all_at(&[7; 4096], at).unwrap();
        }
        pack(&from, &archive).unwrap();
        assert!(!from.exists());
        assert!(fs::metadata(&archive).unwrap().len() < 1 << 20);
        unpack(&archive, &to).unwrap();
        assert_eq!(fs::read(to.join("state")).unwrap(), b"state");
        let disk = File::open(to.join("disks/blk0")).unwrap();
        let (metadata, mut read) = (disk.metadata().unwrap(), [0; 4096]);
        assert_eq!(metadata.len(), DISK);
        assert!(metadata.blocks() * 512 < 1 << 20, "{}", metadata.blocks());
        for (at, expected) in [(0, 7), (4096, 0), (5 << 30, 7), (DISK - 4096, 7)] {
            disk.read_exact_at(&mut read, at).unwrap();
            assert_eq!(read, [expected; 4096], "{at}");
        }
    }

    #[test]
    fn packed_checkpoint_with_links_or_outside_paths_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let archive = root.path().join("tar");
        let put = |kind: EntryType, name: &[u8], link: &str| {
            let mut header = tar::Header::new_gnu();
            header.as_old_mut().name[..name.len()].copy_from_slice(name);
            header.set_entry_type(kind);
            header.set_mode(0o644);
            header.set_size(0);
            if !link.is_empty() {
                header.set_link_name(link).unwrap();
            }
            header.set_cksum();
            let mut tar = Builder::new(File::create(&archive).unwrap());
            tar.append(&header, &b""[..]).unwrap();
            tar.into_inner().unwrap();
        };
        let outside = root.path().join("outside");
        for (kind, name, link) in [
            (EntryType::Regular, &b"../outside"[..], ""),
            (EntryType::Symlink, b"link", "../outside"),
            (EntryType::Link, b"link", "../tar"),
            (EntryType::Fifo, b"fifo", ""),
            (EntryType::Char, b"null", ""),
        ] {
            put(kind, name, link);
            let to = root.path().join("to");
            let refused = unpack(&archive, &to).unwrap_err();
            assert!(matches!(refused, Error::Invalid(_)), "{refused}");
            assert!(!outside.exists());
            assert!(!to.exists());
        }
        fs::write(&archive, [b'x'; 1500]).unwrap();
        assert!(unpack(&archive, &root.path().join("to")).is_err());
        assert!(unpack(&root.path().join("none"), &root.path().join("to")).is_err());
    }

    /// An archive with files of these sizes, which are holes except for their last byte.
    fn sparse(archive: &Path, sizes: &[u64]) {
        let mut tar = Builder::new(File::create(archive).unwrap());
        for (number, size) in sizes.iter().enumerate() {
            let mut file = tempfile::tempfile().unwrap();
            file.set_len(*size).unwrap();
            file.write_all_at(b"x", size - 1).unwrap();
            tar.append_file(number.to_string(), &mut file).unwrap();
        }
        tar.into_inner().unwrap();
    }

    #[test]
    fn archive_of_too_many_entries_or_bytes_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let (archive, to) = (root.path().join("tar"), root.path().join("to"));
        sparse(&archive, &[1; ENTRIES]);
        unpack(&archive, &to).unwrap();
        sparse(&archive, &[1; ENTRIES + 1]);
        let refused = unpack(&archive, &to).unwrap_err().to_string();
        assert!(refused.contains("more than 64 entries"), "{refused}");
        assert!(!to.exists());
        // Both files are mostly holes, so they need little disk space.
        sparse(&archive, &[1 << 30, 1 << 30]);
        assert!(fs::metadata(&archive).unwrap().len() < 1 << 20);
        let unpack_in = |bytes| unpack_within(&archive, &to, ENTRIES, bytes);
        unpack_in(2 << 30).unwrap();
        let refused = unpack_in((2 << 30) - 1).unwrap_err().to_string();
        assert!(refused.contains("2147483647 bytes"), "{refused}");
    }

    #[test]
    fn archive_with_endless_names_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let archive = root.path().join("tar");
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(2 * HEADERS);
        header.set_cksum();
        let mut tar = Builder::new(File::create(&archive).unwrap());
        tar.append(&header, io::repeat(b'x').take(2 * HEADERS)).unwrap();
        tar.into_inner().unwrap();
        let refused = unpack(&archive, &root.path().join("to")).unwrap_err();
        assert!(refused.to_string().contains("more room"), "{refused}");
    }
}
