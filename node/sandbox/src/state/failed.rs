//! Records of failed sandboxes: one file each, `failed/ID.json` beside the directory of all sandboxes.
//!
//! Invariants: a sandbox's file is written before anything of the sandbox is removed, so a `kill -9` never loses a failure. A sandbox whose
//! end was requested is marked before its VMM is ended ([`SandboxDirectory::note_end`]), so its remains do not count as a failure. The
//! number and the age of the files are limited ([`Retention`]). [`MOST_FAILED`](crate::config::MOST_FAILED) limits their number whatever
//! the configuration says. The directory is removed with its last file, under its lock.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::{FAILED, Readiness, Sandbox, SandboxFailure};

use super::{Record, RunDirectory, SandboxDirectory, lock_all, read_record, remove_if_empty, try_lock};
use crate::config::SandboxConfig;
use crate::container::ready;
use crate::error::{Error, ErrorKind};
use crate::failure::Evidence;

/// File in a sandbox's directory that notes that its end was requested.
const ENDING: &str = "ending";
/// Version of the file format. A file of another version is not read, and is removed when it expires.
const VERSION: u32 = 1;
/// Number of console lines in the log entry of a failure.
const LOGGED_LINES: usize = 10;

/// How long failed sandboxes stay listed, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    pub seconds: u64,
    pub most: usize,
}

impl Retention {
    /// The configured retention.
    pub fn of(config: &SandboxConfig) -> Retention {
        Retention {
            seconds: config.failed_retention_s,
            most: config.failed_most,
        }
    }

    /// The ids of the sandboxes in `failed` (oldest first) that are due for removal.
    pub fn overdue<'a>(self, failed: &[&'a Sandbox], now: u64) -> Vec<&'a str> {
        let excess = failed.len().saturating_sub(self.most);
        let is_old = |sandbox: &Sandbox| failed_at(sandbox).saturating_add(self.seconds) <= now;
        let overdue = failed.iter().enumerate();
        overdue
            .filter(|(n, sandbox)| *n < excess || is_old(sandbox))
            .map(|(_, sandbox)| sandbox.id.as_str())
            .collect()
    }
}

/// When a sandbox failed, seconds since the Unix epoch.
pub fn failed_at(sandbox: &Sandbox) -> u64 {
    sandbox.failure.as_ref().map_or(0, |failure| failure.at)
}

/// Seconds since the Unix epoch.
pub fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

#[derive(Serialize, Deserialize)]
struct FailedRecord {
    version: u32,
    sandbox: Sandbox,
}

impl Record {
    /// The description of this sandbox as a failed one.
    pub fn failed(&self, exit_code: Option<i32>, failure: SandboxFailure) -> Sandbox {
        Sandbox {
            id: self.id.clone(),
            tenant: self.terms.tenant.clone().map(String::from),
            name: self.name.clone(),
            image: self.image.clone(),
            command: self.command.clone(),
            created: self.created,
            cpus: self.vcpus,
            memory_mib: self.memory_mib,
            state: FAILED.into(),
            reason: Some(failure.message.clone()),
            exit_code,
            labels: self.terms.labels.clone(),
            timeout_s: self.terms.timeout.map(|t| t.seconds),
            failure: Some(failure),
            ..Sandbox::default()
        }
    }
}

impl SandboxDirectory {
    /// Notes that the end of this sandbox was requested: its remains then do not count as a failure.
    pub fn note_end(&self) {
        note_end(self.path());
    }
}

fn note_end(directory: &Path) {
    // Without this file, at worst an ended sandbox is listed as failed.
    if let Err(e) = File::create(directory.join(ENDING)) {
        tracing::debug!("cannot note the end of {}: {e}", directory.display());
    }
}

impl RunDirectory {
    /// The directory of the files, as a directory with a lock.
    fn failed_directory(&self) -> RunDirectory {
        RunDirectory {
            sandboxes: self.sandboxes.with_file_name("failed"),
        }
    }

    fn failed_file(&self, id: &str) -> PathBuf {
        self.sandboxes.with_file_name("failed").join(format!("{id}.json"))
    }

    /// Writes the record of a failed sandbox, completely or not at all. Blocks.
    ///
    /// # Errors
    /// The run directory cannot be written.
    pub fn note_failed(&self, sandbox: &Sandbox) -> Result<(), Error> {
        let directory = self.failed_directory();
        let fail = |e: io::Error| {
            let place = self.failed_file(&sandbox.id);
            Error::system(format!("cannot write {}", place.display()), &e)
        };
        let _all = directory.make_and_lock_all().map_err(fail)?;
        let (new, path) = (
            directory.sandboxes.join(format!("{}.new", sandbox.id)),
            self.failed_file(&sandbox.id),
        );
        reach(Failpoint::FailedDirectoryMade);
        let write = || -> io::Result<()> {
            let record = FailedRecord {
                version: VERSION,
                sandbox: sandbox.clone(),
            };
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(&record)?)?;
            reach(Failpoint::FailedBegun);
            fs::rename(&new, &path)?;
            reach(Failpoint::FailedNoted);
            Ok(())
        };
        write().map_err(|e| {
            let _ = fs::remove_file(&new);
            fail(e)
        })
    }

    /// Every failed sandbox that is still listed, oldest failure first. Blocks.
    pub fn failed(&self) -> Vec<Sandbox> {
        let Ok(entries) = fs::read_dir(self.failed_directory().sandboxes) else {
            return Vec::new();
        };
        let read = |path: PathBuf| -> Option<Sandbox> {
            if path.extension()? != "json" {
                return None;
            }
            match serde_json::from_slice::<FailedRecord>(&fs::read(&path).ok()?) {
                Ok(record) if record.version == VERSION => Some(record.sandbox),
                Ok(other) => {
                    tracing::warn!("{} is of version {}: left alone", path.display(), other.version);
                    None
                }
                Err(e) => {
                    tracing::warn!("{} cannot be read: {e}", path.display());
                    None
                }
            }
        };
        let mut failed: Vec<Sandbox> = entries.flatten().filter_map(|e| read(e.path())).collect();
        failed.sort_by_key(|sandbox| (failed_at(sandbox), sandbox.resource_version));
        failed
    }

    /// The failed sandbox with this id, name, or unambiguous prefix of an id. If several have the name, the one that failed last. Only
    /// names of sandboxes without a tenant count, as in [`RunDirectory::find`].
    ///
    /// # Errors
    /// More than one id begins so.
    pub fn find_failed(&self, wanted: &str) -> Result<Option<Sandbox>, Error> {
        let failed = self.failed();
        let is_called = |s: &Sandbox| s.tenant.is_none() && s.name.as_deref() == Some(wanted);
        let exact = |s: &&Sandbox| s.id == wanted || is_called(s);
        if let Some(exact) = failed.iter().rev().find(exact) {
            return Ok(Some(exact.clone()));
        }
        let begins = |s: &Sandbox| !wanted.is_empty() && s.id.starts_with(wanted);
        let mut begin = failed.into_iter().filter(begins);
        match (begin.next(), begin.next()) {
            (Some(_), Some(_)) => {
                let what = format!("more than one failed sandbox begins with {wanted}");
                Err(Error::new(ErrorKind::SandboxNotFound, what))
            }
            (first, _) => Ok(first),
        }
    }

    /// Removes the record of a failed sandbox. Returns whether there was one. Blocks.
    pub fn forget_failed(&self, id: &str) -> bool {
        let directory = self.failed_directory().sandboxes;
        let Ok(all) = lock_all(&directory) else {
            return false;
        };
        let removed = fs::remove_file(self.failed_file(id)).is_ok();
        reach(Failpoint::FailedForgotten);
        remove_if_empty(&directory, &all);
        removed
    }

    /// Removes excess and expired files, and partial ones. Blocks.
    pub fn expire_failed(&self, retention: Retention) {
        let directory = self.failed_directory().sandboxes;
        let Ok(all) = lock_all(&directory) else { return };
        let failed = self.failed();
        let known: Vec<&Sandbox> = failed.iter().collect();
        for id in retention.overdue(&known, now()) {
            let _ = fs::remove_file(self.failed_file(id));
        }
        let is_known = |name: &str| {
            let id = name.strip_suffix(".json");
            id.is_some_and(|id| known.iter().any(|s| s.id == id))
        };
        // Remove foreign files, and partial files of killed processes: only the lock holder writes here.
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let age = entry.metadata().and_then(|m| m.modified()).ok();
            let age = age
                .and_then(|at| at.elapsed().ok())
                .map_or(0, |age| age.as_secs());
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".new") || (!is_known(&name) && age >= retention.seconds) {
                let _ = fs::remove_file(entry.path());
            }
        }
        remove_if_empty(&directory, &all);
    }

    /// Records which sandboxes without an owner ended without a request. This must precede the removal of anything of them.
    pub(super) fn note_failures(&self, cgroups: &Hierarchy) {
        let Ok(_all) = lock_all(&self.sandboxes) else {
            return;
        };
        for path in self.directories() {
            if let Some(_lock) = try_lock(&path) {
                self.note_failure_in(&path, cgroups);
            }
        }
    }

    /// The same for one directory. The caller holds its lock.
    pub(super) fn note_failure_in(&self, path: &Path, cgroups: &Hierarchy) {
        let Ok(record) = read_record(path) else { return };
        if !is_failure(path, &record) || self.failed_file(&record.id).exists() {
            return;
        }
        let evidence = Evidence::left_in(path, record.cgroup.as_deref(), cgroups);
        let failed = record.failed(None, evidence.failure());
        log_failure(&failed);
        if let Err(e) = self.note_failed(&failed) {
            tracing::error!("{e}");
        }
    }

    /// Marks that the end of a sandbox without an owner was requested. If it had already ended without a request, records that failure
    /// first. The caller holds its lock.
    pub(super) fn note_asked(&self, path: &Path, cgroups: &Hierarchy) {
        self.note_failure_in(path, cgroups);
        note_end(path);
    }
}

/// Whether a sandbox without an owner had run and ended without a request.
fn is_failure(path: &Path, record: &Record) -> bool {
    let vmm_ended = record.vmm.is_some_and(|vmm| !vmm.lives());
    // No caller got an answer for a sandbox that was not ready yet.
    let was_promised = ready::noted(path) != Some(Readiness::Waiting);
    record.outlives_owner() && vmm_ended && was_promised && !path.join(ENDING).exists()
}

/// Logs that a sandbox failed, and how.
pub fn log_failure(failed: &Sandbox) {
    let Some(failure) = &failed.failure else { return };
    let console = failure.console.len().saturating_sub(LOGGED_LINES);
    tracing::error!(
        sandbox = failed.id,
        name = failed.name,
        image = failed.image,
        reason = failure.reason,
        exit_status = failure.exit_status,
        signal = failure.signal,
        console = failure.console[console..].join(" | "),
        "the sandbox failed: {}",
        failure.message
    );
}

#[cfg(test)]
#[path = "failed_test.rs"]
mod tests;
