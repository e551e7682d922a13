//! Grows a mounted ext4 file system to the end of a larger disk.
//!
//! Invariant: a file system that fills its disk is left alone. The superblock comes from the host; it is only
//! compared, and the kernel checks the requested size.

use std::fs::File;
use std::io::Seek;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Error, Result, WithContext};

/// `_IOW('f', 16, __u64)`: grow to this number of blocks (include/uapi/linux/ext4.h).
const EXT4_IOC_RESIZE_FS: libc::Ioctl = 0x4008_6610_u32 as libc::Ioctl;
/// Offset of the superblock in bytes, and offsets within it (Documentation/filesystems/ext4/super.rst).
const SUPERBLOCK: u64 = 1024;
const BLOCKS_COUNT_LO: usize = 0x04;
const LOG_BLOCK_SIZE: usize = 0x18;
const MAGIC: usize = 0x38;
const FEATURE_INCOMPAT: usize = 0x60;
const BLOCKS_COUNT_HI: usize = 0x150;
const EXT4_MAGIC: u16 = 0xef53;
const INCOMPAT_64BIT: u32 = 0x80;
/// Largest `s_log_block_size`: blocks of 64 KiB.
const MOST_LOG_BLOCK_SIZE: u32 = 6;

/// A file system's size according to its superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    blocks: u64,
    /// In bytes.
    block_size: u64,
}

impl Extent {
    /// `None` if this is not an ext4 superblock.
    fn of(superblock: &[u8; 1024]) -> Option<Extent> {
        let word = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&superblock[at..at + 4]);
            u32::from_le_bytes(bytes)
        };
        let magic = u16::from_le_bytes([superblock[MAGIC], superblock[MAGIC + 1]]);
        let log = word(LOG_BLOCK_SIZE);
        if magic != EXT4_MAGIC || log > MOST_LOG_BLOCK_SIZE {
            return None;
        }
        let high = match word(FEATURE_INCOMPAT) & INCOMPAT_64BIT {
            0 => 0,
            _ => word(BLOCKS_COUNT_HI),
        };
        Some(Extent {
            blocks: u64::from(high) << 32 | u64::from(word(BLOCKS_COUNT_LO)),
            block_size: 1024 << log,
        })
    }

    /// The number of blocks for a disk of `bytes`, or `None` if the file system has that many.
    fn grown(self, bytes: u64) -> Option<u64> {
        let room = bytes / self.block_size;
        (room > self.blocks).then_some(room)
    }
}

/// Grows the ext4 of `device`, mounted at `at`, to the end of the disk.
pub fn fill_disk(device: &str, at: &Path) -> Result<()> {
    let mut disk = File::open(device).with_context(|| format!("open {device}"))?;
    let bytes = disk
        .seek(std::io::SeekFrom::End(0))
        .with_context(|| format!("measure {device}"))?;
    let mut superblock = [0; 1024];
    disk.read_exact_at(&mut superblock, SUPERBLOCK)
        .with_context(|| format!("read the superblock of {device}"))?;
    let extent =
        Extent::of(&superblock).ok_or_else(|| Error::Invalid(format!("{device} has no ext4 to grow")))?;
    let Some(blocks) = extent.grown(bytes) else {
        return Ok(());
    };
    let root = File::open(at).with_context(|| format!("open {}", at.display()))?;
    // SAFETY: the kernel reads the eight bytes of `blocks`, which outlive the call.
    if unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const blocks) } != 0 {
        return Err(Error::last("grow the file system of a disk"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(blocks: u64, log: u32, wide: bool) -> [u8; 1024] {
        let mut bytes = [0; 1024];
        bytes[MAGIC..MAGIC + 2].copy_from_slice(&EXT4_MAGIC.to_le_bytes());
        bytes[BLOCKS_COUNT_LO..BLOCKS_COUNT_LO + 4].copy_from_slice(&(blocks as u32).to_le_bytes());
        bytes[BLOCKS_COUNT_HI..BLOCKS_COUNT_HI + 4].copy_from_slice(&((blocks >> 32) as u32).to_le_bytes());
        bytes[LOG_BLOCK_SIZE..LOG_BLOCK_SIZE + 4].copy_from_slice(&log.to_le_bytes());
        let features: u32 = if wide { INCOMPAT_64BIT } else { 0 };
        bytes[FEATURE_INCOMPAT..FEATURE_INCOMPAT + 4].copy_from_slice(&features.to_le_bytes());
        bytes
    }

    #[test]
    fn file_system_grows_to_whole_blocks_and_never_shrinks() {
        let extent = Extent::of(&superblock(1000, 2, true)).unwrap();
        assert_eq!(extent.block_size, 4096);
        assert_eq!(extent.grown(1000 * 4096), None);
        assert_eq!(extent.grown(999 * 4096), None);
        assert_eq!(extent.grown(1000 * 4096 + 4095), None);
        assert_eq!(extent.grown(1001 * 4096 + 1), Some(1001));
        let wide = Extent::of(&superblock((1 << 32) + 7, 2, true)).unwrap();
        assert_eq!(wide.blocks, (1 << 32) + 7);
        let narrow = Extent::of(&superblock((1 << 32) + 7, 2, false)).unwrap();
        assert_eq!(narrow.blocks, 7);
    }

    #[test]
    fn device_without_ext4_is_not_grown() {
        assert_eq!(Extent::of(&[0; 1024]), None);
        assert_eq!(Extent::of(&superblock(1, 7, true)), None);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let path = file.path().to_str().unwrap();
        let error = fill_disk(path, Path::new("/")).unwrap_err().to_string();
        assert!(error.contains(path) && error.contains("no ext4"), "{error}");
        assert!(fill_disk("/no/such/disk", Path::new("/")).is_err());
    }
}
