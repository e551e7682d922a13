//! The pages a clone touches first: recorded once, mapped in advance ever after.

use std::fs::File;

use super::freeze::FreezeError;
use super::{FileError, MemoryMap};
use crate::memory::GuestMemory;

/// Pages, as runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    runs: Vec<Run>,
}

/// Neighbouring pages, all read or all written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset in the memory file, in pages.
    pub first: u64,
    pub pages: u32,
    /// The guest, or a device, wrote them.
    pub written: bool,
}

/// What was mapped in advance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Populated {
    pub pages: u64,
    /// Nanoseconds it took.
    pub ns: u64,
}

/// The pages touched since memory was mapped by `map`. `pagemap` is this process's.
pub fn record(memory: &GuestMemory, map: &MemoryMap, pagemap: &File) -> Result<WorkingSet, FreezeError> {
    let _ = (memory, map, pagemap);
    unimplemented!()
}

/// Maps the pages of `set` that the map has. Best effort: what fails is logged, and only slower.
pub fn populate(memory: &GuestMemory, map: &MemoryMap, set: &WorkingSet) -> Populated {
    let _ = (memory, map, set);
    unimplemented!()
}

impl WorkingSet {
    /// Sorted by page.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Writes the file, which is empty.
    pub fn write(&self, file: &File) -> Result<(), FileError> {
        let _ = file;
        unimplemented!()
    }

    /// Reads and checks a file.
    pub fn read(file: &File) -> Result<WorkingSet, FileError> {
        let _ = file;
        unimplemented!()
    }
}
