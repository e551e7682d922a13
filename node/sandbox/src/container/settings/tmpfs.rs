//! File systems in memory that `--tmpfs` and `--mount type=tmpfs` mount in a container, and the size of `/dev/shm`.

use std::str::FromStr;

use thaw_protocol::agent::oci;

use crate::closest::closest;

/// The options docker gives each of them.
const DEFAULT_OPTIONS: [&str; 3] = ["noexec", "nosuid", "nodev"];
/// Options without a value that may be given.
const FLAGS: [&str; 12] = [
    "rw", "ro", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "atime", "noatime", "sync", "async",
];
/// Options with a value (`tmpfs(5)`).
const VALUES: [&str; 6] = ["size", "mode", "uid", "gid", "nr_inodes", "nr_blocks"];

/// A file system in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tmpfs {
    path: String,
    options: Vec<String>,
}

impl Tmpfs {
    /// One at this path, with the options of `tmpfs(5)`.
    pub fn new(path: &str, options: &[&str]) -> Result<Tmpfs, String> {
        let path = super::container_path(path)?;
        for option in options {
            let is_known = match option.split_once('=') {
                Some((name, value)) => VALUES.contains(&name) && !value.is_empty() && !value.contains('\0'),
                None => FLAGS.contains(option),
            };
            if !is_known {
                let name = option.split_once('=').map_or(*option, |(name, _)| name);
                let closest = closest(name, FLAGS.into_iter().chain(VALUES));
                return Err(format!(
                    "{option:?} is no option of a tmpfs: see tmpfs(5){closest}"
                ));
            }
        }
        let options = DEFAULT_OPTIONS.iter().chain(options).map(|o| (*o).to_owned());
        Ok(Tmpfs {
            path,
            options: options.collect(),
        })
    }
}

impl FromStr for Tmpfs {
    type Err = String;

    /// Reads `PATH` or `PATH:OPTION,OPTION`.
    fn from_str(text: &str) -> Result<Tmpfs, String> {
        match text.split_once(':') {
            None => Tmpfs::new(text, &[]),
            Some((path, options)) => Tmpfs::new(path, &options.split(',').collect::<Vec<_>>()),
        }
    }
}

/// Mounts each, instead of what was to be mounted at the same path.
pub(super) fn add(mounts: &mut Vec<oci::Mount>, all: &[Tmpfs]) {
    for one in all {
        mounts.retain(|mount| mount.destination != one.path);
        mounts.push(oci::Mount {
            destination: one.path.clone(),
            type_: "tmpfs".into(),
            source: "tmpfs".into(),
            options: one.options.clone(),
            ..Default::default()
        });
    }
}

/// Sets the size of a tmpfs that is mounted by default.
pub(super) fn resize(mounts: &mut [oci::Mount], path: &str, bytes: u64) {
    for mount in mounts.iter_mut().filter(|mount| mount.destination == path) {
        mount.options.retain(|option| !option.starts_with("size="));
        mount.options.push(format!("size={bytes}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tmpfs_is_read_with_its_options() {
        let plain: Tmpfs = "/run".parse().unwrap();
        assert_eq!(plain.options, DEFAULT_OPTIONS);
        let sized: Tmpfs = "/run:exec,size=64k,mode=1777".parse().unwrap();
        assert_eq!(&sized.options[3..], ["exec", "size=64k", "mode=1777"]);
        for wrong in [
            "run",
            "/",
            "",
            "/a/../b",
            "/run:loud",
            "/run:size=",
            "/run:",
            "/run:mount=x",
        ] {
            assert!(wrong.parse::<Tmpfs>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn unknown_option_names_the_closest() {
        let refused = |text: &str| text.parse::<Tmpfs>().unwrap_err();
        assert!(refused("/run:sise=1m").ends_with("closest is size"));
        assert!(refused("/run:noexce").ends_with("closest is noexec"));
    }

    #[test]
    fn tmpfs_replaces_the_mount_at_its_path() {
        let mount = |path: &str| oci::Mount {
            destination: path.into(),
            options: vec!["nosuid".into(), "size=1".into()],
            ..Default::default()
        };
        let mut mounts = vec![mount("/dev/shm"), mount("/sys")];
        resize(&mut mounts, "/dev/shm", 4096);
        assert_eq!(mounts[0].options, ["nosuid", "size=4096"]);
        assert_eq!(mounts[1].options, ["nosuid", "size=1"]);
        add(&mut mounts, &["/dev/shm/:size=2".parse().unwrap()]);
        let paths: Vec<_> = mounts.iter().map(|mount| mount.destination.as_str()).collect();
        assert_eq!(paths, ["/sys", "/dev/shm"]);
    }
}
