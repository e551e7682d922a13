//! The node's disk budget: how much disk its sandboxes and snapshots may use. A request that exceeds it fails before anything is made.
//!
//! A sparse disk can grow to its full size, so it counts with that size from the start. A sandbox also counts the maximum size of its logs.
//! A snapshot counts with its maximum size while it is written and with its real size afterwards. Invariant: the sum never exceeds the
//! limit, except by sandboxes from before the limit was set, which are adopted and not refused, by the snapshots that adopted ones need, and by the
//! disks of removed snapshots over which sandboxes have layers.
//!
//! The sum is in memory. The owner of a snapshot removes it without telling thawd, so thawd looks for removed snapshots when it
//! would refuse a request and when metrics are read, but not when a creation fits. The list of snapshots is in a file under the
//! data directory, for the next thawd.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::{fs, io};

use serde::{Deserialize, Serialize};
use thaw_pools::disk::Disk;
use thaw_sys::lock::Lock;

use crate::blocking::blocking;
use crate::config::{DiskConfig, DiskLimit, Size};
use crate::error::{Error, ErrorKind};

/// Maximum size in bytes of one sandbox's logs and its container's kept output.
const LOGS: u64 = 4 << 20;
/// The list of snapshots, under the data directory.
const LIST: &str = "snapshots-made.json";
/// Version of that list.
const VERSION: u32 = 1;

/// What a part of the budget is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Sandbox,
    Snapshot,
}

impl Use {
    fn noun(self) -> &'static str {
        match self {
            Use::Sandbox => "a sandbox",
            Use::Snapshot => "a snapshot",
        }
    }
}

/// The budget of one node.
#[derive(Debug, Default)]
pub struct Budget {
    /// Bytes. `None`: unlimited.
    limit: Option<u64>,
    /// Path of the list. `None` for a process without a successor.
    list: Option<PathBuf>,
    taken: Mutex<Taken>,
    /// Held while the list is written.
    writing: Mutex<()>,
    refused_sandboxes: AtomicU64,
    refused_snapshots: AtomicU64,
}

#[derive(Debug, Default)]
struct Taken {
    /// Bytes of sandboxes.
    sandboxes: u64,
    /// Bytes of snapshots being written.
    writing: u64,
    /// Bytes of complete snapshots, by path.
    written: BTreeMap<PathBuf, u64>,
}

impl Taken {
    fn snapshots(&self) -> u64 {
        self.written
            .values()
            .fold(self.writing, |sum, bytes| sum.saturating_add(*bytes))
    }

    fn of(&mut self, what: Use) -> &mut u64 {
        match what {
            Use::Sandbox => &mut self.sandboxes,
            Use::Snapshot => &mut self.writing,
        }
    }
}

/// Usage and counters of the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetStatistics {
    /// Bytes; `None` without a limit.
    pub limit: Option<u64>,
    /// Bytes.
    pub sandboxes: u64,
    pub snapshots: u64,
    /// How many requests were refused.
    pub refused_sandboxes: u64,
    pub refused_snapshots: u64,
}

/// Part of a budget, given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
    budget: Arc<Budget>,
    what: Use,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.budget.taken();
        let of = taken.of(self.what);
        *of = of.saturating_sub(self.bytes);
    }
}

/// The list, as it is in its file.
#[derive(Serialize, Deserialize)]
struct List {
    version: u32,
    /// Bytes, by path.
    snapshots: BTreeMap<PathBuf, u64>,
}

impl Budget {
    /// Opens the budget that the configuration sets for `data`. Counts the snapshots on the list there that still exist.
    ///
    /// # Errors
    /// [`ErrorKind::Runtime`] if the size of the file system cannot be determined, or the list cannot be read.
    pub fn open(config: &DiskConfig, data: &Path) -> Result<Budget, Error> {
        let limit = match config.limit {
            None => None,
            Some(DiskLimit::Bytes(Size(bytes))) => Some(bytes),
            Some(DiskLimit::Percent(percent)) => Some(percent_of(data, percent)?),
        };
        let list = data.join(LIST);
        let written = read_list(&list)?;
        let is_new = !list.exists();
        let budget = Budget {
            limit,
            list: Some(list),
            taken: Mutex::new(Taken {
                written,
                ..Taken::default()
            }),
            ..Budget::default()
        };
        match is_new {
            true => budget.write_list(),
            false => budget.forget_removed(),
        }
        Ok(budget)
    }

    /// Reserves the maximum size of a sandbox with a disk of this size.
    ///
    /// # Errors
    /// [`ErrorKind::DiskBudget`] with the limit, the bytes in use and the bytes asked for.
    pub(super) async fn sandbox(self: &Arc<Budget>, disk_bytes: u64) -> Result<Share, Error> {
        self.take(Use::Sandbox, disk_bytes.saturating_add(LOGS)).await
    }

    /// Counts an existing sandbox, also above the limit.
    pub(super) fn adopt(self: &Arc<Budget>, disk_bytes: u64) -> Share {
        let bytes = disk_bytes.saturating_add(LOGS);
        let mut taken = self.taken();
        taken.sandboxes = taken.sandboxes.saturating_add(bytes);
        self.share(Use::Sandbox, bytes)
    }

    /// Reserves the maximum size of a snapshot of this memory and disk.
    ///
    /// # Errors
    /// Those of [`Budget::sandbox`].
    pub(super) async fn snapshot(self: &Arc<Budget>, memory_mib: u32, disk: &Disk) -> Result<Share, Error> {
        self.take(Use::Snapshot, largest_snapshot(memory_mib, disk)?)
            .await
    }

    /// Reserves this many bytes for a snapshot from another node.
    ///
    /// # Errors
    /// Those of [`Budget::sandbox`].
    pub(super) async fn copied_snapshot(self: &Arc<Budget>, bytes: u64) -> Result<Share, Error> {
        self.take(Use::Snapshot, bytes).await
    }

    /// Counts a snapshot that a running sandbox needs, also above the limit.
    pub(super) fn adopt_snapshot(self: &Arc<Budget>, bytes: u64) -> Share {
        let mut taken = self.taken();
        taken.writing = taken.writing.saturating_add(bytes);
        self.share(Use::Snapshot, bytes)
    }

    /// Counts a complete snapshot with its real size, instead of its maximum size. Blocks: it writes the list.
    pub(super) fn written(&self, share: Share, place: &Path) {
        let bytes = directory_bytes(place).unwrap_or(share.bytes);
        {
            let mut taken = self.taken();
            taken.written.insert(place.to_owned(), bytes);
        }
        drop(share);
        self.write_list();
    }

    /// Usage and counters. Checks first which snapshots still exist.
    pub fn statistics(&self) -> BudgetStatistics {
        self.forget_removed();
        let taken = self.taken();
        BudgetStatistics {
            limit: self.limit,
            sandboxes: taken.sandboxes,
            snapshots: taken.snapshots(),
            refused_sandboxes: self.refused_sandboxes.load(Ordering::Relaxed),
            refused_snapshots: self.refused_snapshots.load(Ordering::Relaxed),
        }
    }

    async fn take(self: &Arc<Budget>, what: Use, bytes: u64) -> Result<Share, Error> {
        if self.fits(what, bytes).is_ok() {
            return Ok(self.share(what, bytes));
        }
        let budget = self.clone();
        blocking(move || {
            budget.forget_removed();
            Ok(())
        })
        .await?;
        let (limit, used) = match self.fits(what, bytes) {
            Ok(()) => return Ok(self.share(what, bytes)),
            Err(full) => full,
        };
        let refused = match what {
            Use::Sandbox => &self.refused_sandboxes,
            Use::Snapshot => &self.refused_snapshots,
        };
        refused.fetch_add(1, Ordering::Relaxed);
        let what = format!(
            "the disk budget has no room for {}: its limit is {limit} bytes, {used} are used, {bytes} are asked for",
            what.noun()
        );
        Err(Error::new(ErrorKind::DiskBudget, what))
    }

    /// Counts the bytes if they fit. Otherwise returns the limit and the bytes in use.
    fn fits(&self, what: Use, bytes: u64) -> Result<(), (u64, u64)> {
        let mut taken = self.taken();
        let used = taken.sandboxes.saturating_add(taken.snapshots());
        match self.limit {
            Some(limit) if used.saturating_add(bytes) > limit => Err((limit, used)),
            _ => {
                let of = taken.of(what);
                *of = of.saturating_add(bytes);
                Ok(())
            }
        }
    }

    fn share(self: &Arc<Budget>, what: Use, bytes: u64) -> Share {
        Share {
            budget: self.clone(),
            what,
            bytes,
        }
    }

    /// Stops counting snapshots that no longer exist.
    fn forget_removed(&self) {
        let places: Vec<PathBuf> = self.taken().written.keys().cloned().collect();
        let gone =
            |place: &PathBuf| fs::symlink_metadata(place).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        let gone: Vec<PathBuf> = places.into_iter().filter(gone).collect();
        if gone.is_empty() {
            return;
        }
        {
            let mut taken = self.taken();
            taken.written.retain(|place, _| !gone.contains(place));
        }
        self.write_list();
    }

    /// Writes the list. A failure is logged and not returned: the next thawd then counts too little, but the request has succeeded.
    fn write_list(&self) {
        let Some(list) = &self.list else { return };
        let _one = self.writing.locked();
        let snapshots = self.taken().written.clone();
        let text = serde_json::to_vec(&List {
            version: VERSION,
            snapshots,
        });
        let partial = list.with_extension("partial");
        let written = text
            .map_err(io::Error::other)
            .and_then(|text| fs::write(&partial, text))
            .and_then(|()| fs::rename(&partial, list));
        if let Err(e) = written {
            tracing::warn!(
                "the next thawd will not count all snapshots: cannot write {}: {e}",
                list.display()
            );
        }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.locked()
    }
}

/// Most bytes of a snapshot of this memory and disk.
pub(super) fn largest_snapshot(memory_mib: u32, disk: &Disk) -> Result<u64, Error> {
    let files = std::iter::once(&disk.file).chain(&disk.base);
    files
        .map(allocated)
        .try_fold(u64::from(memory_mib) << 20, |sum, bytes| {
            let bytes = bytes.map_err(|e| Error::system("cannot look at a sandbox's disk", &e))?;
            Ok(sum.saturating_add(bytes))
        })
}

fn read_list(list: &Path) -> Result<BTreeMap<PathBuf, u64>, Error> {
    let wrong = |why: &dyn std::fmt::Display| {
        let what = format!("{} cannot be read: {why}", list.display());
        Error::new(ErrorKind::Runtime, what)
            .remedy("remove it: snapshots made so far then do not count in the disk budget")
    };
    let text = match fs::read(list) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        read => read.map_err(|e| wrong(&e))?,
    };
    let list: List = serde_json::from_slice(&text).map_err(|e| wrong(&e))?;
    match list.version {
        VERSION => Ok(list.snapshots),
        other => Err(wrong(&format!(
            "it is of version {other}, and this thawd reads {VERSION}"
        ))),
    }
}

fn percent_of(data: &Path, percent: u8) -> Result<u64, Error> {
    // The directory need not exist yet. Its nearest existing ancestor is on the same file system; if that is unusable, making the directory
    // fails later.
    let there = data
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"));
    let system = rustix::fs::statvfs(there)
        .map_err(|e| Error::system(format!("cannot tell the size of {}", data.display()), &e.into()))?;
    let bytes = u128::from(system.f_blocks) * u128::from(system.f_frsize);
    Ok(u64::try_from(bytes * u128::from(percent) / 100).unwrap_or(u64::MAX))
}

/// Bytes that a file occupies on its disk.
fn allocated(file: impl AsFd) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    Ok(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
}

/// Bytes that a snapshot's files occupy on their disk: some ten files, in a directory of directories one deep.
fn directory_bytes(place: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut sum = 0u64;
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        sum = sum.saturating_add(match metadata.is_dir() {
            true => directory_bytes(&entry.path())?,
            false => metadata.blocks().saturating_mul(512),
        });
    }
    Ok(sum)
}

#[cfg(test)]
#[path = "budget_test.rs"]
mod tests;
