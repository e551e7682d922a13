//! Running sandboxes on disk: one directory per sandbox under the run directory.
//!
//! The owner of a sandbox holds a lock on its directory while it lives; the kernel releases the lock however the owner
//! ends. Invariants:
//!
//! - A directory whose lock is free has no living owner.
//! - Everything of a sandbox that outlives a process (a cgroup, sockets, an untethered VMM) is found from its directory, which is made
//!   before it and removed after it.
//! - The directory of all sandboxes is removed with the last of them, and only under its own lock, so it does not
//!   disappear between a lookup and the creation of another sandbox in it.
//! - A record that cannot be read ends nothing: a living VMM is found without it ([`unreadable`]), and its directory stays
//!   until an operator ends the sandbox.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::cgroup::Hierarchy;
use thaw_records::RecordError;

use crate::closest::closest;
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;

mod directory;
mod held_name;
mod host_disk;
mod names;
pub mod paused;
mod paused_copy;
mod pod_namespace;
mod provenance;
mod record;
mod recorded;
mod remote_memory;
mod spares;
mod terms;
mod thawd_lock;
mod unreadable;

pub use directory::{SandboxDirectory, owner_socket, vsock_socket};
use ended::end_is_noted;
pub use held_name::NameHeld;
pub use host_disk::HostDisk;
pub use paused::{Paused, PausedSandboxes};
pub use paused_copy::{Copied, Portable};
pub use pod_namespace::PodNamespace;
pub use provenance::{DiskLayers, FileIdentity, Provenance, ShownRecord};
pub use record::Record;
use record::read_record;
pub use remote_memory::{RemoteMemory, RemotePlace};
pub use terms::{Asked, Behalf, Ending, Terms, TimeLimit, Timeout};
pub use thawd_lock::ThawdLock;
pub use unreadable::Living;
use unreadable::Remains;

pub mod ended;

/// The control socket's name in a sandbox's directory.
const CONTROL_SOCKET: &str = "control.sock";
/// How long to wait until a child that a dead owner had started executes its program, and the pause between two checks.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
const LOCK_STEP: Duration = Duration::from_millis(5);
/// How long a VMM whose machine seems to have ended may take to end.
const OWN_END_LIMIT: Duration = Duration::from_secs(5);

/// A running sandbox whose record cannot be read.
#[derive(Debug)]
pub struct Unreadable {
    pub id: String,
    /// Why the record cannot be read.
    pub why: RecordError,
    pub living: Living,
}

/// The run directory.
#[derive(Clone, Debug)]
pub struct RunDirectory {
    sandboxes: PathBuf,
}

impl RunDirectory {
    /// Opens the run directory, and creates it for its owner alone if it is missing.
    pub fn open(run: &Path) -> Result<RunDirectory, Error> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(run)
            .map_err(|e| Error::system(format!("cannot create {}", run.display()), &e))?;
        reach(Failpoint::RunDirectoryMade);
        Ok(RunDirectory {
            sandboxes: run.join("sandboxes"),
        })
    }

    /// Makes the directory of a new sandbox and writes its record.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`] when a running sandbox of the same tenant has the record's name.
    pub fn create(&self, record: &Record) -> Result<SandboxDirectory, Error> {
        let path = self.sandboxes.join(&record.id);
        let fail = |e: io::Error| Error::system(format!("cannot create {}", path.display()), &e);
        let name = self.hold_name(record)?;
        // Held so that no cleaner finds a directory that its owner has not locked yet.
        let all = self.make_and_lock_all().map_err(fail)?;
        reach(Failpoint::DirectoriesLocked);
        name.write(&record.id).map_err(fail)?;
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(fail)?;
        reach(Failpoint::DirectoryMade);
        let opened = File::open(&path).map_err(fail)?;
        let lock = FileLock::take(opened, FlockOperation::NonBlockingLockExclusive);
        let lock = lock.map_err(|e| fail(e.into()))?;
        reach(Failpoint::DirectoryLocked);
        let mut directory = SandboxDirectory::locked(path.clone(), lock);
        let written = directory.write(record);
        // Unlocked before the directory can be dropped: that waits for this lock.
        drop(all);
        written?;
        directory.set_name(name.settle());
        Ok(directory)
    }

    /// The directory of all sandboxes is removed with its last sandbox, so it may have to be made more than once.
    fn make_and_lock_all(&self) -> io::Result<File> {
        loop {
            let made = fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&self.sandboxes);
            match made {
                // This also happens if the directory existed and was removed since.
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            match lock_all(&self.sandboxes) {
                Ok(all) => return Ok(all),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Every sandbox that has a record, oldest first.
    pub fn list(&self) -> Vec<Record> {
        let mut records: Vec<Record> = self
            .directories()
            .iter()
            .filter_map(|d| read_record(d).ok())
            .collect();
        records.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        records
    }

    /// Every sandbox whose VMM lives.
    pub fn running(&self) -> Vec<Record> {
        self.list()
            .into_iter()
            .filter(|r| r.vmm.is_some_and(|v| v.lives()))
            .collect()
    }

    /// Every running sandbox whose record cannot be read.
    pub fn unreadable(&self) -> Vec<Unreadable> {
        let unreadable = |path: PathBuf| {
            let why = read_record(&path).err()?;
            let living = match Living::of(&path) {
                Living::Nothing => return None,
                living => living,
            };
            let id = path.file_name()?.to_str()?.to_owned();
            Some(Unreadable { id, why, living })
        };
        self.directories().into_iter().filter_map(unreadable).collect()
    }

    /// The running sandbox with this id, name, or unambiguous prefix of an id. Only names of sandboxes without a tenant count,
    /// because two tenants may use the same name.
    pub fn find(&self, wanted: &str) -> Result<Record, Error> {
        let running = self.running();
        if let Some(exact) = running
            .iter()
            .find(|r| r.id == wanted || (r.terms.tenant.is_none() && r.name.as_deref() == Some(wanted)))
        {
            return Ok(exact.clone());
        }
        let mut begin = running
            .into_iter()
            .filter(|r| !wanted.is_empty() && r.id.starts_with(wanted));
        match (begin.next(), begin.next()) {
            (Some(one), None) => Ok(one),
            (Some(_), Some(_)) => Err(Error::new(
                ErrorKind::SandboxNotFound,
                format!("more than one sandbox begins with {wanted}"),
            )),
            (None, _) => {
                let what = format!("no running sandbox is {wanted}{}", self.closest_name(wanted));
                Err(Error::new(ErrorKind::SandboxNotFound, what))
            }
        }
    }

    /// The name of a running or ended sandbox that is closest to an unknown one, for errors.
    fn closest_name(&self, wanted: &str) -> String {
        let running = self.running().into_iter();
        let running = running
            .filter(|r| r.terms.tenant.is_none())
            .filter_map(|r| r.name);
        let ended = self.ended().into_iter();
        let ended = ended.filter(|s| s.tenant.is_none()).filter_map(|s| s.name);
        let names: Vec<String> = running.chain(ended).collect();
        closest(wanted, names.iter().map(String::as_str))
    }

    /// The id of a running sandbox that may have no owner. `wanted` is its id, an unambiguous prefix of it, or, if its record can be read,
    /// its name. [`RunDirectory::end`] checks whether it has an owner.
    pub fn find_unowned(&self, wanted: &str) -> Option<String> {
        let found = self.find(wanted).ok().map(|record| record.id);
        found.or_else(|| {
            let ids = self.unreadable().into_iter().map(|unreadable| unreadable.id);
            let mut begin = ids.filter(|id| !wanted.is_empty() && id.starts_with(wanted));
            begin.next().filter(|_| begin.next().is_none())
        })
    }

    /// The directory of a sandbox.
    pub fn directory(&self, id: &str) -> PathBuf {
        self.sandboxes.join(id)
    }

    /// Waits until the owner of a sandbox has removed it or died. Either releases the lock.
    pub fn wait_for_owner(&self, id: &str) -> Result<(), Error> {
        let path = self.directory(id);
        let waited = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened
                .and_then(|directory| Ok(FileLock::take(directory, FlockOperation::LockShared).map(drop)?)),
        };
        waited.map_err(|e| Error::system(format!("cannot wait until {} is gone", path.display()), &e))
    }

    /// Removes what dead owners left: VMMs that should have ended with them, cgroups, directories. Returns the number of sandboxes removed.
    /// A living untethered VMM whose end was not requested is left for thawd to [`adopt`](RunDirectory::adopt).
    pub fn clean(&self, cgroups: &Hierarchy) -> usize {
        self.note_failures(cgroups);
        let swept = cgroups.sweep();
        reach(Failpoint::CleanSwept);
        if swept > 0 {
            tracing::info!(swept, "removed cgroups dead owners had made");
        }
        self.spares()
            .clean_sandboxes(cgroups, lock_once_its_owner_is_gone, Found::of_spare);
        // Those that are still locked are waited for when thawd adopts the others.
        let cleaned = self.clean_sandboxes(cgroups, try_lock, Found::of);
        self.sweep_names();
        cleaned
    }

    fn clean_sandboxes(
        &self,
        cgroups: &Hierarchy,
        lock: fn(&Path) -> Option<FileLock>,
        look: fn(&Path) -> Found,
    ) -> usize {
        let Ok(all) = lock_all(&self.sandboxes) else {
            return 0;
        };
        let mut cleaned = 0;
        for path in self.directories() {
            let Some(_lock) = lock(&path) else { continue };
            match look(&path) {
                Found::Running(_) => {}
                Found::RunningUnreadable(why) => {
                    let id = path.file_name().unwrap_or_default().display();
                    tracing::error!(
                        "sandbox {id} runs on without an owner, for its record cannot be read: {why}; `thaw rm {id}` ends it"
                    );
                }
                Found::Left(left) => {
                    // Its VMM may have ended since `note_failures` looked.
                    self.note_failure_in(&path, cgroups);
                    cleaned += usize::from(self.remove(&path, left, cgroups));
                }
            }
        }
        remove_if_empty(&self.sandboxes, &all);
        cleaned
    }

    /// As [`end`](RunDirectory::end), for a sandbox whose machine seems to have ended by itself: its VMM gets some
    /// seconds to end, and the sandbox is then listed as failed. A VMM closes its connections some time before the kernel has ended its process.
    pub fn end_unless_failed(&self, id: &str, cgroups: &Hierarchy) -> bool {
        let vmm = read_record(&self.directory(id))
            .ok()
            .and_then(|record| record.vmm);
        if let Some(vmm) = vmm {
            vmm.await_end(OWN_END_LIMIT);
        }
        self.end(id, cgroups)
    }

    /// Ends a sandbox without an owner and removes its resources. Returns whether it existed and has ended.
    pub fn end(&self, id: &str, cgroups: &Hierarchy) -> bool {
        // `id` may be user input: accept a name, never a path.
        let named = |directory: &PathBuf| directory.file_name().is_some_and(|name| name == id);
        let Some(path) = self.directories().into_iter().find(named) else {
            return false;
        };
        let Some(_lock) = try_lock(&path) else {
            return false;
        };
        self.note_asked(&path, cgroups);
        let left = match read_record(&path) {
            Ok(record) => record.into(),
            Err(_) => {
                let remains = Remains::of(&path);
                if !Living::of(&path).end(&path) {
                    tracing::error!("sandbox {id} is not removed: its VMM does not end");
                    return false;
                }
                remains
            }
        };
        let removed = self.remove(&path, left, cgroups);
        if let Ok(all) = lock_all(&self.sandboxes) {
            remove_if_empty(&self.sandboxes, &all);
        }
        removed
    }

    /// Takes ownership of the living untethered sandboxes without an owner. A sandbox whose VMM ended since
    /// [`clean`](RunDirectory::clean) is removed.
    pub fn adopt(&self, cgroups: &Hierarchy) -> Vec<(Record, SandboxDirectory)> {
        let Ok(_all) = lock_all(&self.sandboxes) else {
            return Vec::new();
        };
        let mut adopted = Vec::new();
        for path in self.directories() {
            let Some(lock) = lock_once_its_owner_is_gone(&path) else {
                continue;
            };
            match Found::of(&path) {
                Found::Running(record) => {
                    let mut directory = SandboxDirectory::locked(path, lock);
                    directory.set_name(self.names().entry(&record));
                    adopted.push((*record, directory));
                }
                // `clean` has logged it.
                Found::RunningUnreadable(_) => {}
                Found::Left(left) => {
                    self.note_failure_in(&path, cgroups);
                    self.remove(&path, left, cgroups);
                }
            }
        }
        adopted
    }

    /// Removes the resources of a sandbox without an owner: VMM, devices in a pod's network, cgroup, directory, name. The caller holds its
    /// lock.
    fn remove(&self, path: &Path, left: Remains, cgroups: &Hierarchy) -> bool {
        if let Some(vmm) = left.vmm {
            vmm.kill();
        }
        // thaw-share ends with the VMM; this waits for its end.
        if let Some(share) = left.share {
            share.kill();
        }
        reach(Failpoint::CleanKilled);
        if let Some(namespace) = left.pod_network {
            namespace.leave();
        }
        if let Some(cgroup) = left.cgroup {
            cgroups.adopt(&cgroup).destroy();
        }
        reach(Failpoint::CleanCgroupRemoved);
        let id = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        tracing::info!(sandbox = id, "removed what a dead owner left");
        let removed = fs::remove_dir_all(path);
        reach(Failpoint::CleanDirectoryRemoved);
        match &removed {
            Err(e) => tracing::warn!("cannot remove {}: {e}", path.display()),
            Ok(()) => left.name.iter().for_each(|name| self.names().forget(name, id)),
        }
        removed.is_ok()
    }

    fn directories(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(&self.sandboxes) else {
            return Vec::new();
        };
        entries
            .filter_map(|e| e.ok())
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
            .map(|e| e.path())
            .collect()
    }
}

/// Locks the directory of all sandboxes. If the directory is replaced before it is locked, locks the new one.
fn lock_all(sandboxes: &Path) -> io::Result<File> {
    loop {
        let file = File::open(sandboxes)?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))?;
        let (locked, named) = (file.metadata()?, fs::metadata(sandboxes)?);
        if (locked.dev(), locked.ino()) == (named.dev(), named.ino()) {
            return Ok(file);
        }
    }
}

/// Removes the directory of all sandboxes if it is empty. The caller must hold its lock, so that no creation finds the directory missing.
fn remove_if_empty(sandboxes: &Path, _lock: &File) {
    let _ = fs::remove_dir(sandboxes);
    reach(Failpoint::DirectoriesRemoved);
}

/// Contents of a directory without an owner.
enum Found {
    /// A sandbox, for thawd to adopt.
    Running(Box<Record>),
    /// A running sandbox whose record cannot be read.
    RunningUnreadable(RecordError),
    Left(Remains),
}

impl Found {
    fn of(path: &Path) -> Found {
        match read_record(path) {
            Ok(record)
                if record.outlives_owner()
                    && !end_is_noted(path)
                    && record.vmm.is_some_and(|v| v.lives()) =>
            {
                Found::Running(Box::new(record))
            }
            Ok(record) => Found::Left(record.into()),
            Err(why) => match Living::of(path) {
                Living::Nothing => Found::Left(Remains::of(path)),
                Living::Vmm(_) | Living::Listening => Found::RunningUnreadable(why),
            },
        }
    }

    /// The same for a spare. Nothing of a user runs in it, so it is removed, whatever its record says.
    fn of_spare(path: &Path) -> Found {
        match read_record(path) {
            Ok(record) => Found::Left(record.into()),
            Err(why) => match Living::of(path).end(path) {
                true => Found::Left(Remains::of(path)),
                false => Found::RunningUnreadable(why),
            },
        }
    }
}

fn try_lock(path: &Path) -> Option<FileLock> {
    FileLock::take(File::open(path).ok()?, FlockOperation::NonBlockingLockExclusive).ok()
}

/// The lock of a sandbox or a spare, unless its owner lives. A child that a dead owner had started shares the lock until it executes its program.
fn lock_once_its_owner_is_gone(path: &Path) -> Option<FileLock> {
    let owner = || read_record(path).ok().and_then(|record| record.owner);
    let owner_lives = || owner().is_some_and(|owner| owner.lives());
    let lock = lock_while(path, || !owner_lives());
    if lock.is_none() && !owner_lives() {
        let place = path.display();
        tracing::warn!(
            "{place} is left alone: it is still locked, though no living process is known to own it"
        );
    }
    lock
}

/// Locks a directory. While another has the lock, waits as long as `waits` says so, for at most [`LOCK_LIMIT`].
fn lock_while(path: &Path, waits: impl Fn() -> bool) -> Option<FileLock> {
    let since = Instant::now();
    loop {
        let lock = try_lock(path);
        if lock.is_some() || since.elapsed() > LOCK_LIMIT || !waits() {
            return lock;
        }
        std::thread::sleep(LOCK_STEP);
    }
}

#[cfg(test)]
#[path = "state_test.rs"]
mod tests;
