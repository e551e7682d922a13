//! One microVM: memory, buses, virtio devices, boot, jail.
//!
//! | module | contents |
//! |---|---|
//! | [`layout`] | the guest-physical address map |
//! | [`memory`] | boot memory, on both sides of the MMIO hole |
//! | [`arch`] | the state that a PVH guest starts with: registers, start info, ACPI tables |
//! | [`kernel`] | the guest kernel's ELF file |
//! | [`bus`] | sends port and MMIO accesses to devices |
//! | [`console`] | the 16550, for logs |
//! | [`power`] | ACPI sleep and reset registers |
//! | [`virtio`] | every virtio device |
//! | [`vcpu`] | the vCPU threads: run, pause, resume, end |
//! | [`machine`] | the machine's life, as states that own what each needs |
//! | [`vmgenid`] | the VM generation ID |
//! | [`snapshot`] | a frozen machine as files |
//! | [`events`] | messages that the VMM sends without a request |
//! | [`control`] | the server of [`thaw_protocol::control`] |
//! | [`jail`] | takes rights away from this process before it serves a request |
//! | [`multihit`] | whether guests may execute from huge pages |
//! | [`clock`] | the clock that timestamps are taken from |
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod arch;
pub mod bus;
pub mod clock;
pub mod console;
pub mod control;
pub mod events;
pub mod jail;
pub mod kernel;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod multihit;
pub mod power;
pub mod snapshot;
pub mod vcpu;
pub mod virtio;
pub mod vmgenid;
