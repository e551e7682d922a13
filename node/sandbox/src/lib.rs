//! Sandboxes of one host: how each is made, thawed, frozen, taken over and ended, and what is recorded of it.
//!
//! Nothing here knows of the command line, of HTTP or exit codes.
//!
//! | module | noun |
//! |---|---|
//! | [`sandbox`] | one microVM with an image in it: how it is made, in named and timed stages, and how it ends |
//! | [`control_client`] | our end of a VMM's control socket |
//! | [`vm`] | a VMM without a running guest: started, given a machine, given a snapshot |
//! | [`handshake`] | making a guest this sandbox, and nothing before that |
//! | [`agent_client`] | connections to the guest's agent, and its errors |
//! | [`container`] | image configuration and flags into an OCI runtime specification |
//! | [`snapshot`] | frozen machines on disk: made, verified, signed, handed to a VMM |
//! | [`page_server`] | filling a machine's memory as it is touched |
//! | [`misses`] | answering a VMM's chunk misses from the image store |
//! | [`state`] | what is running, on disk |
//! | [`template`] | guests booted once, from which every sandbox is thawed |
//! | [`trace`], [`slow`] | where the time of a start goes, and why it was slower than it could have been |
//! | [`failure`] | why a sandbox ended unasked |
//! | [`error`] | the error of this crate, and its kinds |
//!
//! Invariant: whatever ends this process, what it made for a sandbox ends with it or is found by the next start.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod agent_client;
pub mod blocking;
pub mod config;
pub mod console;
pub mod container;
pub mod control_client;
pub mod error;
pub mod failure;
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
pub mod sandbox;
pub mod slow;
pub mod snapshot;
pub mod state;
pub mod template;
pub mod tenant;
pub mod trace;
pub mod unix_socket;
pub mod vm;

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
