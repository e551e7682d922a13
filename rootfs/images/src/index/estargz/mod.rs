//! eStargz and zstd:chunked: layers whose files are gzip members or zstd frames of their own, with a table of contents
//! at their end.
//!
//! The table is bound to the image by an annotation of the layer's descriptor, and each chunk of a file by its digest in the table. The
//! table is still treated as hostile. This module fetches nothing.
//!
//! Tables of eStargz cannot express fractions of a second (rounded to the nearest) and names that are not UTF-8.

mod toc;

use std::io::Read;
use std::ops::Range;

use thaw_imagefs::digest::Digest;

use crate::index::LayerIndex;
use crate::index::error::{IndexError, verify};
use crate::layer::LayerLimits;

const FORM: &str = "eStargz table of contents";

/// The annotation of a layer's descriptor: the digest of the table, uncompressed.
pub const TOC_DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";
/// The same for zstd:chunked: the digest of the stored table, and `OFFSET:LENGTH:UNCOMPRESSED LENGTH:TYPE`, under their current and earlier
/// names.
const ZSTD_CHECKSUM: [&str; 2] = [
    "io.github.containers.zstd-chunked.manifest-checksum",
    "io.containers.zstd-chunked.manifest-checksum",
];
const ZSTD_POSITION: [&str; 2] = [
    "io.github.containers.zstd-chunked.manifest-position",
    "io.containers.zstd-chunked.manifest-position",
];
/// The only defined type of table.
const ZSTD_TYPE: &str = "1";

/// Bytes at the end of an eStargz layer that contain its footer.
pub const FOOTER: u64 = 51;
/// Name of the table in the tar stream.
const TOC_NAME: &[u8] = b"stargz.index.json";
/// Largest table, both stored and uncompressed.
pub const MAX_TOC: u64 = 256 << 20;

/// A layer's table of contents: its form, and the digests that identify it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The footer gives the table's offset ([`toc_location`]).
    Gzip { toc: Digest },
    /// `location` is the range of the stored table, `stored` the digest of these bytes.
    Zstd { stored: Digest, location: Range<u64> },
}

fn digest_of(value: &str) -> Result<Digest, IndexError> {
    value
        .parse::<Digest>()
        .map_err(|error| IndexError::malformed(FORM, format!("the layer's annotation: {error}")))
}

/// The binding of a layer with these annotations to its table; `None` if it is neither eStargz nor zstd:chunked. `stored_size` is the
/// layer's size in bytes.
///
/// # Errors
/// If an annotation exists but is invalid.
pub fn bound<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    stored_size: u64,
) -> Result<Option<Bound>, IndexError> {
    let (mut toc, mut checksum, mut position) = (None, None, None);
    for (name, value) in annotations {
        match name.as_str() {
            TOC_DIGEST => toc = Some(value),
            name if ZSTD_CHECKSUM.contains(&name) => checksum = Some(value),
            name if ZSTD_POSITION.contains(&name) => position = Some(value),
            _ => {}
        }
    }
    // zstd:chunked layers may have eStargz's annotation, too.
    match (checksum, position, toc) {
        (Some(checksum), Some(position), _) => Ok(Some(Bound::Zstd {
            stored: digest_of(checksum)?,
            location: zstd_location(position, stored_size)?,
        })),
        (_, _, Some(toc)) => Ok(Some(Bound::Gzip { toc: digest_of(toc)? })),
        _ => Ok(None),
    }
}

fn zstd_location(position: &str, stored_size: u64) -> Result<Range<u64>, IndexError> {
    let parts: Vec<&str> = position.split(':').collect();
    let [offset, length, uncompressed, kind] = parts[..] else {
        return Err(IndexError::malformed(FORM, "its position is not four numbers"));
    };
    if kind != ZSTD_TYPE {
        return Err(IndexError::unsupported(
            FORM,
            format!("type {}", kind.escape_debug()),
        ));
    }
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|_| IndexError::malformed(FORM, "its position is not four numbers"))
    };
    if number(uncompressed)? > MAX_TOC {
        return Err(IndexError::unsupported(FORM, "more than 256 MiB"));
    }
    let (offset, length) = (number(offset)?, number(length)?);
    location(offset, offset.checked_add(length), stored_size)
}

fn location(start: u64, end: Option<u64>, limit: u64) -> Result<Range<u64>, IndexError> {
    match end {
        Some(end) if start < end && end <= limit && end - start <= MAX_TOC => Ok(start..end),
        _ => Err(IndexError::malformed(
            FORM,
            "it is not within the layer, or larger than 256 MiB",
        )),
    }
}

/// The offset of an eStargz layer's table, from the last [`FOOTER`] bytes of the layer of `stored_size` bytes.
///
/// # Errors
/// If they are not a footer.
pub fn toc_location(footer: &[u8], stored_size: u64) -> Result<Range<u64>, IndexError> {
    let refuse = || IndexError::malformed(FORM, "the layer does not end with an eStargz footer");
    // An empty gzip member: its header with an extra field, an empty stored block, its trailer of zeros. In the first version the extra
    // field itself contained the number; now a subfield "SG" contains it.
    const HEAD: [u8; 10] = [0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff];
    let with_subfield = [&HEAD[..], b"\x1a\0SG\x16\0"].concat();
    let without = [&HEAD[..], b"\x16\0"].concat();
    let number = [&with_subfield, &without].into_iter().find_map(|head| {
        let length = head.len() + 16 + 6 + 5 + 8;
        let footer = footer.get(footer.len().checked_sub(length)?..)?;
        let rest = footer.strip_prefix(&head[..])?;
        let is_end = rest.get(16..)? == b"STARGZ\x01\0\0\xff\xff\0\0\0\0\0\0\0\0";
        is_end.then(|| (&rest[..16], length as u64))
    });
    let (digits, length) = number.ok_or_else(refuse)?;
    let offset = std::str::from_utf8(digits)
        .ok()
        .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .ok_or_else(refuse)?;
    let end = stored_size.checked_sub(length);
    location(offset, end, end.unwrap_or(0))
}

/// Reads an eStargz layer's table from its stored bytes, which are at `location` ([`toc_location`]).
///
/// # Errors
/// [`IndexError`] if its digest differs, if it contradicts itself, or if it describes a layer that would be refused.
pub fn read_toc(
    stored: &[u8],
    expected: &Digest,
    location: Range<u64>,
    limits: &LayerLimits,
) -> Result<LayerIndex, IndexError> {
    let damaged = |error: std::io::Error| IndexError::malformed(FORM, error.to_string());
    let mut archive =
        tar::Archive::new(flate2::bufread::MultiGzDecoder::new(stored).take(MAX_TOC + (1 << 20)));
    let mut entry = archive
        .entries()
        .and_then(|mut entries| entries.next().transpose())
        .map_err(damaged)?
        .ok_or_else(|| IndexError::malformed(FORM, "it is empty"))?;
    if *entry.path_bytes() != *TOC_NAME || entry.size() > MAX_TOC {
        return Err(IndexError::malformed(
            FORM,
            "it has another name, or more than 256 MiB",
        ));
    }
    // Grows as bytes arrive, because a header may announce bytes that never come.
    let mut json = Vec::new();
    entry.read_to_end(&mut json).map_err(damaged)?;
    verify(FORM, &json, expected)?;
    read_json(&json, location.start, limits)
}

/// Reads an eStargz layer's table from its JSON, whose digest was compared elsewhere; chunks end before `end` of the
/// stored layer, where the table begins.
///
/// # Errors
/// [`IndexError`] if it contradicts itself, or describes a layer that would be refused.
pub fn read_json(json: &[u8], end: u64, limits: &LayerLimits) -> Result<LayerIndex, IndexError> {
    toc::read(json, end, toc::Codec::Gzip, limits)
}

/// Reads a zstd:chunked layer's table from its stored bytes.
///
/// # Errors
/// Those of [`read_toc`].
pub fn read_zstd_toc(
    stored: &[u8],
    expected: &Digest,
    location: Range<u64>,
    limits: &LayerLimits,
) -> Result<LayerIndex, IndexError> {
    verify(FORM, stored, expected)?;
    let damaged = |error: std::io::Error| IndexError::malformed(FORM, error.to_string());
    let mut decoder = zstd::stream::read::Decoder::with_buffer(stored).map_err(damaged)?;
    // The decoder keeps a window: 32 MiB at most, which tools need at their highest level.
    decoder.window_log_max(25).map_err(damaged)?;
    let mut json = Vec::new();
    decoder
        .take(MAX_TOC + 1)
        .read_to_end(&mut json)
        .map_err(damaged)?;
    if json.len() as u64 > MAX_TOC {
        return Err(IndexError::unsupported(FORM, "more than 256 MiB"));
    }
    // The table is in a skippable frame, after the frame's header.
    let end = location.start.saturating_sub(8);
    toc::read(&json, end, toc::Codec::Zstd, limits)
}

#[cfg(test)]
#[path = "estargz_test.rs"]
pub(crate) mod tests;
