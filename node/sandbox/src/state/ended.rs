//! Records of ended sandboxes: those that failed, and detached ones whose container has exited. One file each, `failed/ID.json` beside the
//! directory of all sandboxes, and the container's output, `failed/ID.output` and `failed/ID.output.before` ([`Journal`]). The directory has
//! this name since it had only failed sandboxes.
//!
//! Invariants: a sandbox's file is written before anything of the sandbox is removed, so a `kill -9` never loses a failure. A sandbox whose
//! end was requested is marked before its VMM is ended ([`SandboxDirectory::note_end`]), so its remains do not count as a failure. The
//! number and the age of the files are limited ([`Retention`]), and so are the bytes of kept output ([`MOST_OUTPUT`]).
//! [`MOST_FAILED`](crate::config::MOST_FAILED) limits their number whatever the configuration says. The directory is removed with its last
//! file, under its lock.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::{EXITED, FAILED, Readiness, Sandbox, SandboxFailure};

use super::{Record, RunDirectory, SandboxDirectory, lock_all, read_record, remove_if_empty, try_lock};
use crate::config::SandboxConfig;
use crate::container::ready;
use crate::error::{Error, ErrorKind};
use crate::failure::Evidence;
use crate::journal::Journal;

/// File in a sandbox's directory that notes that its end was requested.
const ENDING: &str = "ending";
/// Version of the file format. A file of another version is not read, and is removed when it expires.
const VERSION: u32 = 1;
/// Maximum number of bytes of kept output of all ended sandboxes. The run directory is usually in memory.
const MOST_OUTPUT: u64 = 64 << 20;
/// Number of console lines in the log entry of a failure.
const LOGGED_LINES: usize = 10;

/// How long ended sandboxes stay listed, and how many.
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

    /// The ids of the sandboxes in `ended` (oldest first) that are due for removal.
    pub fn overdue<'a>(self, ended: &[&'a Sandbox], now: u64) -> Vec<&'a str> {
        let excess = ended.len().saturating_sub(self.most);
        let is_old = |sandbox: &Sandbox| ended_at(sandbox).saturating_add(self.seconds) <= now;
        let overdue = ended.iter().enumerate();
        overdue
            .filter(|(n, sandbox)| *n < excess || is_old(sandbox))
            .map(|(_, sandbox)| sandbox.id.as_str())
            .collect()
    }
}

/// When an ended sandbox ended, seconds since the Unix epoch.
pub fn ended_at(sandbox: &Sandbox) -> u64 {
    sandbox.ended_at().unwrap_or(0)
}

/// Seconds since the Unix epoch.
pub fn now() -> u64 {
    since_epoch().as_secs()
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[derive(Serialize, Deserialize)]
struct EndedRecord {
    version: u32,
    sandbox: Sandbox,
    /// When it was written, nanoseconds since the Unix epoch: orders those that ended in one second. 0 if an earlier release wrote it.
    #[serde(default)]
    noted_ns: u64,
}

impl Record {
    /// The description of this sandbox as a failed one.
    pub fn failed(&self, exit_code: Option<i32>, failure: SandboxFailure) -> Sandbox {
        Sandbox {
            state: FAILED.into(),
            reason: Some(failure.message.clone()),
            exit_code,
            failure: Some(failure),
            ..self.kept()
        }
    }

    /// The description of this sandbox as one whose container's process has just ended, and of which the record is kept.
    pub fn exited(&self, exit_code: i32) -> Sandbox {
        Sandbox {
            state: EXITED.into(),
            exit_code: Some(exit_code),
            ended: Some(now()),
            ..self.kept()
        }
    }

    /// What is described of an ended sandbox, however it ended.
    fn kept(&self) -> Sandbox {
        Sandbox {
            id: self.id.clone(),
            tenant: self.terms.tenant.clone().map(String::from),
            name: self.name.clone(),
            image: self.image.clone(),
            command: self.command.clone(),
            created: self.created,
            cpus: self.vcpus,
            memory_mib: self.memory_mib,
            labels: self.terms.labels.clone(),
            timeout_s: self.terms.timeout.map(|t| t.seconds),
            idle_timeout_s: self.terms.idle_timeout_s,
            on_timeout: self.terms.on_timeout,
            ..Sandbox::default()
        }
    }
}

impl SandboxDirectory {
    /// Notes that the end of this sandbox was requested: its remains then do not count as a failure, and if we are killed, the next owner ends
    /// it instead of adopting it.
    pub fn note_end(&self) {
        note_end(self.path());
    }
}

pub(super) fn note_end(directory: &Path) {
    // Without this file, at worst an ended sandbox is listed as failed, or outlives us.
    if let Err(e) = File::create(directory.join(ENDING)) {
        tracing::debug!("cannot note the end of {}: {e}", directory.display());
    }
}

/// Whether the end of the sandbox in this directory was requested.
pub(super) fn end_is_noted(directory: &Path) -> bool {
    directory.join(ENDING).exists()
}

impl RunDirectory {
    /// The directory of the files, as a directory with a lock.
    fn ended_directory(&self) -> RunDirectory {
        RunDirectory {
            sandboxes: self.sandboxes.with_file_name("failed"),
        }
    }

    fn ended_file(&self, id: &str) -> PathBuf {
        self.sandboxes.with_file_name("failed").join(format!("{id}.json"))
    }

    /// The file of the kept output of an ended sandbox's container ([`Journal::kept`]).
    pub fn ended_output(&self, id: &str) -> PathBuf {
        self.ended_file(id).with_extension("output")
    }

    /// Keeps the output of an ended sandbox and writes its record, completely or not at all. Blocks.
    ///
    /// # Errors
    /// The run directory cannot be written.
    pub fn note_ended(&self, sandbox: &Sandbox) -> Result<(), Error> {
        let directory = self.ended_directory();
        let fail = |e: io::Error| {
            let place = self.ended_file(&sandbox.id);
            Error::system(format!("cannot write {}", place.display()), &e)
        };
        let _all = directory.make_and_lock_all().map_err(fail)?;
        let (new, path) = (
            directory.sandboxes.join(format!("{}.new", sandbox.id)),
            self.ended_file(&sandbox.id),
        );
        reach(Failpoint::FailedDirectoryMade);
        // Before the record: what has a record may be removed at once.
        if let Err(e) = Journal::keep(&self.directory(&sandbox.id), &self.ended_output(&sandbox.id)) {
            tracing::warn!(sandbox = sandbox.id, "its output is not kept: {e}");
        }
        let write = || -> io::Result<()> {
            let record = EndedRecord {
                version: VERSION,
                sandbox: sandbox.clone(),
                noted_ns: since_epoch().as_nanos() as u64,
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

    /// Ends a sandbox without an owner whose container has exited, removes its resources, and keeps its record and its output. Returns
    /// whether it existed and has ended.
    pub fn end_exited(&self, id: &str, status: i32, cgroups: &Hierarchy) -> bool {
        let path = self.directory(id);
        if let (Some(_lock), Ok(record)) = (try_lock(&path), read_record(&path))
            && let Err(e) = self.note_ended(&record.exited(status))
        {
            tracing::warn!("{e}");
        }
        self.end(id, cgroups)
    }

    /// Every ended sandbox that is still listed, the one that ended first before the others. Blocks.
    pub fn ended(&self) -> Vec<Sandbox> {
        let Ok(entries) = fs::read_dir(self.ended_directory().sandboxes) else {
            return Vec::new();
        };
        let read = |path: PathBuf| -> Option<EndedRecord> {
            if path.extension()? != "json" {
                return None;
            }
            match serde_json::from_slice::<EndedRecord>(&fs::read(&path).ok()?) {
                Ok(record) if record.version == VERSION => Some(record),
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
        let mut ended: Vec<EndedRecord> = entries.flatten().filter_map(|e| read(e.path())).collect();
        ended.sort_by_key(|it| (ended_at(&it.sandbox), it.sandbox.resource_version, it.noted_ns));
        ended.into_iter().map(|record| record.sandbox).collect()
    }

    /// The ended sandbox with this id, name, or unambiguous prefix of an id. If several have the name, the one that ended last. Only
    /// names of sandboxes without a tenant count, as in [`RunDirectory::find`].
    ///
    /// # Errors
    /// More than one id begins so.
    pub fn find_ended(&self, wanted: &str) -> Result<Option<Sandbox>, Error> {
        let ended = self.ended();
        let is_called = |s: &Sandbox| s.tenant.is_none() && s.name.as_deref() == Some(wanted);
        let exact = |s: &&Sandbox| s.id == wanted || is_called(s);
        if let Some(exact) = ended.iter().rev().find(exact) {
            return Ok(Some(exact.clone()));
        }
        let begins = |s: &Sandbox| !wanted.is_empty() && s.id.starts_with(wanted);
        let mut begin = ended.into_iter().filter(begins);
        match (begin.next(), begin.next()) {
            (Some(_), Some(_)) => {
                let what = format!("more than one ended sandbox begins with {wanted}");
                Err(Error::new(ErrorKind::SandboxNotFound, what))
            }
            (first, _) => Ok(first),
        }
    }

    /// Removes the record and the output of an ended sandbox. Returns whether there was one. Blocks.
    pub fn forget_ended(&self, id: &str) -> bool {
        let directory = self.ended_directory().sandboxes;
        let Ok(all) = lock_all(&directory) else {
            return false;
        };
        let removed = fs::remove_file(self.ended_file(id)).is_ok();
        Journal::remove(&self.ended_output(id));
        reach(Failpoint::FailedForgotten);
        remove_if_empty(&directory, &all);
        removed
    }

    /// Removes excess and expired files, and partial ones, then the oldest output that exceeds [`MOST_OUTPUT`]. Blocks.
    pub fn expire_ended(&self, retention: Retention) {
        let directory = self.ended_directory().sandboxes;
        let Ok(all) = lock_all(&directory) else { return };
        let ended = self.ended();
        let known: Vec<&Sandbox> = ended.iter().collect();
        let overdue = retention.overdue(&known, now());
        for id in &overdue {
            let _ = fs::remove_file(self.ended_file(id));
            Journal::remove(&self.ended_output(id));
        }
        let is_known = |name: &str| {
            let id = name.split_once('.').map(|(id, _)| id);
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
        let newest = known.iter().rev().map(|s| s.id.as_str());
        self.bound_output(newest.filter(|id| !overdue.contains(id)), MOST_OUTPUT);
        remove_if_empty(&directory, &all);
    }

    /// Removes the output of the last of these sandboxes, so that all output together has at most `most` bytes.
    fn bound_output<'a>(&self, ids: impl Iterator<Item = &'a str>, most: u64) {
        let mut bytes = 0;
        for id in ids {
            bytes += Journal::size(&self.ended_output(id));
            if bytes > most {
                Journal::remove(&self.ended_output(id));
            }
        }
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
        if !is_failure(path, &record) || self.ended_file(&record.id).exists() {
            return;
        }
        let evidence = Evidence::left_in(path, record.cgroup.as_deref(), cgroups);
        let failed = record.failed(None, evidence.failure());
        log_failure(&failed);
        if let Err(e) = self.note_ended(&failed) {
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
    record.outlives_owner() && vmm_ended && was_promised && !end_is_noted(path)
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
#[path = "ended_test.rs"]
mod tests;
