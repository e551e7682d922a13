//! The cgroup that a client wants the shim itself to join: an option of containerd's runc runtime, which
//! clients send to any runtime (`WithShimCgroup`).

use std::path::{Component, Path};

use thaw_protocol::shim::runc_options::Options;
use thaw_protocol::shim::{Any, Message};

use crate::any::kind;
use crate::error::{Error, Result, WithContext};

/// Mount point of the host's cgroups.
pub const ROOT: &str = "/sys/fs/cgroup";
/// The message name of runc's options.
pub const OPTIONS: &str = "containerd.runc.v1.Options";

/// The cgroup that the options name, if any.
pub fn requested(options: &Any) -> Option<String> {
    let options = (kind(options) == OPTIONS).then(|| Options::parse_from_bytes(&options.value).ok())??;
    Some(options.shim_cgroup).filter(|path| !path.is_empty())
}

/// Moves process `pid` into the cgroup at `path` below `root`: on cgroup v1 in every hierarchy that has it.
///
/// # Errors
/// No such cgroup exists, or the process cannot join it.
pub fn join(root: &Path, path: &str, pid: u32) -> Result<()> {
    let below = Path::new(path.trim_start_matches('/'));
    let is_plain = below
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if !is_plain {
        return Err(Error::Invalid(format!(
            "{path:?} is not a valid path for the shim's cgroup"
        )));
    }
    let hierarchies = match root.join("cgroup.controllers").exists() {
        true => vec![root.to_owned()],
        false => {
            let entries = std::fs::read_dir(root).with_context(|| format!("read {}", root.display()))?;
            entries.flatten().map(|entry| entry.path()).collect()
        }
    };
    let mut joined = false;
    for hierarchy in hierarchies {
        let processes = hierarchy.join(below).join("cgroup.procs");
        if processes.exists() {
            std::fs::write(&processes, pid.to_string())
                .with_context(|| format!("join {}", processes.display()))?;
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
        assert_eq!(requested(&options(OPTIONS, "/a/b")).as_deref(), Some("/a/b"));
        assert_eq!(requested(&options(OPTIONS, "")), None);
        assert_eq!(requested(&options("runtimeoptions.v1.Options", "/a")), None);
        let mut broken = options(OPTIONS, "/a/b");
        broken.value = vec![0xff];
        assert_eq!(requested(&broken), None);
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
