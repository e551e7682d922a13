//! One microVM: memory, buses, virtio devices, boot, jail.
//!
//! | module | what |
//! |---|---|
//! | [`layout`] | the guest-physical address map |
//! | [`memory`] | boot memory, on both sides of the MMIO hole |
//! | [`arch`] | what a PVH guest finds at its entry: registers, start info, ACPI tables |
//! | [`kernel`] | the guest kernel's ELF file |
//! | [`bus`] | where port and MMIO accesses go |
//! | [`console`] | the 16550, for logs |
//! | [`power`] | ACPI sleep and reset registers |
//! | [`virtio`] | every virtio device |
//! | [`vcpu`] | the vCPU threads: run, pause, resume, end |
//! | [`machine`] | the machine's life, as states that own what each needs |
//! | [`events`] | what the VMM says unasked |
//! | [`control`] | the server of [`thaw_protocol::control`] |
//! | [`jail`] | what this process gives up before it serves anybody |
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod events;
pub mod layout;
pub mod memory;
pub mod virtio;
