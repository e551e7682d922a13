//! A file system's every file in one hash: names, metadata, extended attributes, contents.
//!
//! What the runtime puts into a container is left out: file systems mounted over the root's, and, since that touches them,
//! the times of directories above such a mount.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File, Metadata};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Everything below `top`, one line each, hashed; with `list`, the lines too.
pub fn print(top: &str, list: bool) {
    let mut walk = Walk {
        mounts: mounts(),
        links: HashMap::new(),
        lines: BTreeMap::new(),
    };
    walk.visit(Path::new(top));
    let mut hash = Sha256::new();
    for (path, line) in &walk.lines {
        let line = format!("{} {line}\n", path.display());
        hash.update(&line);
        if list {
            print!("{line}");
        }
    }
    println!("{} entries {}", walk.lines.len(), hex(&hash.finalize()));
}

struct Walk {
    mounts: BTreeSet<PathBuf>,
    /// The first name of each file that has several.
    links: HashMap<u64, PathBuf>,
    lines: BTreeMap<PathBuf, String>,
}

impl Walk {
    fn visit(&mut self, path: &Path) {
        let status = fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let line = self.describe(path, &status);
        self.lines.insert(path.into(), line);
        if !status.is_dir() {
            return;
        }
        let entries = fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        names.sort();
        for name in names {
            if !self.mounts.contains(&name) {
                self.visit(&name);
            }
        }
    }

    fn describe(&mut self, path: &Path, status: &Metadata) -> String {
        let kind = status.file_type();
        let mut line = format!(
            "{:o} {}:{} links {}",
            status.mode(),
            status.uid(),
            status.gid(),
            if status.is_dir() { 0 } else { status.nlink() }
        );
        let touched = status.is_dir() && self.mounts.iter().any(|mount| mount.starts_with(path));
        if !touched {
            line += &format!(" {}.{:09}", status.mtime(), status.mtime_nsec());
        }
        if kind.is_file() {
            line += &format!(" {} {}", status.size(), content(path));
        }
        if kind.is_symlink() {
            line += &format!(" -> {}", hex(fs::read_link(path).unwrap().as_os_str().as_bytes()));
        }
        if kind.is_char_device() || kind.is_block_device() {
            line += &format!(" device {:x}", status.rdev());
        }
        if !status.is_dir() && status.nlink() > 1 {
            let first = self.links.entry(status.ino()).or_insert_with(|| path.into());
            line += &format!(" same as {}", first.display());
        }
        for (name, value) in attributes(path) {
            line += &format!(" {name}={}", hex(&value));
        }
        line
    }
}

fn content(path: &Path) -> String {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) => panic!("{}: {e}", path.display()),
    };
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 17];
    loop {
        let length = file
            .read(&mut buffer)
            .unwrap_or_else(|e| panic!("reading {}: {e}", path.display()));
        if length == 0 {
            return hex(&hash.finalize()[..16]);
        }
        hash.update(&buffer[..length]);
    }
}

/// Extended attributes by name, not following a symlink.
fn attributes(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut names = vec![0; 64 << 10];
    let Ok(length) = rustix::fs::llistxattr(path, &mut names[..]) else {
        return BTreeMap::new();
    };
    let names = names[..length].split(|b| *b == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let name = String::from_utf8_lossy(name).into_owned();
            let mut value = vec![0; 64 << 10];
            let length = rustix::fs::lgetxattr(path, name.as_str(), &mut value[..])
                .unwrap_or_else(|e| panic!("{} of {}: {e}", name, path.display()));
            value.truncate(length);
            (name, value)
        })
        .collect()
}

/// Where something is mounted, the root itself left out (proc(5), mountinfo).
fn mounts() -> BTreeSet<PathBuf> {
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    info.lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|path| *path != "/")
        .map(PathBuf::from)
        .collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
