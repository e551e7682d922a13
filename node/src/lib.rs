//! thawd and the thaw command line: everything on a node that outlives one microVM.
//!
//! | module | noun |
//! |---|---|
//! | [`cli`] | the commands of `thaw` |
//! | [`sandbox`] | one microVM with an image in it: how it is made, in named and timed stages, and how it ends |
//! | [`control_client`] | our end of a VMM's control socket |
//! | [`handshake`] | making a guest this sandbox, and nothing before that |
//! | [`agent_client`] | our end of the guest agent's API |
//! | [`container`] | image configuration and flags into an OCI runtime specification |
//! | [`install`] | Thaw as a runtime of containerd, and that undone |
//! | [`stdio`] | a process's standard streams, terminal, signals |
//! | [`snapshot`] | frozen machines on disk: made, verified, signed, handed to a VMM |
//! | [`snapshotter`] | containerd's remote snapshotter |
//! | [`pods`] | what thawd does for containerd's shim |
//! | [`metrics`] | what thawd counts |
//! | [`page_server`] | filling a machine's memory as it is touched |
//! | [`misses`] | answering a VMM's chunk misses from the image store |
//! | [`state`] | what is running, on disk |
//! | [`versioned`] | records on disk, their version read first |
//! | [`template`] | guests booted once, from which every sandbox is thawed |
//! | [`doctor`] | what this host has, lacks, and what that costs |
//! | [`api`] | thawd's HTTP API, both ends |
//! | [`service`] | what systemd is told of thawd |
//! | [`trace`], [`slow`] | where the time of a start goes, and why it was slower than it could have been |
//! | [`spans`] | creations as OpenTelemetry spans |
//! | [`failure`] | why a sandbox ended unasked |
//! | [`exit`] | exit codes |
//!
//! Invariant: whatever ends this process, what it made for a sandbox ends with it or is found by the next start.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod agent_client;
pub mod api;
pub mod blocking;
pub mod cli;
pub mod config;
pub mod console;
pub mod container;
pub mod control_client;
pub mod doctor;
pub mod exit;
pub mod failure;
#[cfg(test)]
mod fixtures;
pub mod handshake;
pub mod human_bytes;
pub mod id;
pub mod image;
pub mod images;
pub mod install;
pub mod journal;
pub mod metrics;
pub mod miss_counts;
pub mod misses;
pub mod page_server;
pub mod paths;
pub mod pods;
pub mod readiness;
pub mod sandbox;
pub mod service;
pub mod slow;
pub mod snapshot;
pub mod snapshotter;
pub mod spans;
pub mod state;
pub mod stdio;
pub mod template;
pub mod tenant;
pub mod trace;
pub mod ui;
pub mod versioned;

/// `N` bytes from the kernel's generator.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes[filled..], flags))?;
    }
    Ok(bytes)
}
