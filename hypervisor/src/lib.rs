//! Typed interface to KVM: a virtual machine and its vCPUs.
//!
//! Invariants: [`Kvm::from_fd`] finds and names everything that the host's KVM lacks. A [`Vm`] keeps each
//! mapping that the guest can access alive while it can. This crate knows no devices.
//!
//! | module | contents |
//! |---|---|
//! | [`kvm`] | `/dev/kvm` and its [`Capabilities`] |
//! | [`vm`] | memory slots, interrupt controllers, irqfds, ioeventfds |
//! | [`vcpu`] | registers, CPUID, and running until an [`Exit`] |
//! | [`kick`] | makes a running vCPU leave the guest, from another thread |
//! | [`cpuid`] | the CPUID of each vCPU |
//! | `save`, [`state`] | saves and restores everything that KVM holds, and its encoding |
//! | [`time`] | guest time that continues after a thaw |
//!
//! Creation order, as another one is refused or slower: memory slots, interrupt controllers, vCPUs, then
//! irqfds and ioeventfds.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod cpuid;
pub mod kick;
pub mod kvm;
mod msr;
mod save;
pub mod state;
pub mod time;
pub mod vcpu;
pub mod vm;
mod xsave;

pub use kick::Kicker;
pub use kvm::{Capabilities, Kvm};
pub use kvm_bindings::{CpuId, kvm_regs, kvm_segment, kvm_sregs};
pub use state::{ClockState, InterruptPart, InterruptState, StateError, VcpuPart, VcpuState};
pub use time::GuestTime;
pub use vcpu::{Exit, Vcpu};
pub use vm::{Access, Vm};
pub use vmm_sys_util::eventfd::EventFd;

use std::io;

/// Why a KVM operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the descriptor is not /dev/kvm: {0}")]
    NotKvm(String),
    #[error("this host's KVM lacks {0}: a newer kernel, or a host with that capability, is needed")]
    Missing(&'static str),
    #[error("{call} failed: {source}")]
    Ioctl { call: &'static str, source: io::Error },
    #[error("memory slot {slot} (guest address {address:#x}, {size:#x} bytes) is not made of whole pages")]
    Unaligned { slot: u32, address: u64, size: u64 },
    #[error("KVM refuses MSR {index:#x} = {value:#x}")]
    Msr { index: u32, value: u64 },
    #[error("the saved vCPU has {0}, which turns nested virtualisation on: no machine here was given that")]
    Virtualises(&'static str),
    #[error(
        "vCPU {vcpu} is in the middle of an access to a device: it can be saved after its next run was interrupted"
    )]
    Unfinished { vcpu: u8 },
    #[error("vCPU {vcpu} was restored and its time not started")]
    TimeStopped { vcpu: u8 },
    #[error(
        "the saved vCPUs' TSC runs at {saved} kHz, this host's at {host} kHz, which it cannot scale: thaw on a host of that \
         frequency, or with TSC scaling"
    )]
    TscFrequency { saved: u32, host: u32 },
    #[error(
        "this host is no x86-64-v{level}: it lacks {missing}; use a lower CPU baseline, or the host's own"
    )]
    BelowBaseline { level: u8, missing: String },
    #[error(
        "the saved XSAVE area has {saved} bytes, this host's {host}: thaw on a host with those registers"
    )]
    XsaveSize { saved: usize, host: usize },
}

impl Error {
    /// Names the failed call.
    fn ioctl(call: &'static str) -> impl FnOnce(vmm_sys_util::errno::Error) -> Error {
        move |errno| Error::Ioctl {
            call,
            source: errno.into(),
        }
    }
}

pub type Result<T> = std::result::Result<T, Error>;
