//! The devices of a machine and their backends.

use serde::{Deserialize, Serialize};

use crate::tags;

/// The devices of every machine, whether or not they have a backend. The discriminant is the device's slot,
/// which determines its MMIO window, interrupt line and ACPI `_UID`. Templates contain these, so the order
/// never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(remote = "Self")]
#[repr(u8)]
pub enum DeviceId {
    /// virtio-fs, tag `thaw`: the image slots, read-only.
    Root = 0,
    /// virtio-fs, tag [`crate::share::TAG`]: writable host directories.
    Shared = 1,
    /// virtio-blk: `/dev/vda` is the writable layer, the others are block devices of the host
    /// ([`HOST_DISKS`]).
    Blk0 = 2,
    Blk1 = 3,
    Blk2 = 4,
    Blk3 = 5,
    Net = 6,
    Vsock = 7,
    /// virtio-pmem: `/dev/pmem0` is the guest image, `/dev/pmem1` is for image data.
    Pmem0 = 8,
    Pmem1 = 9,
    /// virtio-mem.
    Mem = 10,
    Balloon = 11,
    Rng = 12,
    /// 16550 serial console: output only, for logs.
    Console = 13,
}

tags!(DeviceId {
    Root = DeviceId::Root as u32,
    Shared = DeviceId::Shared as u32,
    Blk0 = DeviceId::Blk0 as u32,
    Blk1 = DeviceId::Blk1 as u32,
    Blk2 = DeviceId::Blk2 as u32,
    Blk3 = DeviceId::Blk3 as u32,
    Net = DeviceId::Net as u32,
    Vsock = DeviceId::Vsock as u32,
    Pmem0 = DeviceId::Pmem0 as u32,
    Pmem1 = DeviceId::Pmem1 as u32,
    Mem = DeviceId::Mem as u32,
    Balloon = DeviceId::Balloon as u32,
    Rng = DeviceId::Rng as u32,
    Console = DeviceId::Console as u32,
});

/// Slots for block devices of the host, which can be attached while the machine runs. The last one holds the
/// image if the image is served as a disk.
pub const HOST_DISKS: [DeviceId; 3] = [DeviceId::Blk1, DeviceId::Blk2, DeviceId::Blk3];

impl DeviceId {
    /// Every device, in slot order.
    pub const ALL: [DeviceId; 14] = [
        DeviceId::Root,
        DeviceId::Shared,
        DeviceId::Blk0,
        DeviceId::Blk1,
        DeviceId::Blk2,
        DeviceId::Blk3,
        DeviceId::Net,
        DeviceId::Vsock,
        DeviceId::Pmem0,
        DeviceId::Pmem1,
        DeviceId::Mem,
        DeviceId::Balloon,
        DeviceId::Rng,
        DeviceId::Console,
    ];
}

/// The host side of a device. Each variant documents the descriptors that its request carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Backend {
    /// One descriptor: a regular file or block device. Its size, rounded down to 512 bytes, is the capacity.
    /// A machine that has a block device cannot be frozen.
    Disk { read_only: bool },
    /// A writable disk over a base that is only read. Two descriptors: the base, a regular file whose size,
    /// rounded down to 512 bytes, is the capacity; and the disk's own layer over it
    /// ([`crate::disk_layer`]), a regular file open for reading and writing. Since version 7.
    LayeredDisk,
    /// One descriptor: a tap with `IFF_NO_PI | IFF_VNET_HDR`. `prepared` means that its vnet header size is
    /// 12 bytes and all its offloads are on (checksums, TSO4, TSO6, ECN). The VMM then need not query the
    /// tap, which would take the host's RTNL lock.
    Tap { mac: [u8; 6], prepared: bool },
    /// One descriptor: a listening unix stream socket. A client sends `CONNECT <port>\n` and receives `OK
    /// <host port>\n` once the guest has accepted (the hybrid-vsock convention of Firecracker and Kata).
    Vsock,
    /// One descriptor: a regular file, mapped privately into the pmem window. It must fit the window.
    Pmem,
    /// One descriptor to write console output to. The VMM drops output that would block.
    Console,
    /// One descriptor: a SEQPACKET socket for chunk misses ([`crate::miss`]). It replaces an earlier one; the
    /// VMM sends pending misses again.
    Misses,
    /// One descriptor: a SEQPACKET socket. The root device, or a disk that is an image, sends the accesses of
    /// the guest over it ([`crate::access`]). It replaces an earlier one.
    Accesses,
    /// A read-only disk that contains an image as one EROFS file system: its metadata, then its blobs at
    /// their addresses. Descriptors: the metadata file, then data and ready bitmap of each blob, then a
    /// SEQPACKET socket for misses, which [`Backend::Misses`] replaces.
    Image { blobs: Vec<BlobRange> },
    /// For [`DeviceId::Shared`]. One descriptor: the STREAM socket to a thaw-share, its relay
    /// ([`crate::share`]). A second one may be attached only after the first closed. A machine with shares
    /// cannot be frozen, because thaw-share holds the state of the guest's open files.
    Share,
}

impl Backend {
    /// The first protocol version that has this backend.
    pub fn since(&self) -> u32 {
        match self {
            Backend::LayeredDisk => 7,
            _ => 4,
        }
    }
}

tags!(Backend {
    Disk = 0,
    Tap = 1,
    Vsock = 2,
    Pmem = 3,
    Console = 4,
    Misses = 5,
    Accesses = 6,
    Image = 7,
    Share = 8,
    LayeredDisk = 9,
});

/// One cache file of an image: a range of the address space that the image's EROFS metadata refers to
/// (docs/image-format.md).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRange {
    /// First byte in that address space; a multiple of 4096.
    pub address: u64,
    /// Length in bytes; a multiple of 4096.
    pub length: u64,
    /// SHA-256 of the uncompressed layer whose file data this is (its DiffID). A [`crate::miss::Miss`] names
    /// the blob by it.
    pub digest: [u8; 32],
}

/// An image to show in a slot of the root device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpec {
    /// Directory name under the root device's root.
    pub name: String,
    /// The cache files, by address. Descriptors of the request: the metadata file, then data and ready bitmap
    /// of each blob.
    pub blobs: Vec<BlobRange>,
}
