//! Why a network could not be made, joined or changed.

use std::io;
use std::path::PathBuf;

use crate::{MAX_POD_ADDRESSES, POD_TAP};

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
    /// Another process or sandbox has a port that should be published.
    #[error("port {port} of this host is in use; publish another")]
    PortInUse { port: String },
    /// A port should be published on an address that this host lacks.
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

/// Why a guest cannot join the network of its pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PodError {
    /// The namespace is the host's own.
    #[error(
        "the network is the host's own, which a virtual machine cannot share; run the pod without hostNetwork"
    )]
    HostNetwork,
    /// Another guest has joined it.
    #[error(
        "the pod's network has the tap {POD_TAP} in it: another sandbox uses it, or one that was not taken away"
    )]
    InUse,
    /// Another program directs the frames that arrive.
    #[error(
        "{interface} of the pod has an ingress or clsact qdisc with filters: remove it, or have the CNI plugin not add it"
    )]
    Directed { interface: String },
    /// It has more interfaces than a guest.
    #[error("the pod has {} network interfaces ({}) and a guest has one: attach one network to it", names.len(), names.join(", "))]
    Several { names: Vec<String> },
    /// It has more addresses than the filter of the guest's frames can compare.
    #[error(
        "the pod has {count} addresses of a family and a guest has at most {}",
        MAX_POD_ADDRESSES
    )]
    Addresses { count: usize },
}
