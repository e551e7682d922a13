//! A frozen machine as files, which the VMM writes at a freeze and reads at a restore.
//!
//! | module | contents |
//! |---|---|
//! | [`state_file`] | the `state` file: a [`Snapshot`] as hashed, versioned records |
//! | [`records`] | the framing of `state` and `working-set`: header, hash, records, and reading them from hostile bytes |
//! | [`memory_map`] | which bytes of the memory files are the guest's memory |
//! | [`pagemap`] | which pages of this process are present, and which were written |
//! | [`ranges`] | lists of address ranges as sets |
//! | [`mapping`] | changes the mappings of guest memory, in place |
//! | [`freeze`] | writes guest memory to a sparse file: all of it, or what differs from what lies below |
//! | [`live`] | the same while the guest runs |
//! | [`protection`] | copies pages of guest memory before they change |
//! | [`bits`] | a bit for each page |
//! | [`restore`] | maps memory files over the reserved guest memory |
//! | [`working_set`] | the pages a clone touches first: recorded once, then mapped in advance in every clone |
//! | [`uffd`] | memory that is not on this host yet: a userfaultfd over the ranges of the memory files |
//! | [`userfault`] | the system calls of a userfaultfd |
//!
//! Invariants: nothing here opens a path, all files come as descriptors; a file is checked whole before it changes
//! anything; a restore never writes to the files. `docs/snapshot-format.md` describes them byte by byte.

// Tests mean lists of one range, and empty ranges.
#![cfg_attr(test, allow(clippy::single_range_in_vec_init, clippy::reversed_empty_ranges))]

mod bits;
pub mod freeze;
pub mod live;
pub mod mapping;
pub mod memory_map;
pub mod pagemap;
pub mod protection;
pub mod ranges;
pub mod records;
pub mod restore;
pub mod state_file;
#[cfg(test)]
mod testing;
pub mod uffd;
mod userfault;
pub mod working_set;

pub use freeze::{FreezeError, Frozen, freeze_memory};
pub use memory_map::{Extent, MapError, MemoryMap, Region};
pub use records::FileError;
pub use restore::{RestoreError, check_memory, map_memory};
pub use state_file::{Shape, Snapshot};

/// Bytes of a page: the unit of everything here.
pub const PAGE: u64 = 4096;

/// Does the one-time work of the first file read: BLAKE3 queries the processor's features, and under a hypervisor each query is an exit.
pub fn warm_up() {
    std::hint::black_box(blake3::hash(&[]));
}
