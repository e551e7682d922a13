//! Converts storages from messages, and answers calls about volumes.

use std::path::Path;

use rustix::mount::{MountFlags, mount_remount};
use thaw_protocol::agent::agent::Storage as Message;
use thaw_protocol::agent::csi::{VolumeStatsResponse, VolumeUsage, volume_usage::Unit};
use thaw_protocol::agent::types::FSGroupChangePolicy;

use crate::error::{Error, Result, WithContext};
use crate::mount_options::MountOptions;
use crate::storage::{Storage, check_guest_path};

/// Converts a storage from its message.
pub fn storage(m: &Message) -> Result<Storage> {
    let group = m.fs_group.as_ref().map(|g| {
        (
            g.group_id,
            g.group_change_policy.enum_value_or_default() == FSGroupChangePolicy::OnRootMismatch,
        )
    });
    Ok(Storage {
        driver: m.driver.clone(),
        driver_options: m.driver_options.clone(),
        source: m.source.clone(),
        kind: m.fstype.clone(),
        options: m.options.clone(),
        mount_point: m.mount_point.as_str().into(),
        group,
    })
}

/// Returns the bytes and inodes of the file system at `path`.
pub fn stats(path: &str) -> Result<VolumeStatsResponse> {
    check_guest_path(Path::new(path))?;
    let s = rustix::fs::statvfs(path).with_context(|| format!("statvfs {path}"))?;
    let usage = |unit: Unit, scale: u64, total: u64, free: u64, available: u64| VolumeUsage {
        available: available * scale,
        total: total * scale,
        used: total.saturating_sub(free) * scale,
        unit: unit.into(),
        ..Default::default()
    };
    Ok(VolumeStatsResponse {
        usage: vec![
            usage(Unit::BYTES, s.f_frsize, s.f_blocks, s.f_bfree, s.f_bavail),
            usage(Unit::INODES, 1, s.f_files, s.f_ffree, s.f_favail),
        ],
        ..Default::default()
    })
}

/// Applies new options, such as `size=`, to existing tmpfs mounts.
pub fn update_ephemeral(storages: &[Message]) -> Result<()> {
    for s in storages {
        if s.driver != "ephemeral" {
            return Err(Error::Invalid(format!(
                "storage at {}: {:?} is not ephemeral",
                s.mount_point, s.driver
            )));
        }
        check_guest_path(Path::new(&s.mount_point))?;
        let options = MountOptions::parse(s.options.iter().map(String::as_str))?;
        let data = std::ffi::CString::new(options.data.join(","))
            .map_err(|_| Error::Invalid("mount data has a NUL in it".into()))?;
        mount_remount(
            s.mount_point.as_str(),
            options.flags | MountFlags::empty(),
            data.as_c_str(),
        )
        .with_context(|| format!("remount {}", s.mount_point))?;
    }
    Ok(())
}
