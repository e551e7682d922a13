//! The disk in a snapshot: each sandbox thawed from the snapshot gets a copy.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::disk::{Disk, Disks};

use super::disk;
use super::pools::{Claimed, Pools};
use crate::error::{Error, ErrorKind};
use crate::snapshot::Registered;

/// The writable layer's name in a snapshot.
pub(super) const DISK_ID: &str = "blk0";

/// The disk that a sandbox was frozen with, and its size in bytes.
pub(super) fn find(registered: &Registered) -> Result<(&OwnedFd, u64), Error> {
    let frozen = registered.disks.iter().find(|(id, _)| id == DISK_ID);
    let (_, frozen) = frozen.ok_or_else(|| {
        let what = format!(
            "the snapshot at {} has no disk {DISK_ID}",
            registered.directory.display()
        );
        Error::new(ErrorKind::SnapshotIncompatible, what)
    })?;
    let stat = rustix::fs::fstat(frozen)
        .map_err(|e| Error::system("cannot look at a snapshot's disk", &e.into()))?;
    Ok((frozen, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// A copy of it, among the node's disks. Blocks.
pub(super) fn copied(registered: &Registered, pools: &Arc<Pools>) -> Result<Claimed<Disks>, Error> {
    let (frozen, _) = find(registered)?;
    let directory = &pools.disks.kind().directory;
    let copied = disk::nameless_copy(frozen, directory).and_then(Disk::of);
    reach(Failpoint::ThawDiskCopied);
    copied
        .map(|disk| Claimed::new(disk, pools, |p| &p.disks))
        .map_err(|e| Error::system(format!("cannot copy a disk into {}", directory.display()), &e))
}
