//! Boot to agent ready: the same guest kernel and guest image, under thaw-vmm and under QEMU's microvm machine.
//!
//! Both are timed from just before the VMM process is spawned to the doorbell, which the agent rings in both by dialling
//! the same vsock port; the agent's own span comes from its acknowledgement of the handshake, in both.

pub mod qemu;
pub mod thaw;

use std::io::{self, Read, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use thaw_protocol::handshake::{
    Acknowledgement, FromAgent, Greeting, HANDSHAKE_VERSION, Identity, Time, read_frame, write_frame,
};

/// Where the time of one boot went, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Boot {
    /// VMM process spawned to first vCPU entering the guest; unknown for a VMM that does not tell.
    pub vmm: Option<f64>,
    /// From there to the agent's `main`.
    pub kernel: Option<f64>,
    /// The agent's `main` to its doorbell.
    pub agent: f64,
    /// All of it.
    pub total: f64,
}

/// The machine both have: one vCPU, and boot memory in MiB.
pub const MEMORY_MIB: u32 = 128;

/// The guest's command line, as `thaw run` gives it (`guest-kernel-config/README.md` says why for each word), but for
/// where its root is.
pub fn cmdline(root: &str) -> String {
    format!(
        "console=ttyS0 loglevel=3 reboot=k panic=-1 {root} rootfstype=erofs rootwait ro init=/sbin/init pci=off \
         tsc=reliable swiotlb=noforce noreplace-smp maxcpus=1 rcupdate.rcu_expedited=1 memhp_default_state=online \
         dummy.numdummies=0 sysctl.net.ipv4.ip_unprivileged_port_start=0 sysctl.vm.overcommit_memory=1"
    )
}

/// The host's side of the handshake over an open connection; gives how long the agent took, in milliseconds.
fn agent_span(connection: impl Read + Write) -> io::Result<f64> {
    let answer = handshake(connection, MEMORY_MIB)?;
    Ok((answer.agent_ready - answer.agent_started) as f64 / 1e6)
}

/// The host's side of the handshake over an open connection, for a guest of one CPU.
///
/// # Errors
/// What the agent says it could not do, too.
pub fn handshake(mut connection: impl Read + Write, memory_mib: u32) -> io::Result<Acknowledgement> {
    let mut entropy = vec![0u8; 64];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut entropy)?;
    let identity = Identity {
        version: HANDSHAKE_VERSION,
        nonce: [1; 16],
        entropy,
        hostname: "bench".into(),
        machine_id: [2; 16],
        network: None,
        cpus: 1,
        memory_mib,
        rehearsal: false,
    };
    write_frame(&mut connection, &Greeting::Become(Box::new(identity))).map_err(io::Error::other)?;
    loop {
        match read_frame(&mut connection).map_err(io::Error::other)? {
            FromAgent::WhatTime => {
                let now = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_err(io::Error::other)?;
                let time = Time {
                    wall_clock_ns: now.as_nanos() as u64,
                };
                write_frame(&mut connection, &time).map_err(io::Error::other)?;
            }
            FromAgent::Acknowledged(answer) => match answer.failure {
                None => return Ok(*answer),
                Some(why) => return Err(io::Error::other(why)),
            },
        }
    }
}
