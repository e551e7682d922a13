//! Opens a block device of the host for a VMM, which cannot open files itself.
//!
//! A specification names a device by its numbers, and by a path in the container that may not exist on the host. The kernel names the node
//! in `/dev` with these numbers. Invariant: the opened node is compared with the numbers before it is handed on, so another device is never
//! passed.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, major, minor};

/// Where the kernel lists block devices by number, and where their nodes are.
const NUMBERS: &str = "/sys/dev/block";
const NODES: &str = "/dev";

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// No driver has these numbers.
    #[error("this host has no block device {major}:{minor}")]
    Missing { major: u32, minor: u32 },
    /// The node cannot be opened.
    #[error("block device {major}:{minor}: cannot open {}: {error}", path.display())]
    Open {
        major: u32,
        minor: u32,
        path: PathBuf,
        error: io::Error,
    },
    /// The node's path has another file.
    #[error("block device {major}:{minor}: {} is another file: thawd needs the kernel's own nodes in /dev", path.display())]
    Another { major: u32, minor: u32, path: PathBuf },
}

/// Opens the block device with these numbers, for writing too unless `read_only`. May wait for the device.
///
/// # Errors
/// [`BlockError`]
pub fn open(major: u32, minor: u32, read_only: bool) -> Result<OwnedFd, BlockError> {
    open_below(Path::new(NUMBERS), Path::new(NODES), (major, minor), read_only)
}

fn open_below(
    numbers: &Path,
    nodes: &Path,
    (wanted_major, wanted_minor): (u32, u32),
    read_only: bool,
) -> Result<OwnedFd, BlockError> {
    let missing = BlockError::Missing {
        major: wanted_major,
        minor: wanted_minor,
    };
    let told = fs::read_to_string(numbers.join(format!("{wanted_major}:{wanted_minor}/uevent")));
    let Some(name) = told.ok().as_deref().and_then(node_of).map(str::to_owned) else {
        return Err(missing);
    };
    let path = nodes.join(name);
    let failed = |error: rustix::io::Errno| BlockError::Open {
        major: wanted_major,
        minor: wanted_minor,
        path: path.clone(),
        error: error.into(),
    };
    let another = || BlockError::Another {
        major: wanted_major,
        minor: wanted_minor,
        path: path.clone(),
    };
    let is_wanted = |found: &rustix::fs::Stat| {
        FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice
            && (major(found.st_rdev), minor(found.st_rdev)) == (wanted_major, wanted_minor)
    };
    // Checked before it is opened: opening some files has effects, and opening others blocks for ever.
    if !is_wanted(&rustix::fs::stat(&path).map_err(failed)?) {
        return Err(another());
    }
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let opened = rustix::fs::open(&path, access | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    match is_wanted(&rustix::fs::fstat(&opened).map_err(failed)?) {
        true => Ok(opened),
        false => Err(another()),
    }
}

/// The name of a device's node below `/dev`, from its uevent.
fn node_of(uevent: &str) -> Option<&str> {
    let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    name.split('/').all(plain).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_node_is_read_from_uevent_alone() {
        assert_eq!(
            node_of("MAJOR=7\nMINOR=0\nDEVNAME=loop0\nDEVTYPE=disk\n"),
            Some("loop0")
        );
        assert_eq!(node_of("DEVNAME=mapper/control\n"), Some("mapper/control"));
        for bad in [
            "",
            "DEVNAME=\n",
            "DEVNAME=/etc/shadow\n",
            "DEVNAME=../etc/shadow\n",
        ] {
            assert_eq!(node_of(bad), None, "{bad:?}");
        }
        let place = tempfile::tempdir().unwrap();
        let (numbers, nodes) = (place.path().join("sys"), place.path().join("dev"));
        fs::create_dir_all(numbers.join("7:0")).unwrap();
        fs::create_dir(&nodes).unwrap();
        let open = || open_below(&numbers, &nodes, (7, 0), true).unwrap_err();
        assert!(matches!(open(), BlockError::Missing { .. }));
        fs::write(numbers.join("7:0/uevent"), "DEVNAME=loop0\n").unwrap();
        assert!(matches!(open(), BlockError::Open { .. }));
        fs::write(nodes.join("loop0"), "a file").unwrap();
        assert!(matches!(open(), BlockError::Another { .. }));
        std::os::unix::fs::symlink("/dev/null", nodes.join("link")).unwrap();
        fs::write(numbers.join("7:0/uevent"), "DEVNAME=link\n").unwrap();
        assert!(matches!(open(), BlockError::Another { .. }));
    }
}
