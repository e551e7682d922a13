//! Sandboxes of one host: creates, thaws, freezes, adopts and ends them, and keeps their records.
//!
//! Nothing here knows the command line, HTTP or exit codes.
//!
//! | module | contents |
//! |---|---|
//! | [`admission`] | what tenants and the node have, and the limits of that |
//! | `dns` | resolves names for guests whose network policy has domains |
//! | [`relay`] | carries TCP connections of such guests, if the policy allows the host that they ask for |
//! | [`sandbox`] | one microVM with an image in it: the timed stages of its creation, and its end |
//! | [`control_client`] | client of a VMM's control socket |
//! | [`vm`] | a VMM without a running guest: started, given a machine, given a snapshot |
//! | [`handshake`] | gives a guest its identity |
//! | [`agent_client`] | connections to the guest's agent, and its errors |
//! | [`container`] | from an image's configuration and options to an OCI runtime specification |
//! | [`snapshot`] | frozen machines on disk: made, verified, signed, handed to a VMM |
//! | [`page_server`] | fills a machine's memory on demand |
//! | [`misses`] | answers a VMM's chunk misses from the image store |
//! | [`state`] | the directories and records of running sandboxes |
//! | [`template`] | guests booted once, from which every sandbox is thawed |
//! | [`images`], [`image`] | the node's image store; indexes, conversions and recordings of images |
//! | [`config`] | `thawd.toml` |
//! | [`trace`], [`slow`] | how the time of a start is spent, and why it was slower than it could have been |
//! | [`failure`] | why a sandbox ended without a request |
//! | [`error`] | the error of this crate, and its kinds |
//!
//! Invariant: however this process ends, what it made for a sandbox ends with it, or the next start finds it.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod admission;
pub mod agent_client;
pub mod blocking;
pub mod closest;
pub mod config;
pub mod console;
pub mod container;
pub mod control_client;
mod dns;
pub mod error;
pub mod failure;
mod file_lock;
pub mod handshake;
pub mod human_bytes;
pub mod id;
pub mod image;
pub mod images;
pub mod journal;
pub mod miss_counts;
pub mod misses;
pub mod page_server;
pub mod paths;
pub mod readiness;
pub mod relay;
pub mod sandbox;
pub mod slow;
pub mod snapshot;
pub mod state;
pub mod template;
pub mod tenant;
pub mod trace;
pub mod unix_socket;
pub mod vm;

pub use sandbox::{
    BaseUsers, BudgetStatistics, CopyPlace, FoundSnapshot, FreezeOptions, NetworkMode, NetworkSource, Node,
    NotAdopted, READY_LIMIT, Sandbox, SandboxSpec, Tenants, ThawSpec, Thawable, network, usage,
};

/// `N` bytes from the kernel's generator.
pub fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes[filled..], flags))?;
    }
    Ok(bytes)
}
