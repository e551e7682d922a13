//! A snapshot as one file: a tar archive that knows of holes (GNU's sparse files). containerd keeps the files of a checkpoint as
//! they read, and a snapshot's disk is gigabytes of holes.
//!
//! Invariant: what is unpacked are plain files and directories below one directory, whatever the archive says.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;

use tar::{Archive, Builder, EntryType};

use crate::error::{Error, For, Result};

/// Puts a directory's files into an archive, and the directory away.
pub fn pack(directory: &Path, archive: &Path) -> Result<()> {
    let packed = || {
        let mut tar = Builder::new(BufWriter::new(File::create(archive)?));
        tar.follow_symlinks(false);
        tar.append_dir_all(".", directory)?;
        tar.into_inner()?.flush()
    };
    packed().for_(|| format!("pack {} as {}", directory.display(), archive.display()))?;
    fs::remove_dir_all(directory).for_(|| format!("remove {}", directory.display()))
}

/// Makes the directory of its archive again.
///
/// # Errors
/// Where there is none, or has anything in it but files and directories of its own.
pub fn unpack(archive: &Path, directory: &Path) -> Result<()> {
    let what = || format!("unpack {}", archive.display());
    let mut read = Archive::new(BufReader::new(File::open(archive).for_(what)?));
    fs::create_dir_all(directory).for_(what)?;
    for entry in read.entries().for_(what)? {
        let mut entry = entry.for_(what)?;
        let is_plain = matches!(
            entry.header().entry_type(),
            EntryType::Directory | EntryType::Regular | EntryType::GNUSparse
        );
        if !is_plain || !entry.unpack_in(directory).for_(what)? {
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let why = format!("{name:?} is no file or directory of a snapshot");
            return Err(Error::malformed(archive, why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn a_snapshot_comes_back_as_it_was_and_its_holes_take_no_room() {
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
    fn what_leads_out_or_is_no_file_is_refused_and_nothing_comes_of_it() {
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
            assert_eq!(fs::read_dir(&to).unwrap().count(), 0);
        }
        fs::write(&archive, [b'x'; 1500]).unwrap();
        assert!(unpack(&archive, &root.path().join("to")).is_err());
        assert!(unpack(&root.path().join("none"), &root.path().join("to")).is_err());
    }
}
