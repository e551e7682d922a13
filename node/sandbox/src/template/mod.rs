//! Templates: guests that were booted once and frozen with only the agent in them. Every sandbox is thawed from one.
//!
//! | module | noun |
//! |---|---|
//! | [`command_line`] | the kernel command line of guests |
//! | [`key`] | the ingredients of a template: with another kernel, guest image, VMM or processor, it is another template |
//! | [`store`] | the templates of this node, `THAW_DATA/templates/<key>` |
//! | [`build`] | making one: once, however many callers need it at the same time |
//! | `build_lock` | the lock a builder holds |
//!
//! Invariant: a key names one template for ever: the one made from exactly the ingredients it is the hash of. A container image is never
//! among them.

use thaw_protocol::control::{CpuBaseline, VCPUS};

use self::command_line::command_line;
use crate::snapshot::Manifest;

pub mod build;
mod build_lock;
pub mod command_line;
pub mod key;
mod shown;
pub mod store;

pub use build::{FrozenInto, Progress, Step, Template};
pub use key::Key;
pub use shown::{baseline, describe};
pub use store::{Entry, Templates};

/// vCPUs of the template for sandboxes with up to as many.
const COMMON_VCPUS: u8 = 4;
/// Boot memory of a template, MiB. A sandbox gets the rest of its memory by virtio-mem.
const COMMON_MEMORY_MIB: u32 = 128;

/// The shape of a template's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// vCPUs of the machine: the maximum that a sandbox thawed from it can have online.
    pub vcpus: u8,
    /// Boot memory in MiB: the minimum of a sandbox thawed from it.
    pub memory_mib: u32,
    pub cpu: CpuBaseline,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape::serving(1, COMMON_MEMORY_MIB)
    }
}

impl Shape {
    /// The template for a sandbox of this size: the same for all sizes from 128 MiB up and up to 4 vCPUs.
    pub fn serving(vcpus: u8, memory_mib: u32) -> Shape {
        Shape {
            vcpus: match vcpus {
                0..=COMMON_VCPUS => COMMON_VCPUS,
                _ => *VCPUS.end(),
            },
            memory_mib: memory_mib.min(COMMON_MEMORY_MIB),
            cpu: CpuBaseline::Host,
        }
    }
    /// The shape of an existing template.
    fn of(manifest: &Manifest) -> Shape {
        Shape {
            vcpus: manifest.subject.machine.vcpus,
            memory_mib: manifest.subject.machine.memory_mib,
            cpu: manifest.subject.cpu.baseline,
        }
    }
}

/// Everything a template depends on, except the files of [`crate::paths::Paths`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    pub shape: Shape,
    /// Command line of the guest kernel.
    pub command_line: String,
}

impl Recipe {
    /// The recipe for a template of this shape.
    pub fn of(shape: Shape) -> Recipe {
        Recipe {
            shape,
            command_line: command_line(),
        }
    }
}
