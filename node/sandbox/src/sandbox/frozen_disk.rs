//! The disk in a snapshot: each sandbox thawed from the snapshot gets a disk of its own with that content.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::disk::{Disk, Disks};
use thaw_protocol::control::Backend;

use super::disk;
use super::pools::{Claimed, Pools};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::snapshot::Registered;

/// The writable layer's name in a snapshot.
pub(super) const DISK_ID: &str = "blk0";

/// The size in bytes of the disk that a sandbox was frozen with.
pub(super) fn size(registered: &Registered) -> Result<u64, Error> {
    let (file, base) = find(registered)?;
    let stat = rustix::fs::fstat(base.unwrap_or(file))
        .map_err(|e| Error::system("cannot look at a snapshot's disk", &e.into()))?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// The file of the disk that a sandbox was frozen with, and its base if the file is a layer.
fn find(registered: &Registered) -> Result<(&OwnedFd, Option<&OwnedFd>), Error> {
    let lacks = |what: &str| {
        let what = format!("the snapshot at {} has no {what}", registered.directory.display());
        Error::new(ErrorKind::SnapshotIncompatible, what)
    };
    let frozen = registered.disks.iter().find(|(id, _)| id == DISK_ID);
    let (_, file) = frozen.ok_or_else(|| lacks(&format!("disk {DISK_ID}")))?;
    let mut disks = registered.manifest.files.disks.iter();
    if !disks.any(|disk| disk.id == DISK_ID && disk.layer) {
        return Ok((file, None));
    }
    let base = registered.disk_bases.iter().find(|base| base.id == DISK_ID);
    let base = base.ok_or_else(|| lacks(&format!("base of disk {DISK_ID}")))?;
    Ok((file, Some(&base.file)))
}

/// A disk of that content, among the node's disks. `speaks` is the version of the control protocol of the VMM that gets it. Blocks.
pub(super) fn thawed(
    registered: &Registered,
    pools: &Arc<Pools>,
    speaks: u32,
) -> Result<Claimed<Disks>, Error> {
    let (file, base) = find(registered)?;
    let may_layer = speaks >= Backend::LayeredDisk.since();
    made(pools, |directory| match base {
        Some(base) => disk::thawed_layer(base, file, directory, may_layer),
        None => disk::thawed(file, directory, may_layer),
    })
}

/// Replaces a disk that has a base by a copy, if the VMM that gets it is of an earlier release, which knows no layers. `speaks` as above.
pub(super) async fn fit(disk: &mut Claimed<Disks>, pools: &Arc<Pools>, speaks: u32) -> Result<(), Error> {
    if disk.base.is_none() || speaks >= Backend::LayeredDisk.since() {
        return Ok(());
    }
    let (layered, pools) = (disk.try_clone(), pools.clone());
    let layered = layered.map_err(|e| Error::system("cannot copy a descriptor", &e))?;
    *disk = blocking(move || made(&pools, |directory| disk::whole(&layered, directory))).await?;
    Ok(())
}

fn made(pools: &Arc<Pools>, make: impl FnOnce(&Path) -> io::Result<Disk>) -> Result<Claimed<Disks>, Error> {
    let directory = &pools.disks.kind().directory;
    let made = make(directory);
    reach(Failpoint::ThawDiskCopied);
    made.map(|disk| Claimed::new(disk, pools, |p| &p.disks))
        .map_err(|e| Error::system(format!("cannot make a disk in {}", directory.display()), &e))
}
