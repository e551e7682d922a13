//! The framing of `state` and `working-set`: a header with a hash, records, and reading them from hostile bytes.
//!
//! Invariant: no byte is used before the hash matches. Every read stays within the bytes that are there. Anything that a writer of this
//! version would not write is refused, and the error gives its offset. A reader never panics.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A kind of file.
#[derive(Debug)]
pub struct Format {
    /// Its name in a snapshot directory and in errors.
    pub name: &'static str,
    pub magic: [u8; 8],
    pub version: u32,
    /// Most bytes, header included.
    pub max_bytes: u64,
}

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("this is not the {file} file of a snapshot: it does not begin with its magic")]
    NotOurs { file: &'static str },
    #[error(
        "the {file} file has format version {found}, this Thaw reads {known}: freeze again with this Thaw"
    )]
    UnknownVersion {
        file: &'static str,
        found: u32,
        known: u32,
    },
    #[error(
        "the {file} file has records of kind {record:#x} in version {found}, this Thaw reads {known}: freeze again \
         with this Thaw"
    )]
    UnknownRecordVersion {
        file: &'static str,
        record: u16,
        found: u16,
        known: u16,
    },
    #[error("the {file} file is cut short: {has} bytes of {needs}; fetch or freeze it again")]
    CutShort {
        file: &'static str,
        has: u64,
        needs: u64,
    },
    #[error("the {file} file says it has {bytes} bytes; at most {max} can be")]
    TooLarge {
        file: &'static str,
        bytes: u64,
        max: u64,
    },
    #[error("the {file} file is damaged at byte {at}: {what}; fetch or freeze it again")]
    Damaged {
        file: &'static str,
        at: u64,
        what: String,
    },
    #[error("the {file} file: {error}")]
    Io { file: &'static str, error: io::Error },
    #[error("the {file} file is not empty: it is to be written")]
    NotEmpty { file: &'static str },
}

/// Bytes of the header.
pub const HEADER: usize = 64;
const HASH_AT: usize = 32;

impl Format {
    pub(super) fn damaged(&self, at: u64, what: impl Into<String>) -> FileError {
        FileError::Damaged {
            file: self.name,
            at,
            what: what.into(),
        }
    }

    fn io(&self) -> impl FnOnce(io::Error) -> FileError {
        let file = self.name;
        move |error| FileError::Io { file, error }
    }

    /// The bytes of a file: a header, then `body`.
    pub fn seal(&self, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend_from_slice(&self.magic);
        bytes.extend_from_slice(&self.version.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(blake3::hash(body).as_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    /// The body of a file, if its bytes are complete and undamaged.
    pub fn open<'b>(&self, bytes: &'b [u8]) -> Result<&'b [u8], FileError> {
        let has = bytes.len() as u64;
        if !bytes.starts_with(&self.magic) {
            return Err(if self.magic.starts_with(bytes) {
                self.cut_short(has, HEADER as u64)
            } else {
                FileError::NotOurs { file: self.name }
            });
        }
        let Some((header, body)) = bytes.split_at_checked(HEADER) else {
            return Err(self.cut_short(has, HEADER as u64));
        };
        let mut fields = Fields::new(self, header, 0);
        fields.take(self.magic.len())?;
        let version = fields.u32()?;
        if version != self.version {
            return Err(FileError::UnknownVersion {
                file: self.name,
                found: version,
                known: self.version,
            });
        }
        fields.zeros(4)?;
        let length = fields.u64()?;
        fields.zeros(8)?;
        let needs = length.saturating_add(HEADER as u64);
        if needs > self.max_bytes {
            return Err(FileError::TooLarge {
                file: self.name,
                bytes: needs,
                max: self.max_bytes,
            });
        }
        if has < needs {
            return Err(self.cut_short(has, needs));
        }
        if has > needs {
            return Err(self.damaged(needs, "there are bytes after its end"));
        }
        if blake3::hash(body).as_bytes() != &header[HASH_AT..] {
            return Err(self.damaged(HASH_AT as u64, "its BLAKE3 hash does not match what follows"));
        }
        Ok(body)
    }

    fn cut_short(&self, has: u64, needs: u64) -> FileError {
        FileError::CutShort {
            file: self.name,
            has,
            needs,
        }
    }

    /// Reads a whole file from its first byte, unless it is too large.
    pub fn read_file(&self, file: &File) -> Result<Vec<u8>, FileError> {
        let length = file.metadata().map_err(self.io())?.len();
        if length > self.max_bytes {
            return Err(FileError::TooLarge {
                file: self.name,
                bytes: length,
                max: self.max_bytes,
            });
        }
        let mut bytes = vec![0; length as usize];
        match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => Ok(bytes),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.damaged(0, "it shrank while it was read"))
            }
            Err(e) => Err(self.io()(e)),
        }
    }

    /// Writes header and `body` to a file, which must be empty.
    pub fn write_file(&self, file: &File, body: &[u8]) -> Result<(), FileError> {
        if file.metadata().map_err(self.io())?.len() != 0 {
            return Err(FileError::NotEmpty { file: self.name });
        }
        let bytes = self.seal(body);
        if bytes.len() as u64 > self.max_bytes {
            return Err(FileError::TooLarge {
                file: self.name,
                bytes: bytes.len() as u64,
                max: self.max_bytes,
            });
        }
        file.write_all_at(&bytes, 0).map_err(self.io())
    }
}

/// Consecutive fields, little-endian.
pub struct Fields<'b> {
    format: &'b Format,
    bytes: &'b [u8],
    /// Offset of `bytes` in the file.
    at: u64,
}

impl<'b> Fields<'b> {
    /// `at` is the offset of `bytes` in the file, for errors.
    pub fn new(format: &'b Format, bytes: &'b [u8], at: u64) -> Fields<'b> {
        Fields { format, bytes, at }
    }

    /// The offset of the next field in the file.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes left.
    pub fn left(&self) -> usize {
        self.bytes.len()
    }

    pub fn take(&mut self, count: usize) -> Result<&'b [u8], FileError> {
        let Some((taken, rest)) = self.bytes.split_at_checked(count) else {
            return Err(self.damaged(format!("{count} bytes were expected, {} are left", self.left())));
        };
        self.bytes = rest;
        self.at += count as u64;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FileError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub fn u8(&mut self) -> Result<u8, FileError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub fn u16(&mut self) -> Result<u16, FileError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, FileError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, FileError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads bytes that have no meaning yet: they must be zero in this version.
    pub fn zeros(&mut self, count: usize) -> Result<(), FileError> {
        let at = self.at;
        match self.take(count)?.iter().all(|byte| *byte == 0) {
            true => Ok(()),
            false => Err(self.format.damaged(at, "reserved bytes are not zero")),
        }
    }

    /// Returns all remaining bytes.
    pub fn rest(&mut self) -> &'b [u8] {
        let rest = std::mem::take(&mut self.bytes);
        self.at += rest.len() as u64;
        rest
    }

    /// Checks that no bytes remain.
    pub fn end(&self) -> Result<(), FileError> {
        match self.bytes.is_empty() {
            true => Ok(()),
            false => Err(self.damaged(format!("{} bytes too many", self.bytes.len()))),
        }
    }

    /// An error about damage at this place.
    pub fn damaged(&self, what: impl Into<String>) -> FileError {
        self.format.damaged(self.at, what)
    }
}

/// A record of a body.
pub struct Record<'b> {
    /// Its offset in the file.
    pub at: u64,
    pub kind: u16,
    pub version: u16,
    /// Distinguishes records of one kind: a vCPU's index, a device's slot.
    pub instance: u32,
    pub payload: Fields<'b>,
}

/// The records of a body. Kinds strictly ascend, and so do instances within a kind, so no record occurs twice.
pub struct Records<'b> {
    rest: Fields<'b>,
    last: Option<(u16, u32)>,
}

impl<'b> Records<'b> {
    pub fn new(format: &'b Format, body: &'b [u8]) -> Records<'b> {
        Records {
            rest: Fields::new(format, body, HEADER as u64),
            last: None,
        }
    }

    /// The next record, or `None` at the end.
    pub fn read(&mut self) -> Result<Option<Record<'b>>, FileError> {
        if self.rest.left() == 0 {
            return Ok(None);
        }
        let at = self.rest.at();
        let (kind, version) = (self.rest.u16()?, self.rest.u16()?);
        let (instance, length) = (self.rest.u32()?, self.rest.u32()?);
        if self.last.is_some_and(|last| last >= (kind, instance)) {
            let what = format!("record {kind:#x} of {instance} is there twice or out of order");
            return Err(self.rest.format.damaged(at, what));
        }
        self.last = Some((kind, instance));
        let payload_at = self.rest.at();
        let payload = self.rest.take(length as usize)?;
        Ok(Some(Record {
            at,
            kind,
            version,
            instance,
            payload: Fields::new(self.rest.format, payload, payload_at),
        }))
    }
}

/// Appends a record.
pub fn push_record(body: &mut Vec<u8>, kind: u16, version: u16, instance: u32, payload: &[u8]) {
    body.extend_from_slice(&kind.to_le_bytes());
    body.extend_from_slice(&version.to_le_bytes());
    body.extend_from_slice(&instance.to_le_bytes());
    body.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    body.extend_from_slice(payload);
}
