//! The ready file: a header, one bit per chunk, one digest per chunk.
//!
//! In a *sealed* file all digests are known when the file is made. In a *learned* file a digest is zero until its chunk arrives; then the
//! digest is recorded before the bit is set. A digest torn by a crash does not match, so its chunk counts as missing.
//!
//! The header and the bitmap are mapped shared and accessed only as atomics. So a file that another process changes, rightly or not, can
//! give wrong answers but cause no undefined behaviour. Files are never truncated while mapped.

mod stamp;

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thaw_failpoint::{Failpoint, reach};

use super::{BlobError, CHUNK_LOG2};
use crate::guarded::{Content, Guard};

const MAGIC: [u8; 8] = *b"THAWREDY";
const VERSION: u32 = 2;
const HEADER_SIZE: u64 = 4096;
const HEADER_USED: usize = 128;
const BOOT_ID: Range<usize> = 32..48;
const DIGEST_SIZE: u64 = 32;
/// The digest of a chunk that has not been fetched yet.
const UNKNOWN: [u8; DIGEST_SIZE as usize] = [0; DIGEST_SIZE as usize];
const ID: Range<usize> = 48..80;
const FLAGS: Range<usize> = 112..116;
/// The only flag: digests are learned.
const LEARNED: u32 = 1;

/// Largest blob, in bytes. No layer is larger. It limits how much a hostile header makes a reader map.
const MAX_LENGTH: u64 = 1 << 42;

/// The boot of the host in which the bits were set: `/proc/sys/kernel/random/boot_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootId(pub [u8; 16]);

impl BootId {
    /// No boot: bits with this ID are never trusted.
    pub const NONE: Self = Self([0; 16]);

    /// This boot's id, or [`BootId::NONE`] if the kernel does not provide it.
    pub fn current() -> Self {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: Vec<u8> = text
            .chars()
            .filter_map(|c| c.to_digit(16).map(|d| d as u8))
            .collect();
        let mut id = [0; 16];
        if digits.len() == 32 {
            for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
                *byte = pair[0] << 4 | pair[1];
            }
        }
        Self(id)
    }
}

/// The fixed part of a ready file.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub chunk_log2: u32,
    pub length: u64,
    pub boot: BootId,
    pub id: [u8; 32],
    seal: [u8; 32],
    /// Whether digests are learned as chunks arrive.
    pub learned: bool,
}

/// The digests known when a blob is made.
#[derive(Clone, Copy, Debug)]
pub enum Digests<'a> {
    /// All: one for each chunk. The table never changes and is sealed.
    Sealed(&'a [[u8; 32]]),
    /// None yet.
    Learned,
}

fn field<const N: usize>(bytes: &[u8; HEADER_USED], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

impl Header {
    /// Reads the header and checks its sizes against the file's.
    pub fn read(file: &File) -> Result<Self, BlobError> {
        let size = file.metadata()?.len();
        if size < HEADER_SIZE {
            return Err(BlobError::Damaged("shorter than its header"));
        }
        let mut bytes = [0; HEADER_USED];
        file.read_exact_at(&mut bytes, 0)?;
        if field::<8>(&bytes, 0) != MAGIC {
            return Err(BlobError::Damaged("it does not start with its magic number"));
        }
        let version = u32::from_le_bytes(field(&bytes, 8));
        if version != VERSION {
            return Err(BlobError::Version(version));
        }
        let flags = u32::from_le_bytes(field(&bytes, FLAGS.start));
        if flags & !LEARNED != 0 {
            return Err(BlobError::Damaged("flags this program does not know"));
        }
        let header = Self {
            chunk_log2: u32::from_le_bytes(field(&bytes, 12)),
            length: u64::from_le_bytes(field(&bytes, 16)),
            boot: BootId(field(&bytes, BOOT_ID.start)),
            id: field(&bytes, ID.start),
            seal: field(&bytes, 80),
            learned: flags & LEARNED != 0,
        };
        if !(12..=24).contains(&header.chunk_log2) {
            return Err(BlobError::Damaged("a chunk size out of bounds"));
        }
        if header.length > MAX_LENGTH || !header.length.is_multiple_of(super::BLOCK_SIZE) {
            return Err(BlobError::Damaged("a blob length out of bounds"));
        }
        if u64::from_le_bytes(field(&bytes, 24)) != header.chunk_count() {
            return Err(BlobError::Damaged(
                "a chunk count that does not fit the blob length",
            ));
        }
        if size < header.digests_at() + header.chunk_count() * DIGEST_SIZE {
            return Err(BlobError::Damaged("shorter than its digests"));
        }
        Ok(header)
    }

    fn encode(&self) -> [u8; HEADER_USED] {
        let mut bytes = [0; HEADER_USED];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.chunk_log2.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.chunk_count().to_le_bytes());
        bytes[BOOT_ID].copy_from_slice(&self.boot.0);
        bytes[ID].copy_from_slice(&self.id);
        bytes[80..112].copy_from_slice(&self.seal);
        bytes[FLAGS].copy_from_slice(&(if self.learned { LEARNED } else { 0 }).to_le_bytes());
        bytes
    }

    /// BLAKE3 over everything that never changes: the header without boot ID and seal, and the digest table of a sealed file.
    fn seal_of(&self, table: &[u8]) -> [u8; 32] {
        let bytes = self.encode();
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&bytes[..BOOT_ID.start])
            .update(&bytes[ID])
            .update(&bytes[FLAGS]);
        if !self.learned {
            hasher.update(table);
        }
        *hasher.finalize().as_bytes()
    }

    pub fn chunk_size(&self) -> u64 {
        1 << self.chunk_log2
    }

    pub fn chunk_count(&self) -> u64 {
        self.length.div_ceil(self.chunk_size())
    }

    /// The byte range of a chunk; the last chunk ends with the blob.
    pub fn chunk_range(&self, chunk: u64) -> Range<u64> {
        let start = chunk << self.chunk_log2;
        start..(start + self.chunk_size()).min(self.length)
    }

    /// The chunks that contain `offset..offset + length`, limited to the blob.
    pub fn chunks_of(&self, offset: u64, length: u64) -> Range<u64> {
        let end = offset.saturating_add(length).min(self.length);
        if length == 0 || offset >= end {
            return 0..0;
        }
        offset >> self.chunk_log2..end.div_ceil(self.chunk_size())
    }

    fn digests_at(&self) -> u64 {
        HEADER_SIZE + self.chunk_count().div_ceil(8).next_multiple_of(4096)
    }
}

/// The header and bitmap of a ready file, mapped shared.
pub(super) struct Mapping {
    /// For a read-only mapping. It ends before the mapping does.
    guard: Option<Guard>,
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is accessed only as atomics, and is unmapped only when its one owner is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access is atomic access.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub fn read_only(file: &File, header: &Header) -> io::Result<Self> {
        Self::new(file, header, ProtFlags::READ)
    }

    fn new(file: &File, header: &Header, protection: ProtFlags) -> io::Result<Self> {
        let length = usize::try_from(header.digests_at()).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address the kernel chooses overlaps no other memory of this process.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        let guard = (!protection.contains(ProtFlags::WRITE)).then(|| Guard::new(base, length, Content::Bits));
        Ok(Self { guard, base, length })
    }

    fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: `length` bytes at `base` stay mapped as long as `self` lives, AtomicU8 has the layout of u8, and every access goes
        // through this slice, so a store by another process into the file races only with atomics. The file was at least this long when
        // mapped and is never truncated (module invariant), so no access faults. A read-only mapping is only loaded from: stores go through
        // `ReadyFile`, which maps for writing.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.length) }
    }

    fn bit(&self, chunk: u64) -> (Option<&AtomicU8>, u8) {
        let index = usize::try_from(HEADER_SIZE + chunk / 8).unwrap_or(usize::MAX);
        (self.bytes().get(index), 1 << (chunk % 8))
    }

    /// Whether `chunk` is ready. Acquire ordering: if so, the chunk's bytes are visible afterwards.
    pub fn is_set(&self, chunk: u64) -> bool {
        let (byte, mask) = self.bit(chunk);
        byte.is_some_and(|byte| byte.load(Ordering::Acquire) & mask != 0)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: unmaps exactly the mapping that `new` made; all borrows of it have ended.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// The ready file for its owner, the node, which may check chunks and set bits.
pub struct ReadyFile {
    file: File,
    map: Mapping,
    header: Header,
    /// Taken together with the file's lock, because the threads of a process share that lock.
    writing: Mutex<()>,
}

impl ReadyFile {
    /// Writes a new ready file and flushes it to the disk: header, digests, and either all bits set or none.
    pub fn create(
        mut file: File,
        id: [u8; 32],
        length: u64,
        digests: Digests<'_>,
        complete: bool,
        boot: BootId,
    ) -> Result<Self, BlobError> {
        let mut header = Header {
            chunk_log2: CHUNK_LOG2,
            length,
            boot,
            id,
            seal: [0; 32],
            learned: matches!(digests, Digests::Learned),
        };
        if length > MAX_LENGTH || !length.is_multiple_of(super::BLOCK_SIZE) {
            return Err(BlobError::Damaged("a blob length out of bounds"));
        }
        let table = match digests {
            Digests::Sealed(table) if table.len() as u64 != header.chunk_count() => {
                return Err(BlobError::Damaged("a digest is wanted for every chunk"));
            }
            Digests::Sealed(table) => table.as_flattened(),
            Digests::Learned if complete => {
                return Err(BlobError::Damaged("chunks nobody has seen cannot be ready"));
            }
            Digests::Learned => &[],
        };
        header.seal = header.seal_of(table);
        let mut bytes = vec![0; header.digests_at() as usize];
        bytes[..HEADER_USED].copy_from_slice(&header.encode());
        if complete {
            for chunk in 0..table.len() / DIGEST_SIZE as usize {
                bytes[HEADER_SIZE as usize + chunk / 8] |= 1 << (chunk % 8);
            }
        }
        reach(Failpoint::ReadyMade);
        file.write_all(&bytes)?;
        file.write_all(table)?;
        file.set_len(header.digests_at() + header.chunk_count() * DIGEST_SIZE)?;
        file.sync_all()?;
        reach(Failpoint::ReadyWritten);
        Self::map(file, header)
    }

    /// Opens a ready file for reading and writing, and checks its digests against their seal. A digest torn by a crash is an error.
    pub fn open(file: File) -> Result<Self, BlobError> {
        let header = Header::read(&file)?;
        let mut table = Vec::new();
        if !header.learned {
            table.resize((header.chunk_count() * DIGEST_SIZE) as usize, 0);
            file.read_exact_at(&mut table, header.digests_at())?;
        }
        if header.seal_of(&table) != header.seal {
            return Err(BlobError::Damaged("its digests do not match their seal"));
        }
        Self::map(file, header)
    }

    fn map(file: File, header: Header) -> Result<Self, BlobError> {
        let map = Mapping::new(&file, &header, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Self {
            file,
            map,
            header,
            writing: Mutex::new(()),
        })
    }

    /// Makes the bits valid for *this* boot. If they were set in another, a host crash may have lost the bytes: then all bits are cleared,
    /// and every chunk is compared with its digest before it is served again. Returns whether they were cleared.
    ///
    /// Must be called under the layer's lock, before another process gets the files.
    pub fn activate(&mut self, boot: BootId) -> Result<bool, BlobError> {
        if self.is_active(boot, &self.header.id) {
            return Ok(false);
        }
        let bitmap = HEADER_SIZE as usize..self.header.digests_at() as usize;
        for byte in self.map.bytes().get(bitmap).unwrap_or_default() {
            byte.store(0, Ordering::Release);
        }
        self.file.write_all_at(&boot.0, BOOT_ID.start as u64)?;
        self.header.boot = boot;
        Ok(true)
    }

    /// Whether the file belongs to this blob and its bits are valid for this boot.
    pub fn is_active(&self, boot: BootId, id: &[u8; 32]) -> bool {
        boot != BootId::NONE && self.header.boot == boot && self.header.id == *id
    }

    /// The blob's name.
    pub fn id(&self) -> [u8; 32] {
        self.header.id
    }

    /// Whether digests are learned as chunks arrive, instead of sealed from the start.
    pub fn is_learned(&self) -> bool {
        self.header.learned
    }

    /// Bytes of the blob.
    pub fn length(&self) -> u64 {
        self.header.length
    }

    /// Chunks of the blob.
    pub fn chunk_count(&self) -> u64 {
        self.header.chunk_count()
    }

    /// The chunks that contain `offset..offset + length`, limited to the blob.
    pub fn chunks_of(&self, offset: u64, length: u64) -> Range<u64> {
        self.header.chunks_of(offset, length)
    }

    /// The byte range of a chunk in the data file.
    pub fn chunk_range(&self, chunk: u64) -> Range<u64> {
        self.header.chunk_range(chunk)
    }

    /// Whether the chunk may be served.
    pub fn is_ready(&self, chunk: u64) -> bool {
        self.map.is_set(chunk)
    }

    /// BLAKE3 of the chunk's bytes; `None` if it has not been fetched yet.
    pub fn digest(&self, chunk: u64) -> Result<Option<[u8; 32]>, BlobError> {
        if chunk >= self.chunk_count() {
            return Err(BlobError::Damaged("a chunk beyond the end was asked for"));
        }
        let mut digest = [0; 32];
        self.file
            .read_exact_at(&mut digest, self.header.digests_at() + chunk * DIGEST_SIZE)?;
        Ok((!self.header.learned || digest != UNKNOWN).then_some(digest))
    }

    /// Records the digest of a chunk whose bytes were verified in another way. Must precede [`ReadyFile::set_ready`]: every ready chunk
    /// needs a digest to be compared with after the next boot.
    ///
    /// # Errors
    /// `Damaged` for a sealed file, whose digests do not change, and for a chunk beyond the end; `Io`.
    pub fn record(&self, chunk: u64, digest: &[u8; 32]) -> Result<(), BlobError> {
        if !self.header.learned || chunk >= self.chunk_count() {
            return Err(BlobError::Damaged("a digest that cannot be learned was given"));
        }
        let at = self.header.digests_at() + chunk * DIGEST_SIZE;
        Ok(self.file.write_all_at(digest, at)?)
    }

    /// Sets the bit: the chunk's bytes are in the data file and are correct. Release ordering: a reader that sees the bit sees the bytes.
    pub fn set_ready(&self, chunk: u64) {
        debug_assert!(chunk < self.chunk_count());
        if let (Some(byte), mask) = self.map.bit(chunk) {
            byte.fetch_or(mask, Ordering::Release);
        }
    }

    /// Makes chunks missing again, because their bytes were found damaged while their bits were set. A reader that has checked a bit before
    /// must check it again after reading ([`super::BlobFile::is_ready`]).
    pub fn clear(&self, chunks: Range<u64>) {
        for chunk in chunks.start..chunks.end.min(self.chunk_count()) {
            if let (Some(byte), mask) = self.map.bit(chunk) {
                byte.fetch_and(!mask, Ordering::AcqRel);
            }
        }
    }

    /// How many chunks may be served.
    pub fn ready_count(&self) -> u64 {
        let bitmap = HEADER_SIZE as usize..self.header.digests_at() as usize;
        let bytes = self.map.bytes().get(bitmap).unwrap_or_default();
        let set = bytes
            .iter()
            .map(|byte| u64::from(byte.load(Ordering::Relaxed).count_ones()));
        set.sum()
    }

    /// Writes a new ready file for the same blob with the same digests, and no chunk ready.
    ///
    /// # Errors
    /// `Io`.
    pub fn write_emptied(&self, file: File, boot: BootId) -> Result<Self, BlobError> {
        let mut table = vec![0; (self.chunk_count() * DIGEST_SIZE) as usize];
        self.file.read_exact_at(&mut table, self.header.digests_at())?;
        let header = Header {
            boot,
            ..self.header.clone()
        };
        let mut bytes = vec![0; header.digests_at() as usize];
        bytes[..HEADER_USED].copy_from_slice(&header.encode());
        file.write_all_at(&bytes, 0)?;
        file.write_all_at(&table, header.digests_at())?;
        file.sync_all()?;
        Self::map(file, header)
    }

    /// Whether the bytes of `chunk` in `data` match its digest, whatever its bit is.
    ///
    /// # Errors
    /// `Io`.
    pub fn agrees(&self, data: &File, chunk: u64, buffer: &mut Vec<u8>) -> Result<bool, BlobError> {
        let Some(digest) = self.digest(chunk)? else {
            return Ok(false);
        };
        let range = self.chunk_range(chunk);
        buffer.resize((range.end - range.start) as usize, 0);
        match data.read_exact_at(buffer, range.start) {
            Ok(()) => Ok(*blake3::hash(buffer).as_bytes() == digest),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
