//! What a sandbox may use of the host: the limits of its cgroup, the sizes of the files that its VMM may write, and what happens if they
//! cannot be set.
//!
//! Invariant: if limits are required, no guest runs before its sandbox's limits are set. Exceptions: a pod's cgroup, which has
//! limits of its own, and the build of a template, whose guest runs no user program. A CPU limit that the caller asked for is
//! always set, or the creation fails.

use std::os::fd::{AsFd, OwnedFd};

use thaw_pools::cgroup::{Cgroup, Cgroups, Unavailable};
use thaw_pools::cgroup_limits::{
    CgroupLimits as Limits, Needs, file_in_memory, is_in_memory, tree_in_memory,
};
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::api::Volume;

use super::Node;
use super::pools::{Claimed, claim};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::state::Record;
use crate::trace::Trace;

/// How much larger than the guest's memory a memory file may be, bytes. With holes, the file ends where virtio-mem's last data is, which
/// the guest may put up to 256 MiB further (`USABLE_EXTENT` of thaw-vmm). The margin is twice that.
const FILE_MARGIN: u64 = 512 << 20;

/// The error for a sandbox that cannot be limited.
pub(super) fn unlimited<T: std::fmt::Display>(why: T) -> Error {
    Error::new(
        ErrorKind::LimitsUnavailable,
        format!("the host cannot limit a sandbox: {why}"),
    )
}

/// Handles a failure to limit a sandbox: returned if limits are required, otherwise logged.
fn tolerate(required: bool, why: Error) -> Result<(), Error> {
    if required {
        return Err(why);
    }
    tracing::warn!("a sandbox is not limited: {}", why.what);
    Ok(())
}

/// Puts a process into a sandbox's cgroup, if it has one.
///
/// # Errors
/// [`ErrorKind::LimitsUnavailable`], if limits are required.
pub(super) fn enter(required: bool, cgroup: Option<&Cgroup>, process: &VmmProcess) -> Result<(), Error> {
    match cgroup.map(|c| c.add(process.record().pid)) {
        // The process has ended: the next call to it reports why.
        Some(Err(e)) if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        Some(Err(e)) => {
            let why = format!("a process stays in the caller's cgroup: {e}");
            tolerate(required, unlimited(why))
        }
        Some(Ok(())) | None => Ok(()),
    }
}

/// Claims a cgroup for a sandbox. `None` if this host can give none and limits are not required: the sandbox then runs in its caller's
/// cgroup.
pub(super) async fn claim_cgroup(node: &Node, trace: &Trace) -> Result<Option<Claimed<Cgroups>>, Error> {
    let _stage = trace.stage("cgroup");
    match claim(&node.pools, |p| &p.cgroups, (), unlimited::<Unavailable>, trace).await {
        Ok(cgroup) => Ok(Some(cgroup)),
        Err(e) if node.require.limits => Err(e),
        // Normal for a user without privileges, so no warning.
        Err(e) => {
            tracing::info!("{}", e.what);
            Ok(None)
        }
    }
}

/// Limits a sandbox before its guest runs.
///
/// # Errors
/// [`ErrorKind::LimitsUnavailable`], if limits are required; for a CPU limit always.
pub(super) async fn set(
    required: bool,
    cgroup: Option<&Cgroup>,
    record: &Record,
    disk: &OwnedFd,
) -> Result<(), Error> {
    let in_volumes = volumes_in_memory(&record.volumes).await?;
    set_now(required, cgroup, record, disk, in_volumes)
}

/// The same, with the bytes of memory that its volumes can use.
pub(super) fn set_now(
    required: bool,
    cgroup: Option<&Cgroup>,
    record: &Record,
    disk: &OwnedFd,
    in_volumes: u64,
) -> Result<(), Error> {
    let Some(cgroup) = cgroup else {
        return match record.cpu_limit_millis {
            Some(_) => Err(unlimited("it has no cgroup, so its CPU time has no limit")),
            None => Ok(()),
        };
    };
    if let Some(millis) = record.cpu_limit_millis {
        cgroup.limit_cpu(millis).map_err(unlimited)?;
    }
    let mut needs = needs(record, disk);
    needs.in_files = needs.in_files.saturating_add(in_volumes);
    cgroup
        .limit(&Limits::of(needs))
        .or_else(|e| tolerate(required, unlimited(e)))
}

/// Limits the size of the files its VMM writes to the size of its disk, or of the memory that a freeze writes, whichever is larger. Its log
/// and its state file are far smaller. If the host does not allow that, the VMM keeps the limit it was started with, which fits the largest
/// disk.
///
/// # Errors
/// The disk cannot be examined.
pub(super) fn set_files(vmm: &VmmProcess, record: &Record, disk: &OwnedFd) -> Result<(), Error> {
    let disk =
        rustix::fs::fstat(disk).map_err(|e| Error::system("cannot look at a sandbox's disk", &e.into()))?;
    let memory = (u64::from(record.memory_mib) << 20) + FILE_MARGIN;
    let disk = u64::try_from(disk.st_size).unwrap_or(0);
    if let Err(error) = vmm.limit_files(disk.max(memory)) {
        tracing::debug!(%error, "files of thaw-vmm are limited by the largest disk alone");
    }
    Ok(())
}

fn needs(record: &Record, disk: &OwnedFd) -> Needs {
    Needs {
        memory_mib: record.memory_mib,
        in_files: file_in_memory(disk),
        shares: !record.volumes.is_empty(),
    }
}

/// Bytes of memory that its volumes can use. A file system may be slow to answer.
async fn volumes_in_memory(volumes: &[Volume]) -> Result<u64, Error> {
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

/// Raises the memory limit by the size of what a VMM writes to `file`, its guest's memory, if that file is itself in memory.
pub(super) fn make_room(cgroup: Option<&Cgroup>, file: impl AsFd, record: &Record, disk: &OwnedFd) {
    let Some(cgroup) = cgroup.filter(|_| is_in_memory(file)) else {
        return;
    };
    if let Err(e) = cgroup.make_room(needs(record, disk)) {
        tracing::warn!("no room is made for a snapshot in memory: {e}");
    }
}
