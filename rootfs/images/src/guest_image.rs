//! The guest image: the read-only EROFS a sandbox boots from. It holds only the agent and its mount points; everything that differs between
//! sandboxes is created at run time under `/run`.
//!
//! Guests map it as persistent memory with huge pages, so its size is a multiple of 2 MiB. Equal inputs give equal bytes, because the
//! image's hash is part of a template's key.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use thaw_imagefs::erofs::{self, Summary, WriteError};
use thaw_imagefs::tree::{Attributes, BlobExtent, Inode, InodeIndex, Kind, PAGE, Tree};

/// The image's length is a multiple of this.
pub const ALIGNMENT: u64 = 2 << 20;
/// The largest image.
pub const MAX_LENGTH: u64 = 8 << 20;

/// Directories that PID 1 and container processes expect. Most of them are mount points.
const DIRECTORIES: &[(&str, u16)] = &[
    ("dev", 0o755),
    ("etc", 0o755),
    ("mnt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("sbin", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("var", 0o755),
    ("var/tmp", 0o1777),
];

/// Small files. `machine-id` is a mount point.
const FILES: &[(&str, &str)] = &[
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n",
    ),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("etc/machine-id", ""),
];

/// Links to files that the agent writes under `/run`, and `/var/run` for old programs.
const LINKS: &[(&str, &str)] = &[
    ("etc/hosts", "/run/thaw/etc/hosts"),
    ("etc/hostname", "/run/thaw/etc/hostname"),
    ("etc/resolv.conf", "/run/thaw/etc/resolv.conf"),
    ("etc/mtab", "/proc/self/mounts"),
    ("var/run", "/run"),
];

/// Why the image cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum GuestImageError {
    #[error("the agent {path} cannot be read: {source}; build it with `make agent`")]
    Agent { path: String, source: io::Error },
    #[error("the agent {path} is not an ELF file; build it with `make agent`")]
    NotElf { path: String },
    #[error("the guest image would have {length} bytes, {MAX_LENGTH} are allowed: the agent is too large")]
    TooLarge { length: u64 },
    #[error("cannot write {path}: {source}")]
    Write { path: String, source: io::Error },
    #[error(transparent)]
    Image(#[from] WriteError),
}

/// Makes the image `out` with the agent as `/sbin/init`. `out` is replaced atomically.
///
/// # Errors
/// See [`GuestImageError`].
pub fn build(agent: &Path, out: &Path) -> Result<Summary, GuestImageError> {
    let name = || agent.display().to_string();
    let program = std::fs::read(agent).map_err(|source| GuestImageError::Agent { path: name(), source })?;
    if !program.starts_with(b"\x7fELF") {
        return Err(GuestImageError::NotElf { path: name() });
    }
    let (tree, data) = contents(&program);
    let length = erofs::plan(&tree, &[data.len() as u64])?
        .summary()
        .total_length
        .next_multiple_of(ALIGNMENT);
    if length > MAX_LENGTH {
        return Err(GuestImageError::TooLarge { length });
    }
    let write = |source| GuestImageError::Write {
        path: out.display().to_string(),
        source,
    };
    let directory = out
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let file = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(directory)
        .map_err(write)?;
    let mut reader = &data[..];
    let mut blobs: [(u64, &mut dyn Read); 1] = [(data.len() as u64, &mut reader)];
    let summary = erofs::write_with_data(&tree, &mut blobs, file.as_file())?;
    pad(file.as_file(), length).map_err(write)?;
    file.persist(out).map_err(|error| write(error.error))?;
    Ok(summary)
}

/// Allocates all pages, because a hole of a mapped file would cost each reader a page.
fn pad(file: &File, length: u64) -> io::Result<()> {
    file.set_len(length)?;
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, length)
        .or_else(|error| match error {
            // The file system does not support fallocate: the holes stay, which is only slower.
            rustix::io::Errno::OPNOTSUPP => Ok(()),
            error => Err(error),
        })
        .map_err(io::Error::from)
}

/// The image's tree, and its one data file.
fn contents(program: &[u8]) -> (Tree, Vec<u8>) {
    let mut tree = Tree::new(Attributes::implied_directory());
    let mut data = Vec::new();
    for (path, mode) in DIRECTORIES {
        add(
            &mut tree,
            path,
            *mode,
            Kind::Directory {
                entries: BTreeMap::new(),
            },
        );
    }
    let files = FILES.iter().map(|(path, text)| (*path, 0o644, text.as_bytes()));
    // The program comes first: it then starts on a huge page.
    for (path, mode, content) in std::iter::once(("sbin/init", 0o755, program)).chain(files) {
        let data_offset = data.len() as u64;
        data.extend_from_slice(content);
        data.resize(data.len().next_multiple_of(PAGE as usize), 0);
        let length = data.len() as u64 - data_offset;
        let extents = match length {
            0 => Vec::new(),
            _ => vec![BlobExtent {
                file_offset: 0,
                blob: 0,
                data_offset,
                length,
            }],
        };
        add(
            &mut tree,
            path,
            mode,
            Kind::File {
                size: content.len() as u64,
                extents,
            },
        );
    }
    for (path, target) in LINKS {
        add(
            &mut tree,
            path,
            0o777,
            Kind::Symlink {
                target: target.as_bytes().to_vec(),
            },
        );
    }
    (tree, data)
}

/// Adds an inode to an existing directory.
fn add(tree: &mut Tree, path: &str, mode: u16, kind: Kind) {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let index = tree.inodes.len() as InodeIndex;
    tree.inodes.push(Inode {
        attributes: Attributes {
            mode,
            ..Attributes::default()
        },
        kind,
    });
    let parent = tree
        .lookup(parent.as_bytes())
        .expect("parents come before their children in the lists above");
    match &mut tree.inodes[parent as usize].kind {
        Kind::Directory { entries } => entries.insert(name.as_bytes().into(), index),
        _ => unreachable!("the parents in the lists above are directories"),
    };
}

#[cfg(test)]
mod tests {
    use thaw_imagefs::erofs::Reader;

    use super::*;

    #[test]
    fn the_agent_is_init_and_the_image_is_whole_huge_pages() {
        let directory = tempfile::tempdir().unwrap();
        let (agent, out) = (
            directory.path().join("agent"),
            directory.path().join("guest.erofs"),
        );
        let program = [b"\x7fELF".to_vec(), vec![9; 3 << 20]].concat();
        std::fs::write(&agent, &program).unwrap();
        build(&agent, &out).unwrap();
        let image = std::fs::read(&out).unwrap();
        assert_eq!(image.len() as u64 % ALIGNMENT, 0);
        let fsck = std::process::Command::new("fsck.erofs").arg(&out).output();
        assert!(fsck.expect("fsck.erofs, of package erofs-utils").status.success());

        let reader = Reader::new(&image[..]).unwrap();
        let find = |path: &str| {
            path.split('/').fold(
                reader.inode(reader.superblock().root).unwrap(),
                |directory, name| {
                    let entry = reader.lookup(&directory, name.as_bytes()).unwrap().unwrap();
                    reader.inode(entry.nid).unwrap()
                },
            )
        };
        let init = find("sbin/init");
        assert_eq!((init.mode, init.size), (0o100755, program.len() as u64));
        let pieces: Vec<_> = reader.mappings(&init, 0, u64::MAX).map(Result::unwrap).collect();
        let address = pieces[0].address.unwrap();
        assert_eq!((pieces.len(), address % ALIGNMENT), (1, 0));
        assert!(image[address as usize..][..program.len()] == program);
        assert_eq!(find("tmp").mode, 0o41777);
        assert_eq!(
            reader.read_link(&find("etc/resolv.conf")).unwrap(),
            b"/run/thaw/etc/resolv.conf"
        );

        // Again, the same bytes.
        build(&agent, &out).unwrap();
        assert!(std::fs::read(&out).unwrap() == image);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_is_no_agent_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (agent, out) = (
            directory.path().join("agent"),
            directory.path().join("guest.erofs"),
        );
        assert!(matches!(build(&agent, &out), Err(GuestImageError::Agent { .. })));
        std::fs::write(&agent, "#!/bin/sh\n").unwrap();
        assert!(matches!(build(&agent, &out), Err(GuestImageError::NotElf { .. })));
        std::fs::write(&agent, [b"\x7fELF".to_vec(), vec![9; 8 << 20]].concat()).unwrap();
        assert!(matches!(
            build(&agent, &out),
            Err(GuestImageError::TooLarge { .. })
        ));
        assert!(!out.exists());
    }
}
