//! `object.json`: what the node says of a stored snapshot beside its manifest.
//!
//! Invariant: the file is replaced by a rename, so a reader never sees a partial record. Whoever writes it holds the store's lock.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};
use thaw_records::RecordError;

use crate::tenant::Tenant;

/// Name of the record in the directory of a stored snapshot. A snapshot is listed only while it exists.
pub(super) const OBJECT: &str = "object.json";
/// Name of a record that is being written.
pub(super) const NEW: &str = "object.new";

/// The record of a stored snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    pub id: String,
    /// Unique among the snapshots of its tenant.
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// `None`: it belongs to the node.
    #[serde(default)]
    pub tenant: Option<Tenant>,
    /// The sandbox that was frozen.
    pub sandbox: String,
    /// The stored snapshot that this sandbox was thawed from.
    #[serde(default)]
    pub parent: Option<String>,
    /// Seconds since the Unix epoch.
    pub created: u64,
    /// When a sandbox was last thawed from it, or else when it was created, seconds since the Unix epoch.
    pub last_used: u64,
}

/// Identifies one version of a record's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    inode: u64,
    changed: (i64, i64),
}

impl Version {
    /// The version of the record in a directory. `None` if there is no record.
    pub(super) fn of(directory: &Path) -> Option<Version> {
        let metadata = fs::symlink_metadata(directory.join(OBJECT)).ok()?;
        Some(Version {
            inode: metadata.ino(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// Reads the record in a directory.
pub(super) fn read(directory: &Path) -> Result<Object, RecordError> {
    thaw_records::read(&directory.join(OBJECT))
}

/// Writes the record, durably.
pub(super) fn write(directory: &Path, object: &Object) -> io::Result<()> {
    let new = directory.join(NEW);
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    reach(Failpoint::ObjectMade);
    file.write_all(&thaw_records::encode(object)?)?;
    file.sync_all()?;
    reach(Failpoint::ObjectBegun);
    fs::rename(&new, directory.join(OBJECT))?;
    reach(Failpoint::ObjectWritten);
    File::open(directory)?.sync_all()
}

/// Seconds since the Unix epoch.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
