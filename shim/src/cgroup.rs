//! The cgroup a client wants the shim itself in: an option of containerd's own runtime that clients give any (`WithShimCgroup`).

use std::path::{Component, Path};

use thaw_protocol::shim::runc_options::Options;
use thaw_protocol::shim::{Any, Message};

use crate::error::{Error, For, Result};
use crate::options::kind;

/// Where the host's cgroups are.
pub const ROOT: &str = "/sys/fs/cgroup";
/// The name of the message in an `Any` it is one of.
pub const OPTIONS: &str = "containerd.runc.v1.Options";

/// What options say of it.
pub fn wanted(told: &Any) -> Option<String> {
    let options = (kind(told) == OPTIONS).then(|| Options::parse_from_bytes(&told.value).ok())??;
    Some(options.shim_cgroup).filter(|path| !path.is_empty())
}

/// Has process `pid` join the cgroup at `path` below `root`: of version 2, or each of version 1 that is there.
///
/// # Errors
/// Where there is none, or it cannot be joined.
pub fn join(root: &Path, path: &str, pid: u32) -> Result<()> {
    let below = Path::new(path.trim_start_matches('/'));
    let is_plain = below
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if !is_plain {
        return Err(Error::Invalid(format!(
            "{path:?} is no place for a shim's cgroup"
        )));
    }
    let hierarchies = match root.join("cgroup.controllers").exists() {
        true => vec![root.to_owned()],
        false => {
            let entries = std::fs::read_dir(root).for_(|| format!("read {}", root.display()))?;
            entries.flatten().map(|entry| entry.path()).collect()
        }
    };
    let mut joined = false;
    for hierarchy in hierarchies {
        let processes = hierarchy.join(below).join("cgroup.procs");
        if processes.exists() {
            std::fs::write(&processes, pid.to_string()).for_(|| format!("join {}", processes.display()))?;
            joined = true;
        }
    }
    match joined {
        true => Ok(()),
        false => Err(Error::NotFound(format!(
            "the shim's cgroup {path} below {}",
            root.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(name: &str, shim_cgroup: &str) -> Any {
        let options = Options {
            shim_cgroup: shim_cgroup.into(),
            ..Default::default()
        };
        Any {
            type_url: name.into(),
            value: options.write_to_bytes().unwrap(),
            ..Default::default()
        }
    }

    #[test]
    fn shim_cgroup_is_read_from_containerds_runc_options_only() {
        assert_eq!(wanted(&options(OPTIONS, "/a/b")).as_deref(), Some("/a/b"));
        assert_eq!(wanted(&options(OPTIONS, "")), None);
        assert_eq!(wanted(&options("runtimeoptions.v1.Options", "/a")), None);
        let mut broken = options(OPTIONS, "/a/b");
        broken.value = vec![0xff];
        assert_eq!(wanted(&broken), None);
    }

    #[test]
    fn shim_cgroup_is_joined_in_every_hierarchy_that_has_it() {
        let root = tempfile::tempdir().unwrap();
        let make = |place: &str| {
            let directory = root.path().join(place);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("cgroup.procs"), "").unwrap();
        };
        let holds =
            |place: &str| std::fs::read_to_string(root.path().join(place).join("cgroup.procs")).unwrap();
        ["memory/shims", "cpu/shims", "pids"].into_iter().for_each(make);
        join(root.path(), "/shims", 7).unwrap();
        assert_eq!(
            (holds("memory/shims"), holds("cpu/shims"), holds("pids")),
            ("7".into(), "7".into(), "".into())
        );
        assert!(
            join(root.path(), "/none", 7)
                .unwrap_err()
                .to_string()
                .contains("/none")
        );
        assert!(join(root.path(), "/../x", 7).is_err());
        ["shims", "."].into_iter().for_each(make);
        std::fs::write(root.path().join("cgroup.controllers"), "").unwrap();
        join(root.path(), "shims", 8).unwrap();
        assert_eq!((holds("shims"), holds("cpu/shims")), ("8".into(), "7".into()));
    }
}
