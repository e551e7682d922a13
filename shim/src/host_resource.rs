//! Resources of the host that a container can use: files and block devices.

use std::fmt;

/// A mount that thawd makes, in containerd's form.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// `bind`, or a file system type.
    pub kind: String,
    pub source: String,
    pub options: Vec<String>,
}

/// A block device of the host, which thawd attaches to the microVM as a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockDevice {
    pub major: u32,
    pub minor: u32,
    pub read_only: bool,
}

/// A resource of the host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostResource {
    Files(Source),
    Disk(BlockDevice),
}

impl fmt::Display for HostResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostResource::Files(source) => f.write_str(&source.source),
            HostResource::Disk(disk) => write!(f, "block device {}:{}", disk.major, disk.minor),
        }
    }
}
