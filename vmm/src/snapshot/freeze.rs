//! Guest memory to a file: all of it, or what was written since the restore.

use std::fs::File;
use std::io;
use std::ops::Range;

use thaw_protocol::control::FreezeKind;

use super::{MapError, MemoryMap};
use crate::memory::GuestMemory;

/// Why memory could not be written.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    #[error("this machine was booted, not restored: there is nothing to be a delta over; freeze it in full")]
    NoBase,
    #[error("this machine's memory has {0} layers already; freeze it in full")]
    TooManyLayers(u8),
    #[error("guest memory {:#x}..{:#x} is not this machine's", .0.start, .0.end)]
    NotMemory(Range<u64>),
    #[error("the memory file is not empty")]
    NotEmpty,
    #[error("the descriptor handed as pagemap is not that of this process")]
    NotOurPagemap,
    #[error("reading the pagemap: {0}")]
    Pagemap(io::Error),
    #[error("writing memory {guest_address:#x} ({size:#x} bytes): {error}")]
    Write { guest_address: u64, size: u64, error: io::Error },
    #[error("the memory file: {0}")]
    File(io::Error),
    #[error(transparent)]
    Map(#[from] MapError),
}

/// Memory that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// Where all of guest memory is now: the top layer is the file written.
    pub map: MemoryMap,
    /// Bytes written; the rest of the file is holes.
    pub bytes: u64,
}

/// Writes guest memory to `out`, which is empty and becomes a sparse file of the map's size. Nothing touches guest
/// memory meanwhile: vCPUs are paused, devices quiet.
///
/// `memory` is boot memory and virtio-mem's region. `live` are the guest addresses that are memory now: boot memory and
/// the blocks virtio-mem has plugged; sorted, disjoint, whole pages. `base` is the map this machine was restored from, if
/// it was. `pagemap` is this process's.
///
/// [`FreezeKind::Full`]: one layer with all that is not zero. [`FreezeKind::Delta`]: one more layer than `base`, with the
/// pages written since the restore.
pub fn freeze_memory(
    kind: FreezeKind,
    memory: &GuestMemory,
    live: &[Range<u64>],
    base: Option<&MemoryMap>,
    pagemap: &File,
    out: &File,
) -> Result<Frozen, FreezeError> {
    let _ = (kind, memory, live, base, pagemap, out);
    unimplemented!()
}
