//! Resources that a sandbox claims: how each is made, checked and destroyed, and pools that make them ahead of time.
//!
//! | module | resource | what remains if its owner is killed |
//! |---|---|---|
//! | [`disk`] | writable layer: a preformatted ext4 in an unlinked file | nothing: the kernel frees it with the last descriptor |
//! | [`cgroup`] | one directory per hierarchy, `/thaw/<name>` | empty directories, which the next start finds by their maker's name |
//! | [`vmm`] | a `thaw-vmm` process | nothing if it is tethered; else a process, found by [`process::ProcessRecord`] |
//! | [`share`] | a `thaw-share` process: directories of the host for one guest | nothing: it ends with its VMM |
//!
//! The network, a resource too, is a crate of its own (`pools/network`). [`block`] opens block devices of the host, which are not made.
//!
//! Every resource implements [`resource::Kind`]; callers claim it from a [`pool::Pool`]. The constructors here are the slow path: they
//! are correct, and as slow as the kernel is. Between their steps are [failpoints](thaw_failpoint). [`usage`] reads the resource usage
//! of a sandbox.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::io;
use std::path::{Path, PathBuf};

pub mod block;
pub mod cgroup;
pub mod cgroup_limits;
mod demand;
pub mod disk;
mod failure_streak;
pub mod foreground;
pub mod plan;
pub mod pool;
mod priority;
pub mod process;
pub mod resource;
pub mod share;
mod shared_namespaces;
mod spawn;
pub mod statistics;
pub mod usage;
pub mod vmm;

/// Why a resource could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on a path failed.
    #[error("cannot {what} {}: {source}", place.display())]
    Io {
        what: &'static str,
        place: PathBuf,
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    /// A program is not installed on this host.
    #[error("{program} is not installed; install the package {package}")]
    ProgramMissing {
        program: &'static str,
        package: &'static str,
    },
    /// A program ran and failed.
    #[error("{program} failed ({status}): {message}")]
    ProgramFailed {
        program: &'static str,
        status: std::process::ExitStatus,
        message: String,
    },
    /// thaw-vmm was not found.
    #[error("thaw-vmm is not at {}; put it beside thaw, or name it in THAW_VMM", looked.display())]
    VmmMissing { looked: PathBuf },
    /// thaw-share was not found.
    #[error("thaw-share is not at {}; put it beside thaw, or name it in THAW_SHARE", looked.display())]
    ShareMissing { looked: PathBuf },
    /// thaw-share refused to serve, or ended first.
    #[error("thaw-share does not serve: {why}")]
    Share { why: String },
}

impl Error {
    /// Wraps the error of a system call on a path: `what` completes "cannot … PATH".
    pub fn io(what: &'static str, place: &Path) -> impl FnOnce(io::Error) -> Error {
        let place = place.to_owned();
        move |source| Error::Io { what, place, source }
    }

    /// Wraps the error of a system call: `what` completes "cannot …".
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::System { what, source }
    }
}
