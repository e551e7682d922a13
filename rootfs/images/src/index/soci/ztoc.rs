//! The ztoc, version 0.9: a FlatBuffer of a layer's table of contents and its checkpoints.
//!
//! It cannot express the holes of sparse files, and therefore not the layout of a data file without zeros: every file is one extent here.
//! It contains everything else of a tree.

use thaw_imagefs::digest::Digest;
use thaw_imagefs::tree::Timestamp;

use crate::index::LayerIndex;
use crate::index::error::IndexError;
use crate::index::foreign::{Builder, Entry, Part, What, owner};
use crate::index::rfc3339;
use crate::layer::LayerLimits;
use crate::span::{SpanDigest, SpanTable};

use super::checkpoints;
use super::flat::{Flaw, Table};
use super::schema::{FORM, GZIP, UNCOMPRESSED, VERSION, field};

pub const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
pub const SPARSE_PREFIX: &[u8] = b"GNU.sparse.";

impl From<Flaw> for IndexError {
    fn from(flaw: Flaw) -> IndexError {
        IndexError::malformed(FORM, flaw.0)
    }
}

fn malformed(why: &str) -> IndexError {
    IndexError::malformed(FORM, why)
}

fn natural(value: i64, why: &str) -> Result<u64, IndexError> {
    u64::try_from(value).map_err(|_| malformed(why))
}

/// Reads a ztoc of a stored layer of `stored_size` bytes.
///
/// # Errors
/// [`IndexError`] if it is not a ztoc, contradicts itself, or describes a layer that would be refused.
pub fn read_ztoc(bytes: &[u8], stored_size: u64, limits: &LayerLimits) -> Result<LayerIndex, IndexError> {
    let root = Table::root(bytes)?;
    let version = root.bytes(field::ztoc::VERSION)?;
    if version != VERSION {
        let what = format!("version {}", version[..version.len().min(32)].escape_ascii());
        return Err(IndexError::unsupported(FORM, what));
    }
    let said = natural(
        root.i64(field::ztoc::COMPRESSED_SIZE)?,
        "its layer's size is negative",
    )?;
    if said != stored_size {
        return Err(malformed("it is of a layer of another size"));
    }
    let spans = spans(&root, stored_size)?;
    let mut builder = Builder::new(FORM, limits);
    let toc = root
        .table(field::ztoc::TOC)?
        .ok_or_else(|| malformed("it has no table of contents"))?;
    let mut work = Budget::of(bytes);
    for file in files(&toc)? {
        push(&mut builder, &file, &mut work)?;
    }
    builder.finish(spans)
}

/// The files in the order of the tar stream.
fn files<'a>(toc: &Table<'a>) -> Result<Vec<Table<'a>>, IndexError> {
    let mut files = Vec::new();
    for file in toc.vector(field::toc::FILES)?.tables() {
        let file = file?;
        let offset = natural(file.i64(field::file::OFFSET)?, "a file's offset is negative")?;
        files.push((offset, file));
    }
    files.sort_by_key(|(offset, _)| *offset);
    Ok(files.into_iter().map(|(_, file)| file).collect())
}

fn spans(root: &Table<'_>, stored_size: u64) -> Result<SpanTable, IndexError> {
    let stream_length = natural(
        root.i64(field::ztoc::UNCOMPRESSED_SIZE)?,
        "its stream's size is negative",
    )?;
    let info = root
        .table(field::ztoc::COMPRESSION)?
        .ok_or_else(|| malformed("it has no checkpoints"))?;
    let texts = info.vector(field::compression::SPAN_DIGESTS)?;
    if i64::from(info.i32(field::compression::MAX_SPAN_ID)?) + 1 != texts.len() as i64 {
        return Err(malformed("it has not one digest for each span"));
    }
    let mut digests = Vec::new();
    for text in texts.strings() {
        let digest: Option<Digest> = std::str::from_utf8(text?).ok().and_then(|text| text.parse().ok());
        let digest = digest.ok_or_else(|| malformed("a span's digest is not SHA-256"))?;
        digests.push(SpanDigest::StoredSha256(*digest.bytes()));
    }
    let blob = info.bytes(field::compression::CHECKPOINTS)?;
    let spans = match info.byte(field::compression::ALGORITHM, GZIP)? {
        GZIP => checkpoints::read_gzip(blob, &digests, stored_size, stream_length)?,
        UNCOMPRESSED => checkpoints::read_tar(blob, &digests, stored_size)?,
        other => {
            return Err(IndexError::unsupported(
                FORM,
                format!("compression algorithm {other}"),
            ));
        }
    };
    SpanTable::new(spans, stored_size).map_err(|source| IndexError::Spans { form: FORM, source })
}

/// Bounds the work that a buffer can cause: hostile buffers may refer to the same part many times, which honest ones do not.
struct Budget(usize);

impl Budget {
    fn of(bytes: &[u8]) -> Budget {
        Budget(bytes.len().saturating_mul(4).saturating_add(1 << 20))
    }

    fn spend(&mut self, length: usize) -> Result<(), IndexError> {
        self.0 = self
            .0
            .checked_sub(length.saturating_add(16))
            .ok_or_else(|| malformed("its strings are used over and over"))?;
        Ok(())
    }
}

fn push(builder: &mut Builder<'_>, file: &Table<'_>, work: &mut Budget) -> Result<(), IndexError> {
    let name = file.bytes(field::file::NAME)?;
    let link = file.bytes(field::file::LINK)?;
    work.spend(name.len() + link.len())?;
    let offset = natural(file.i64(field::file::OFFSET)?, "a file's offset is negative")?;
    let mut xattrs = Vec::new();
    let mut is_sparse = false;
    for xattr in file.vector(field::file::XATTRS)?.tables() {
        let xattr = xattr?;
        let (key, value) = (xattr.bytes(field::xattr::KEY)?, xattr.bytes(field::xattr::VALUE)?);
        work.spend(key.len() + value.len())?;
        is_sparse |= key.starts_with(SPARSE_PREFIX);
        // The field has all PAX records of the entry, not only the attributes.
        if let Some(name) = key.strip_prefix(XATTR_PREFIX) {
            xattrs.push((name, value));
        }
    }
    let device = |is_char| -> Result<What<'_>, IndexError> {
        let number =
            |id| u32::try_from(file.i64(id)?).map_err(|_| malformed("a device number is out of range"));
        Ok(What::Device {
            is_char,
            major: number(field::file::MAJOR)?,
            minor: number(field::file::MINOR)?,
        })
    };
    let content = Part {
        length: natural(file.i64(field::file::SIZE)?, "a file's size is negative")?,
        stream_offset: Some(offset),
    };
    let what = match file.bytes(field::file::TYPE)? {
        b"reg" if is_sparse => return Err(IndexError::unsupported(FORM, "a sparse file")),
        b"reg" => What::File(std::slice::from_ref(&content)),
        b"dir" => What::Directory,
        b"symlink" => What::Symlink(link),
        b"hardlink" => What::HardLink(link),
        b"char" => device(true)?,
        b"block" => device(false)?,
        b"fifo" => What::Fifo,
        other => {
            let what = format!("an entry of type {}", other[..other.len().min(32)].escape_ascii());
            return Err(IndexError::unsupported(FORM, what));
        }
    };
    let mtime = match file.bytes(field::file::MTIME)? {
        b"" => Timestamp::default(),
        text => rfc3339::parse(text).ok_or_else(|| malformed("a file's time is not one"))?,
    };
    builder.push(&Entry {
        at: offset,
        name,
        what,
        owner: owner(
            file.i64(field::file::MODE)?,
            file.u32(field::file::UID)?,
            file.u32(field::file::GID)?,
            mtime,
        ),
        xattrs,
    })
}
