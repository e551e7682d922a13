//! Templates: guests that were booted once and frozen with only the agent in them. Every sandbox is thawed from one.
//!
//! | module | noun |
//! |---|---|
//! | [`command_line`] | the kernel command line of guests |
//! | [`key`] | the ingredients of a template: with another kernel, guest image, VMM or processor, it is another template |
//! | [`store`] | the templates of this node, `THAW_DATA/templates/<key>` |
//! | [`build`] | making one: once, however many callers need it at the same time |
//! | `build_lock` | the lock a builder holds |
//! | [`removal`] | removes those that nothing lies on |
//!
//! Invariant: a key names one template for ever: the one made from exactly the ingredients it is the hash of. A container image is never
//! among them.

use std::cmp::Reverse;

use thaw_protocol::control::{CpuBaseline, VCPUS};

use self::command_line::command_line;
use crate::snapshot::Manifest;

pub mod build;
mod build_lock;
pub mod command_line;
pub mod key;
pub mod removal;
mod shown;
pub mod store;

pub use build::{FrozenInto, Progress, Step, Template};
pub use key::Key;
pub use shown::{baseline, describe};
pub use store::{Entry, Templates};

/// vCPUs of the templates that a node makes by itself. A sandbox gets the fewest that suffice: each vCPU costs time at a machine's start and
/// at its end, also if the guest does not use it.
const VCPU_COUNTS: [u8; 3] = [1, COMMON_VCPUS, *VCPUS.end()];
/// vCPUs of a template that is built ahead, for most sandboxes.
const COMMON_VCPUS: u8 = 4;
/// Boot memory of the templates that a node makes by itself, MiB. A sandbox gets the rest of its memory by virtio-mem, which costs it time
/// and memory of its own: the guest's page structures of plugged memory are its own, those of boot memory the template's.
const MEMORY_SIZES_MIB: [u32; 5] = [COMMON_MEMORY_MIB, 256, 512, 1024, 2048];
/// Boot memory of the first template of each number of vCPUs, which serves all larger sandboxes too.
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
    /// The shape that serves most sandboxes.
    fn default() -> Shape {
        Shape::serving(COMMON_VCPUS, COMMON_MEMORY_MIB)
    }
}

impl Shape {
    /// The first template for a sandbox of this size: the same for all sizes from 128 MiB up, one each for 1 vCPU, up to 4, and more.
    pub fn serving(vcpus: u8, memory_mib: u32) -> Shape {
        let enough = VCPU_COUNTS.into_iter().find(|count| *count >= vcpus);
        Shape {
            vcpus: enough.unwrap_or(*VCPUS.end()),
            memory_mib: memory_mib.min(COMMON_MEMORY_MIB),
            cpu: CpuBaseline::Host,
        }
    }

    /// The first templates of any number of vCPUs that suffices for a sandbox of this size, from the fewest on.
    fn sufficient(vcpus: u8, memory_mib: u32) -> impl Iterator<Item = Shape> {
        let counts = VCPU_COUNTS.into_iter().filter(move |count| *count >= vcpus);
        counts.map(move |count| Shape::serving(count, memory_mib))
    }

    /// The template that serves a sandbox of this size best: the one with the most boot memory of those that a node makes by itself.
    pub fn fitting(vcpus: u8, memory_mib: u32) -> Shape {
        let sizes = MEMORY_SIZES_MIB.into_iter().rev();
        let common = Shape::serving(vcpus, memory_mib);
        Shape {
            memory_mib: sizes
                .into_iter()
                .find(|size| *size <= memory_mib)
                .unwrap_or(common.memory_mib),
            ..common
        }
    }

    /// Whether a sandbox of this size can be thawed from the template.
    fn can_serve(&self, vcpus: u8, memory_mib: u32) -> bool {
        self.vcpus >= vcpus && self.memory_mib <= memory_mib
    }

    /// Sorts templates that can serve a sandbox with `vcpus`: those with the usual number of vCPUs first, then those with the fewest,
    /// and of those the one with the most boot memory.
    fn preference(&self, vcpus: u8) -> (bool, u8, Reverse<u32>) {
        let usual = Shape::serving(vcpus, self.memory_mib).vcpus;
        (self.vcpus != usual, self.vcpus, Reverse(self.memory_mib))
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
