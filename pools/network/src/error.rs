//! Why a network could not be made, joined or changed.

use std::io;
use std::path::PathBuf;

use crate::pod::PodError;

/// Why a network could not be made, joined or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A path that should be a network namespace cannot be opened.
    #[error("cannot open the network namespace {}: {source}", path.display())]
    Namespace { path: PathBuf, source: io::Error },
    /// A request to the kernel failed.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    /// The host has a route of its own into the range of the slots.
    #[error(
        "the range {range} for sandboxes overlaps this host's route to {route} by {interface}; set another [network] range"
    )]
    RangeTaken {
        range: String,
        route: String,
        interface: String,
    },
    /// There are as many slots as the range has room for.
    #[error("all {slots} network slots of {range} are in use; set a larger [network] range")]
    RangeFull { range: String, slots: u32 },
    /// This host does not forward packets, and the configuration does not let Thaw turn that on.
    #[error("net.ipv4.ip_forward is 0; set it to 1, or [network] forwarding = true")]
    ForwardingOff,
    /// Another process or sandbox has a port that was to be published.
    #[error("port {port} of this host is in use; publish another")]
    PortInUse { port: String },
    /// A port was to be published on an address that this host does not have.
    #[error("{port}: this host has no such address")]
    NotOurAddress { port: String },
    /// A guest cannot join the network of its pod.
    #[error(transparent)]
    Pod(#[from] PodError),
}

impl Error {
    /// Wraps the I/O error of a request to the kernel: `what` completes "cannot …".
    pub(crate) fn system(what: &'static str) -> impl Fn(io::Error) -> Error + Copy {
        move |source| Error::System { what, source }
    }
}
