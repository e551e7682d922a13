//! Parses mount options, as in fstab and the OCI runtime specification, into flags, propagation and data.

use std::ffi::CString;
use std::path::Path;

use rustix::mount::{
    MountFlags, MountPropagationFlags, mount, mount_bind, mount_bind_recursive, mount_change, mount_remount,
};

use crate::error::{Error, Result, WithContext};

/// Parsed options of one mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    pub flags: MountFlags,
    pub propagation: MountPropagationFlags,
    /// `Some` for a bind mount; `true` if recursive.
    pub bind: Option<bool>,
    /// Passed to the file system.
    pub data: Vec<String>,
}

const FLAGS: &[(&str, MountFlags, bool)] = &[
    ("ro", MountFlags::RDONLY, true),
    ("rw", MountFlags::RDONLY, false),
    ("nosuid", MountFlags::NOSUID, true),
    ("suid", MountFlags::NOSUID, false),
    ("nodev", MountFlags::NODEV, true),
    ("dev", MountFlags::NODEV, false),
    ("noexec", MountFlags::NOEXEC, true),
    ("exec", MountFlags::NOEXEC, false),
    ("sync", MountFlags::SYNCHRONOUS, true),
    ("async", MountFlags::SYNCHRONOUS, false),
    ("dirsync", MountFlags::DIRSYNC, true),
    ("noatime", MountFlags::NOATIME, true),
    ("atime", MountFlags::NOATIME, false),
    ("nodiratime", MountFlags::NODIRATIME, true),
    ("diratime", MountFlags::NODIRATIME, false),
    ("relatime", MountFlags::RELATIME, true),
    ("norelatime", MountFlags::RELATIME, false),
    ("strictatime", MountFlags::STRICTATIME, true),
    ("nostrictatime", MountFlags::STRICTATIME, false),
    ("lazytime", MountFlags::LAZYTIME, true),
    ("silent", MountFlags::SILENT, true),
    ("defaults", MountFlags::empty(), true),
    // Options of runtimes that have no effect here.
    ("nofail", MountFlags::empty(), true),
];

const PROPAGATION: &[(&str, MountPropagationFlags)] = &[
    ("shared", MountPropagationFlags::SHARED),
    ("slave", MountPropagationFlags::DOWNSTREAM),
    ("private", MountPropagationFlags::PRIVATE),
    ("unbindable", MountPropagationFlags::UNBINDABLE),
];

/// The propagation flags with this name; a leading `r` means recursive.
pub fn propagation(name: &str) -> Option<MountPropagationFlags> {
    let find = |n: &str| PROPAGATION.iter().find(|(p, _)| *p == n).map(|(_, f)| *f);
    find(name).or_else(|| {
        name.strip_prefix('r')
            .and_then(find)
            .map(|f| f | MountPropagationFlags::REC)
    })
}

impl Default for MountOptions {
    fn default() -> Self {
        MountOptions {
            flags: MountFlags::empty(),
            propagation: MountPropagationFlags::empty(),
            bind: None,
            data: Vec::new(),
        }
    }
}

impl MountOptions {
    /// Parses `options`. Unknown options are passed to the file system.
    pub fn parse<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let mut parsed = MountOptions::default();
        for option in options.into_iter().flat_map(split).filter(|o| !o.is_empty()) {
            if let Some((_, flag, set)) = FLAGS.iter().find(|(name, ..)| *name == option) {
                parsed.flags.set(*flag, *set);
            } else if let Some(flags) = propagation(option) {
                parsed.propagation |= flags;
            } else if option == "bind" || option == "rbind" {
                parsed.bind = Some(option == "rbind");
            } else if option.contains('\0') {
                return Err(Error::Invalid(format!("mount option {option:?} has a NUL in it")));
            } else {
                parsed.data.push(option.to_owned());
            }
        }
        Ok(parsed)
    }

    /// Removes `name=value` from the data, and returns the value.
    pub fn take_data(&mut self, name: &str) -> Option<String> {
        let at = self.data.iter().position(|d| d.split('=').next() == Some(name))?;
        self.data.remove(at).split_once('=').map(|(_, v)| v.to_owned())
    }

    /// Mounts a file system of type `kind`. [`MountOptions::finish`] must follow.
    pub fn mount(&self, source: &str, target: &Path, kind: &str) -> Result<()> {
        let what = || format!("mount {kind} ({source}) on {}", target.display());
        let data = CString::new(self.data.join(","))
            .map_err(|_| Error::Invalid("mount data has a NUL in it".into()))?;
        mount(source, target, kind, self.flags, data.as_c_str()).with_context(what)
    }

    /// Bind-mounts `source`. [`MountOptions::finish`] must follow.
    pub fn bind(&self, source: impl AsRef<Path>, target: &Path) -> Result<()> {
        let source = source.as_ref();
        let what = || format!("bind {} on {}", source.display(), target.display());
        match self.bind {
            Some(false) => mount_bind(source, target).with_context(what),
            _ => mount_bind_recursive(source, target).with_context(what),
        }
    }

    /// Applies what mount(2) does only in further calls: the flags of a bind mount, and the propagation.
    /// `target` is resolved again, because a descriptor from before the mount refers to the directory below it.
    pub fn finish(&self, target: &Path) -> Result<()> {
        if self.bind.is_some() && !self.flags.is_empty() {
            mount_remount(target, self.flags | MountFlags::BIND, c"")
                .with_context(|| format!("set {:?} of {}", self.flags, target.display()))?;
        }
        if self.propagation.is_empty() {
            return Ok(());
        }
        mount_change(target, self.propagation)
            .with_context(|| format!("set the propagation of {}", target.display()))
    }
}

/// Overlay separates its layers by colons, so splitting at commas is correct.
fn split(options: &str) -> std::str::Split<'_, char> {
    options.split(',')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_sorted_and_the_last_word_counts() {
        let o = MountOptions::parse(["ro,nosuid", "rw", "rslave", "rbind", "size=64k", "lowerdir=/a:/b"])
            .unwrap();
        assert_eq!(o.flags, MountFlags::NOSUID);
        assert_eq!(
            o.propagation,
            MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC
        );
        assert_eq!(o.bind, Some(true));
        assert_eq!(o.data, ["size=64k", "lowerdir=/a:/b"]);
    }

    #[test]
    fn relatime_is_no_recursive_propagation() {
        assert!(propagation("relatime").is_none());
        assert_eq!(
            propagation("rprivate"),
            Some(MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        );
    }
}
