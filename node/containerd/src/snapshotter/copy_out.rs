//! Copies a part of an image into a directory of the host.
//!
//! Invariant: every file is created, never opened, in a directory that was created here too, so no link of an image is followed. The
//! number of files and their sizes were bounded when the image was read.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags, lsetxattr, utimensat};
use rustix::io::Errno;
use thaw_sandbox::error::Error;
use thaw_sandbox::images::part::{Contents, Node, Part, What};

/// Most bytes of a file that are read at once.
const STEP: usize = 1 << 20;

/// Creates all of it below `draft`, which is empty. Uses the runtime to wait for bytes that are not on this host yet.
pub fn copy(draft: &Path, part: &Part, runtime: &tokio::runtime::Handle) -> Result<(), Error> {
    // The first name of each file with several.
    let mut names: HashMap<u64, PathBuf> = HashMap::new();
    for (path, node) in &part.nodes {
        let path = below(draft, path);
        let fail = |e: io::Error| Error::system(format!("cannot make {}", path.display()), &e);
        match &node.what {
            What::Directory => std::fs::create_dir(&path).map_err(fail)?,
            What::Link { target } => symlink(OsStr::from_bytes(target), &path).map_err(fail)?,
            What::File { size } => {
                if let Some(first) = names.get(&node.number) {
                    std::fs::hard_link(first, &path).map_err(fail)?;
                    continue;
                }
                let mut file = OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .open(&path)
                    .map_err(fail)?;
                let contents = part.contents.as_ref();
                fill(&mut file, node.number, *size, contents, runtime, &fail)?;
                if node.is_linked {
                    names.insert(node.number, path);
                }
            }
        }
    }
    Ok(())
}

fn fill(
    file: &mut File,
    number: u64,
    size: u64,
    contents: &dyn Contents,
    runtime: &tokio::runtime::Handle,
    fail: &dyn Fn(io::Error) -> Error,
) -> Result<(), Error> {
    file.set_len(size).map_err(fail)?;
    let mut offset = 0;
    let mut buffer = vec![0; size.min(STEP as u64) as usize];
    while offset < size {
        let length = (size - offset).min(STEP as u64);
        let piece = &mut buffer[..length as usize];
        runtime.block_on(contents.read(number, offset, piece))?;
        // Keeps holes.
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, offset).map_err(fail)?;
        }
        offset += length;
    }
    Ok(())
}

/// Sets owners, modes and times, after everything is created.
pub fn finish(draft: &Path, part: &Part) -> io::Result<()> {
    // A directory comes before its entries; setting theirs does not change its time.
    for (path, node) in &part.nodes {
        attributes(&below(draft, path), node)?;
    }
    Ok(())
}

fn attributes(path: &Path, node: &Node) -> io::Result<()> {
    lchown(path, Some(node.uid), Some(node.gid))?;
    // After the owner: changing that clears the set-user-ID bit and capabilities.
    if !matches!(node.what, What::Link { .. }) {
        std::fs::set_permissions(path, Permissions::from_mode(node.mode))?;
        for (name, value) in &node.extended {
            match lsetxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty()) {
                // The file system does not support them.
                Err(Errno::OPNOTSUPP) => {}
                done => done?,
            }
        }
    }
    let (seconds, nanoseconds) = node.changed;
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds.min(999_999_999).into(),
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    Ok(utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

fn below(draft: &Path, path: &[u8]) -> PathBuf {
    draft.join(OsStr::from_bytes(path))
}
