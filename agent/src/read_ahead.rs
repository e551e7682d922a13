//! How far the guest's kernel reads ahead in the files of a mounted file system (Documentation/ABI/testing/sysfs-class-bdi).
//!
//! FUSE starts with the kernel's 128 KiB, and its server can only lower that. So the limit is raised after the mount.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use thaw_protocol::agent::layout::READ_AHEAD;

use crate::error::{Error, Result, WithContext};

/// The kernel's directory of backing devices, with a subdirectory for that of each file system: `0:45`.
const BACKING_DEVICES: &str = "/sys/class/bdi";

/// The limit that a storage's driver options ask for, in KiB.
pub fn of_options(driver_options: &[String]) -> Result<Option<u32>> {
    let mut given = driver_options.iter().filter_map(|option| option.split_once('='));
    let Some((_, kib)) = given.find(|(name, _)| *name == READ_AHEAD) else {
        return Ok(None);
    };
    let parsed = kib.parse().map_err(|_| {
        Error::Invalid(format!(
            "driver option {READ_AHEAD}={kib}: give a number of KiB, such as 1024"
        ))
    });
    parsed.map(Some)
}

/// Lets the kernel read ahead up to `kib` KiB in each file of the file system at `mount_point`.
pub fn set(mount_point: &Path, kib: u32) -> Result<()> {
    // FUSE answers this after INIT, whose answer would lower a limit that was set before it.
    let device = fs::metadata(mount_point)
        .with_context(|| format!("stat {}", mount_point.display()))?
        .dev();
    set_of(Path::new(BACKING_DEVICES), device, kib)
}

fn set_of(backing_devices: &Path, device: u64, kib: u32) -> Result<()> {
    let name = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let limit = backing_devices.join(name).join("read_ahead_kb");
    fs::write(&limit, kib.to_string()).with_context(|| format!("write {kib} to {}", limit.display()))
}

#[cfg(test)]
#[path = "read_ahead_test.rs"]
mod tests;
