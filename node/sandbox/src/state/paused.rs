//! Sandboxes that are paused with their memory released: `THAW_DATA/paused/<id>`. They have no machine, and outlive thawd and a boot.
//!
//! | in it | what |
//! |---|---|
//! | `snapshot/` | the frozen sandbox |
//! | `record.json` | its record, as it was when it was frozen |
//! | `output`, `life.json` and others ([`KEPT`]) | what its owner kept of its container |
//! | `copy.json` ([`paused_copy`](super::paused_copy)) | where a registry has a copy of it |
//!
//! Invariants: a sandbox is paused exactly while its record exists here, which is written last and removed first. Who makes such a
//! directory holds a lock on it; what has no record and no lock is removed by the next thawd. If the run directory has a sandbox of the
//! same id, its VMM tells which of the two is the later: the one that was frozen is here ([`Paused::froze`]). Its name has an entry
//! in `THAW_DATA/paused-names` ([`names`](super::names)).

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};

use super::names::{self, Claim, Claimed, Names};
use super::{Record, TimeLimit, Timeout, try_lock};
use crate::admission::Place;
use crate::container::{LIFE_FILE, READINESS_FILE, REQUEST_FILE};
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;
use crate::id::is_id;
use crate::journal;
use crate::snapshot::directory::base_of;
use crate::snapshot::{Hash, Stamps};

/// Under the data directory, on the same file system as the disks, so that they can be cloned.
const PAUSED: &str = "paused";
/// The directory of entries of their names, beside it.
const NAMES: &str = "paused-names";
const SNAPSHOT: &str = "snapshot";
/// From a sandbox's snapshot to the data directory.
const TO_DATA: &str = "../../..";
const RECORD: &str = "record.json";
const NEW: &str = "record.new";
/// The answer to the creation with an idempotency key.
const ANSWER_FILE: &str = "answer.json";

/// Files of a sandbox's directory that it has again when it is resumed.
pub(super) const KEPT: [&str; 6] = [
    journal::FILE,
    journal::FILE_BEFORE,
    LIFE_FILE,
    READINESS_FILE,
    REQUEST_FILE,
    ANSWER_FILE,
];

/// The directory of all paused sandboxes.
#[derive(Clone, Debug)]
pub struct PausedSandboxes {
    root: PathBuf,
}

/// A place for a sandbox that is being frozen. Dropped before [`Draft::finish`], it is removed.
#[derive(Debug)]
pub struct Draft {
    entry: PathBuf,
    _lock: FileLock,
    finished: bool,
}

/// A paused sandbox.
#[derive(Clone, Debug)]
pub struct Paused {
    entry: PathBuf,
    record: Record,
    /// What it counts with; `None` in a process without limits.
    place: Option<Arc<Place>>,
}

/// The file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PausedRecord {
    pub sandbox: Record,
    /// When its time is over, seconds since the Unix epoch: the clock of [`Timeout`] begins anew with each boot.
    #[serde(default)]
    pub ends_at: Option<u64>,
}

impl PausedRecord {
    /// The record, with the time limit as this process counts it.
    pub fn into_record(self) -> Record {
        let PausedRecord { mut sandbox, ends_at } = self;
        let ending = |(timeout, at): (Timeout, u64)| Timeout::ending_at(timeout.seconds, at);
        sandbox.terms.timeout = sandbox.terms.timeout.zip(ends_at).map(ending);
        sandbox
    }
}

impl PausedSandboxes {
    /// Those under a data directory, whether there are any or not.
    pub fn under(data: &Path) -> PausedSandboxes {
        PausedSandboxes {
            root: data.join(PAUSED),
        }
    }

    /// Whether a snapshot is one of a paused sandbox.
    pub fn holds(&self, snapshot: &Path) -> bool {
        let snapshot = fs::canonicalize(snapshot).unwrap_or_else(|_| snapshot.to_owned());
        fs::canonicalize(&self.root).is_ok_and(|root| snapshot.starts_with(root))
    }

    /// The id of a sandbox whose snapshot, with a record or about to have one, lies on the snapshot whose manifest has this hash. Blocks.
    pub fn over(&self, base: Hash) -> Option<String> {
        let lies_on_it = |entry: &PathBuf| match base_of(&entry.join(SNAPSHOT)) {
            Ok(under) => under == Some(base),
            // Otherwise perhaps it does.
            Err(e) => !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        };
        let entry = self.entries().find(lies_on_it)?;
        Some(entry.file_name()?.to_str()?.to_owned())
    }

    /// What the manifest of a sandbox's snapshot says of its base at this canonical path. Relative if both are below one data directory, so that
    /// this may be moved.
    pub fn place_of(&self, base: &Path) -> PathBuf {
        let root = fs::canonicalize(&self.root).ok();
        let data = root.as_deref().and_then(Path::parent);
        match data.and_then(|data| base.strip_prefix(data).ok()) {
            Some(below) => Path::new(TO_DATA).join(below),
            None => base.to_owned(),
        }
    }

    /// Makes the place for a sandbox, instead of what a failed removal left there. Blocks.
    pub fn begin(&self, id: &str) -> Result<Draft, Error> {
        let entry = self.root.join(id);
        match fs::remove_dir_all(&entry) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::system(format!("cannot remove {}", entry.display()), &e))
            }
            _ => self.begin_absent(id),
        }
    }

    /// Makes the place for a sandbox that has none here. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`]: it has one, of a paused sandbox or of one that is being paused or taken over.
    pub fn begin_absent(&self, id: &str) -> Result<Draft, Error> {
        let entry = self.root.join(id);
        let make = || -> io::Result<FileLock> {
            let mut directory = fs::DirBuilder::new();
            directory.mode(0o700).recursive(true).create(&self.root)?;
            directory.recursive(false).create(&entry)?;
            lock(&entry)
        };
        let lock = make().map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => here_already(id),
            _ => Error::system(format!("cannot create {}", entry.display()), &e),
        })?;
        reach(Failpoint::PausedPlaced);
        Ok(Draft {
            entry,
            _lock: lock,
            finished: false,
        })
    }

    /// All of them, oldest first. Logs those whose record cannot be read. Blocks.
    pub fn list(&self) -> Vec<Paused> {
        let mut all: Vec<Paused> = self.entries().filter_map(read).collect();
        all.sort_by(|a, b| (a.record.created, &a.record.id).cmp(&(b.record.created, &b.record.id)));
        all
    }

    /// The one with this id, name, or unambiguous beginning of an id. Only names of sandboxes without a tenant count, as in
    /// [`RunDirectory::find`](super::RunDirectory::find). Blocks.
    pub fn find(&self, wanted: &str) -> Option<Paused> {
        let all = self.list();
        let is_called = |r: &Record| r.terms.tenant.is_none() && r.name.as_deref() == Some(wanted);
        let exact = all.iter().find(|p| p.record.id == wanted || is_called(&p.record));
        let mut begin = all
            .iter()
            .filter(|p| !wanted.is_empty() && p.record.id.starts_with(wanted));
        let one = || begin.next().filter(|_| begin.next().is_none());
        exact.or_else(one).cloned()
    }

    /// Fails if another paused sandbox of the same tenant has the record's name. The caller holds the name among running sandboxes, so that
    /// none of that name is paused or resumed meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`].
    pub fn refuse_used_name(&self, record: &Record) -> Result<(), Error> {
        let Some(name) = &record.name else { return Ok(()) };
        let holder = self.names().holder(record);
        let holder = holder.map_err(|e| Error::system("cannot read who has a name", &e))?;
        let is_id_of_one = is_id(name).then(|| name.clone());
        let is_another = |id: &String| *id != record.id && has_record(&self.root.join(id));
        match holder.into_iter().chain(is_id_of_one).find(is_another) {
            Some(id) => {
                let what = format!("the paused sandbox {id} has the name {name}");
                Err(Error::new(ErrorKind::NameInUse, what).remedy("choose another --name, or `thaw rm` it"))
            }
            None => Ok(()),
        }
    }

    /// Writes the entries of names of sandboxes that an earlier release paused, which wrote none. Blocks.
    pub fn index_names(&self, all: &[Paused]) {
        let names = self.names();
        for Paused { record, .. } in all {
            if let Err(e) = names.add(record, |id| has_record(&self.root.join(id))) {
                tracing::warn!("the name of sandbox {} can be taken again: {e}", record.id);
            }
        }
    }

    /// Removes what dead processes left: directories without a record, records that were not finished, and names of neither. Blocks.
    pub fn sweep(&self, stamps: &Stamps) {
        for entry in self.entries() {
            let _ = fs::remove_file(entry.join(NEW));
            if entry.join(RECORD).exists() || try_lock(&entry).is_none() {
                continue;
            }
            match empty(&entry, stamps) {
                Ok(()) => {
                    reach(Failpoint::PausedSwept);
                    tracing::info!("removed {}, which a dead process left", entry.display());
                }
                Err(e) => tracing::warn!("cannot remove {}: {e}", entry.display()),
            }
        }
        self.names().sweep(|id| has_record(&self.root.join(id)));
    }

    fn names(&self) -> Names {
        names_beside(&self.root)
    }

    fn entries(&self) -> impl Iterator<Item = PathBuf> + use<> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let is_one = |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(is_id);
        entries.filter(is_one).map(|entry| entry.path())
    }
}

impl Draft {
    /// Where to freeze the sandbox to. Nothing exists there yet.
    pub fn snapshot(&self) -> PathBuf {
        self.entry.join(SNAPSHOT)
    }

    /// Where what is kept of its container belongs.
    pub fn directory(&self) -> &Path {
        &self.entry
    }

    /// The snapshot is complete: copies what is kept from the sandbox's directory, and writes the record. From then on the sandbox is
    /// paused. Blocks.
    pub fn finish(self, record: Record, directory: &Path) -> Result<Paused, Error> {
        let copied = copy(directory, &self.entry);
        copied.map_err(|e| Error::system(format!("cannot write into {}", self.entry.display()), &e))?;
        self.finish_filled(record)
    }

    /// The same, if what is kept of its container is there already. Blocks.
    pub fn finish_filled(mut self, record: Record) -> Result<Paused, Error> {
        let paused = Paused {
            entry: self.entry.clone(),
            record,
            place: None,
        };
        let fail = |e: io::Error| Error::system(format!("cannot write into {}", paused.entry.display()), &e);
        let name = paused.claim_name().map_err(fail)?;
        paused.note_time_limit(paused.record.terms.time_limit())?;
        drop(name.map(Claim::settle));
        self.finished = true;
        reach(Failpoint::PausedWritten);
        Ok(paused)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished
            && let Err(e) = fs::remove_dir_all(&self.entry)
        {
            tracing::warn!("cannot remove {}: {e}", self.entry.display());
        }
    }
}

impl Paused {
    /// Its record, as it was when it was frozen.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The same, which counts with this place until its last clone is dropped.
    pub fn holding(self, place: Option<Arc<Place>>) -> Paused {
        Paused { place, ..self }
    }

    /// What it counts with.
    pub fn place(&self) -> Option<&Place> {
        self.place.as_deref()
    }

    /// Its snapshot.
    pub fn snapshot(&self) -> PathBuf {
        self.entry.join(SNAPSHOT)
    }

    /// The directory with what is kept of its container.
    pub fn directory(&self) -> &Path {
        &self.entry
    }

    /// The file with the output of its container ([`Journal::kept`](journal::Journal::kept)).
    pub fn output(&self) -> PathBuf {
        self.entry.join(journal::FILE)
    }

    /// Whether it was made from this sandbox of the run directory, and not that from it.
    pub fn froze(&self, running: &Record) -> bool {
        self.record.vmm == running.vmm
    }

    /// Copies what is kept of its container into the directory of the sandbox that continues it. Blocks.
    pub fn restore(&self, directory: &Path) -> Result<(), Error> {
        let restored = copy(&self.entry, directory);
        restored.map_err(|e| Error::system(format!("cannot copy files to {}", directory.display()), &e))
    }

    /// Records how long it may run. Blocks.
    pub fn note_time_limit(&self, limit: TimeLimit) -> Result<(), Error> {
        let written = self.write(limit);
        written.map_err(|e| Error::system(format!("cannot write into {}", self.entry.display()), &e))
    }

    /// Its name's entry, if it has a name. Its own sandbox in the run directory has the name too, so that no other has it.
    fn claim_name(&self) -> io::Result<Option<Claim>> {
        let Some(entry) = self.names().entry(&self.record) else {
            return Ok(None);
        };
        let is_another = |id: &str| id != self.record.id && has_record(&self.entry.with_file_name(id));
        match self.names().claim(entry, is_another)? {
            Claimed::Free(claim) => {
                claim.write(&self.record.id)?;
                reach(Failpoint::PausedNamed);
                Ok(Some(claim))
            }
            Claimed::Used(id) => {
                tracing::error!(
                    "the paused sandboxes {id} and {} have the same name",
                    self.record.id
                );
                Ok(None)
            }
        }
    }

    fn names(&self) -> Names {
        names_beside(self.entry.parent().unwrap_or(&self.entry))
    }

    /// Removes it, the record first and its name last. Blocks.
    pub fn remove(&self, stamps: &Stamps) -> Result<(), Error> {
        let remove = || -> io::Result<()> {
            let _lock = lock(&self.entry)?;
            fs::remove_file(self.entry.join(RECORD))?;
            reach(Failpoint::PausedForgotten);
            empty(&self.entry, stamps)?;
            if let Some(name) = self.names().entry(&self.record) {
                names::forget(&name, &self.record.id);
                reach(Failpoint::PausedNameForgotten);
            }
            Ok(())
        };
        match remove() {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::system(
                format!("cannot remove {}", self.entry.display()),
                &e,
            )),
            _ => Ok(()),
        }
    }

    /// Its record on disk.
    pub(super) fn paused_record(&self, limit: TimeLimit) -> PausedRecord {
        PausedRecord {
            sandbox: Record {
                terms: self.record.terms.clone().within(limit),
                ..self.record.clone()
            },
            ends_at: limit.ends_at(),
        }
    }

    /// Writes its record, durably, completely or not at all.
    fn write(&self, limit: TimeLimit) -> io::Result<()> {
        let record = self.paused_record(limit);
        let mut file = create(&self.entry.join(NEW))?;
        file.write_all(&thaw_records::encode(&record)?)?;
        file.sync_all()?;
        reach(Failpoint::PausedBegun);
        fs::rename(self.entry.join(NEW), self.entry.join(RECORD))?;
        File::open(&self.entry)?.sync_all()
    }
}

fn read(entry: PathBuf) -> Option<Paused> {
    let path = entry.join(RECORD);
    let record = match thaw_records::read::<PausedRecord>(&path) {
        Ok(record) => record,
        Err(thaw_records::RecordError::Missing) => return None,
        Err(e) => {
            tracing::error!("{} cannot be read: {e}", path.display());
            return None;
        }
    };
    Some(Paused {
        entry,
        record: record.into_record(),
        place: None,
    })
}

/// The names of the paused sandboxes in a directory.
fn names_beside(root: &Path) -> Names {
    Names::in_directory(root.with_file_name(NAMES))
}

/// Whether a sandbox is paused in this directory.
fn has_record(entry: &Path) -> bool {
    entry.join(RECORD).exists()
}

/// Copies the files that are kept, those that exist.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    for name in KEPT {
        let mut source = match File::open(from.join(name)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        let mut target = create(&to.join(name))?;
        io::copy(&mut source, &mut target)?;
    }
    Ok(())
}

/// A new or empty file, readable by its owner alone.
pub(super) fn create(path: &Path) -> io::Result<File> {
    File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

/// The error for a sandbox that this node has already.
pub(crate) fn here_already(id: &str) -> Error {
    let what = format!("this node has sandbox {id} already, or is taking it over");
    Error::new(ErrorKind::NameInUse, what).remedy("ask again in a moment")
}

/// Removes a directory that has no record. The caller holds its lock.
fn empty(entry: &Path, stamps: &Stamps) -> io::Result<()> {
    if let Ok(place) = fs::canonicalize(entry.join(SNAPSHOT)) {
        stamps.forget(&place);
    }
    fs::remove_dir_all(entry)?;
    reach(Failpoint::PausedRemoved);
    Ok(())
}

fn lock(directory: &Path) -> io::Result<FileLock> {
    Ok(FileLock::take(
        File::open(directory)?,
        FlockOperation::LockExclusive,
    )?)
}

#[cfg(test)]
#[path = "paused_test.rs"]
mod tests;
