//! What a sandbox's cgroup on its host is limited to, and what becomes of a sandbox that cannot be limited.
//!
//! Invariant: where limits are required, no guest runs before those of its sandbox are set, but in a pod's cgroup, which has
//! its own, and while a template is built, whose guest runs nobody's program.

use std::os::fd::{AsFd, OwnedFd};

use thaw_pools::cgroup::Cgroup;
use thaw_pools::limits::{Limits, file_in_memory, tree_in_memory};
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::api::Volume;

use super::create::blocking;
use crate::exit::{ExitCode, Failure};
use crate::state::Record;

/// What to do about limits that cannot be set.
const REMEDY: &str = "see docs/operations.md, or set require_limits = false in [sandbox] of thawd.toml";

/// A failure to limit a sandbox: refused where limits are required, else said in the log.
pub(super) fn tolerate(required: bool, why: Failure) -> Result<(), Failure> {
    if required {
        return Err(why);
    }
    tracing::warn!("a sandbox is not limited: {}", why.what);
    Ok(())
}

/// That a sandbox cannot be limited.
pub(super) fn unlimited(why: impl std::fmt::Display) -> Failure {
    let what = format!("the host cannot limit a sandbox: {why}");
    Failure::new(ExitCode::Runtime, what).remedy(REMEDY)
}

/// Puts a process into a sandbox's cgroup, if it has one.
pub(super) fn enter(required: bool, cgroup: Option<&Cgroup>, process: &VmmProcess) -> Result<(), Failure> {
    match cgroup.map(|c| c.add(process.record().pid)) {
        // It has ended: whoever speaks to it next says why.
        Some(Err(e)) if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        Some(Err(e)) => {
            let why = format!("a process stays in the caller's cgroup: {e}");
            tolerate(required, unlimited(why))
        }
        Some(Ok(())) | None => Ok(()),
    }
}

/// Limits a sandbox before its guest runs.
pub(super) async fn set(
    required: bool,
    cgroup: Option<&Cgroup>,
    record: &Record,
    disk: &OwnedFd,
) -> Result<(), Failure> {
    let Some(cgroup) = cgroup else { return Ok(()) };
    let in_files = file_in_memory(disk).saturating_add(volumes_in_memory(&record.volumes).await?);
    let limits = Limits::of_guest(record.memory_mib, in_files);
    cgroup
        .limit(&limits)
        .or_else(|e| tolerate(required, unlimited(e)))
}

/// Bytes of memory its volumes can take. A file system may be slow to say.
async fn volumes_in_memory(volumes: &[Volume]) -> Result<u64, Failure> {
    let written: Vec<_> = volumes.iter().filter(|v| !v.read_only).collect();
    if written.is_empty() {
        return Ok(0);
    }
    let places: Vec<_> = written.iter().map(|v| v.host.clone()).collect();
    let sum = move || {
        let bytes = places.iter().map(|place| tree_in_memory(place));
        Ok(bytes.fold(0, u64::saturating_add))
    };
    blocking(sum).await
}

/// Makes room for what a VMM writes to `file`, its guest's memory, where that file takes memory itself.
pub(super) fn make_room(cgroup: Option<&Cgroup>, file: impl AsFd, memory_mib: u32) {
    let Some(cgroup) = cgroup.filter(|_| thaw_pools::limits::is_in_memory(file)) else {
        return;
    };
    if let Err(e) = cgroup.make_room(memory_mib) {
        tracing::warn!("no room is made for a snapshot in memory: {e}");
    }
}
