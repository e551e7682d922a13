//! The resources a sandbox claims, and how each is made and destroyed.
//!
//! | module | resource | what remains if its owner is killed |
//! |---|---|---|
//! | [`disk`] | writable layer: a preformatted ext4 in an unlinked file | nothing: the kernel frees it with the last descriptor |
//! | [`network`] | a network namespace with a tap in it, joined to the host's, held by descriptors | nothing, likewise; published ports lead nowhere until a thawd that runs, or else the next start, removes them |
//! | [`network::pod`] | taps in a namespace that is somebody else's, and frames redirected to them | the redirection, found by its cookie by the next |
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
pub mod demand;
pub mod disk;
pub mod limits;
pub mod machine;
pub mod network;
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
    /// The host has a route of its own into the range for slots.
    #[error(
        "the range {range} for sandboxes overlaps this host's route to {route} by {interface}; set another [network] range"
    )]
    RangeTaken {
        range: String,
        route: String,
        interface: String,
    },
    /// As many slots as the range has room for.
    #[error("all {slots} network slots of {range} are in use; set a larger [network] range")]
    RangeFull { range: String, slots: u32 },
    /// This host does not forward, and is not to be made to.
    #[error("net.ipv4.ip_forward is 0; set it to 1, or [network] forwarding = true")]
    ForwardingOff,
    /// Somebody else has a port that was to be published.
    #[error("port {port} of this host is in use; publish another")]
    PortInUse { port: String },
    /// A port of an address this host has not.
    #[error("{port}: this host has no such address")]
    NotOurAddress { port: String },
    /// A pod's network is not one that can be joined.
    #[error(transparent)]
    Pod(#[from] network::pod::PodError),
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
}
