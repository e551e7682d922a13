//! The `state` file: a machine but for its memory.

use std::fs::File;

use super::{FileError, MemoryMap};
use crate::virtio::state::BusRecords;

/// What a machine was made with. A snapshot thaws only in a machine made with the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub vcpus: u8,
    /// Boot memory, MiB.
    pub memory_mib: u32,
    /// [`crate::layout::VERSION`] of the address map.
    pub address_map: u32,
}

/// A frozen machine, but for its memory's contents.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    pub shape: Shape,
    pub bus: BusRecords,
    pub memory: MemoryMap,
}

impl Snapshot {
    /// Writes the file, which is empty.
    pub fn write(&self, file: &File) -> Result<(), FileError> {
        let _ = file;
        unimplemented!()
    }

    /// Reads and checks a file.
    pub fn read(file: &File) -> Result<Snapshot, FileError> {
        let _ = file;
        unimplemented!()
    }
}
