//! The resources a sandbox claims, and how each is made and destroyed.
//!
//! | module | resource | what remains if its owner is killed |
//! |---|---|---|
//! | [`disk`] | writable layer: a preformatted ext4 in an unlinked file | nothing: the kernel frees it with the last descriptor |
//! | [`cgroup`] | one directory per hierarchy, `/thaw/<name>` | empty directories, found by their maker's name by the next start |
//! | [`vmm`] | a `thaw-vmm` process | nothing if tethered; else a process, found by [`process::ProcessRecord`] |
//! | [`share`] | a `thaw-share` process: directories of the host for one guest | nothing: it ends with its VMM |
//! | [`machine`] | the same with a machine in it: a shell, or a parked VM | likewise |
//!
//! Not made, only opened: [`block`], a block device of the host.
//!
//! Between the steps of each are [failpoints](thaw_failpoint); [`usage`] is what a sandbox takes of its host.
//!
//! What they have in common is [`resource::Kind`]; callers claim from a [`pool::Pool`], which makes them ahead of time.
//! Every constructor here is the slow path: correct, and as slow as the kernel makes it.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::io;
use std::path::{Path, PathBuf};

pub mod block;
pub mod cgroup;
mod demand;
pub mod disk;
pub mod limits;
pub mod machine;
pub mod plan;
pub mod pool;
pub mod process;
pub mod resource;
pub mod share;
mod spawn;
pub mod statistics;
pub mod usage;
pub mod vmm;

/// Why a resource could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on a file failed.
    #[error("cannot {what} {}: {source}", place.display())]
    Io {
        what: &'static str,
        place: PathBuf,
        source: io::Error,
    },
    /// A system call on no file failed.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    /// A program this host lacks.
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
    /// thaw-share does not serve what it was asked to.
    #[error("thaw-share does not serve: {why}")]
    Share { why: String },
}

impl Error {
    fn io(what: &'static str, place: &Path) -> impl FnOnce(io::Error) -> Error {
        let place = place.to_owned();
        move |source| Error::Io { what, place, source }
    }

    /// Wraps the error of a system call: `what` completes "cannot …".
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::System { what, source }
    }
}
