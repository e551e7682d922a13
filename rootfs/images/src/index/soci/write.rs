//! Writing a ztoc.

use std::collections::BTreeMap;
use std::io::{BufRead, Read};

use flatbuffers::{FlatBufferBuilder, ForwardsUOffset, UOffsetT, Vector, WIPOffset};
use thaw_imagefs::digest::Digest;
use thaw_imagefs::tree::Timestamp;

use crate::compression::Indexing;
use crate::index::error::IndexError;
use crate::index::rfc3339;
use crate::layer::header::TypeFlag;
use crate::layer::walk::{Walked, walk};
use crate::layer::{LayerError, LayerLimits};
use crate::span::{Expansion, Span, SpanTable};

use super::MAX_ZTOC;
use super::checkpoints;
use super::flat::slot;
use super::schema::{FORM, GZIP, UNCOMPRESSED, VERSION, field};

/// The table of contents of a tar stream, with the fields that a ztoc has and a tree lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toc {
    /// In the order of the stream.
    entries: Vec<TocEntry>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct TocEntry {
    name: Vec<u8>,
    kind: &'static str,
    /// Offset of its content, or where the content would be.
    offset: u64,
    size: u64,
    link: Vec<u8>,
    mode: i64,
    uid: u32,
    gid: u32,
    user: Vec<u8>,
    group: Vec<u8>,
    mtime: String,
    major: u32,
    minor: u32,
    /// All PAX records, by key.
    records: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Reads an uncompressed tar stream to its end and collects the contents of a ztoc.
///
/// # Errors
/// [`IndexError`] if the stream is not a layer, or contains something that a ztoc cannot express (sparse files).
pub fn scan(tar: impl Read, limits: &LayerLimits) -> Result<Toc, IndexError> {
    let mut entries = Vec::new();
    let mut kept = 0;
    walk(tar, limits, |walked| {
        let entry = TocEntry::of(walked)?;
        let records: usize = entry
            .records
            .iter()
            .map(|(key, value)| key.len() + value.len())
            .sum();
        kept += (entry.name.len() + entry.link.len() + records) as u64;
        if kept > limits.tree_bytes {
            let what = "bytes of names, links and extension headers";
            return Err(LayerError::limit(walked.content, what, limits.tree_bytes).into());
        }
        entries.push(entry);
        Ok::<_, Failure>(())
    })
    .map_err(|Failure(error)| error)?;
    Ok(Toc { entries })
}

/// The error that stops a scan.
struct Failure(IndexError);

impl From<LayerError> for Failure {
    fn from(source: LayerError) -> Failure {
        Failure(IndexError::Layer { form: FORM, source })
    }
}

impl From<IndexError> for Failure {
    fn from(error: IndexError) -> Failure {
        Failure(error)
    }
}

/// Reads a stored layer once, to its end, and writes its ztoc: spans of at least `span_size` bytes. `None` for a layer that a ztoc cannot
/// make lazy: one in zstd, or one with too few places at which decompression can start.
///
/// # Errors
/// [`IndexError`] if it is not a layer, or contains something that a ztoc cannot express.
pub fn index_layer(
    stored: impl BufRead,
    limits: &LayerLimits,
    span_size: u64,
    build_tool: &str,
) -> Result<Option<Vec<u8>>, IndexError> {
    let unreadable = |source| IndexError::Layer {
        form: FORM,
        source: LayerError::Read { offset: 0, source },
    };
    let mut indexing = Indexing::every(span_size, stored).map_err(unreadable)?;
    let toc = scan(&mut indexing, limits)?;
    if indexing.gzip_members() > 1 {
        return Err(IndexError::unsupported(FORM, "several gzip members"));
    }
    let Some(spans) = indexing.into_spans() else {
        return Ok(None);
    };
    let is_fit = |span: &Span| matches!(span.expansion, Expansion::Plain | Expansion::Deflate { .. });
    let Some(stored_size) = spans.spans().last().map(|span| span.stored.end) else {
        return Ok(None);
    };
    if !spans.spans().iter().all(is_fit) {
        return Ok(None);
    }
    write_ztoc(&toc, &spans, span_size, stored_size, build_tool).map(Some)
}

/// The field up to its first NUL.
fn text(field: &[u8]) -> Vec<u8> {
    field.split(|byte| *byte == 0).next().unwrap_or(field).to_vec()
}

impl TocEntry {
    fn of(walked: &Walked<'_>) -> Result<TocEntry, Failure> {
        let (header, pax, block) = (walked.header, walked.pax, walked.block);
        let bad = |why| Failure::from(LayerError::bad_header(walked.content, walked.name, why));
        if walked.is_sparse() {
            return Err(IndexError::unsupported(FORM, "a sparse file").into());
        }
        let kind = match header.type_flag {
            // Before ustar, a directory was a file whose name ends in a slash.
            TypeFlag::Regular if block[156] == 0 && walked.name.ends_with(b"/") => "dir",
            TypeFlag::Regular => "reg",
            TypeFlag::Directory => "dir",
            TypeFlag::HardLink => "hardlink",
            TypeFlag::Symlink => "symlink",
            TypeFlag::CharDevice => "char",
            TypeFlag::BlockDevice => "block",
            TypeFlag::Fifo => "fifo",
            _ => return Err(LayerError::unsupported(walked.content, walked.name, block[156]).into()),
        };
        let mtime = pax.mtime().map_err(bad)?.unwrap_or(Timestamp {
            seconds: header.mtime,
            nanoseconds: 0,
        });
        let is_link = matches!(header.type_flag, TypeFlag::HardLink | TypeFlag::Symlink);
        let named = |key: &[u8], field: &[u8]| pax.get(key).map_or_else(|| text(field), <[u8]>::to_vec);
        Ok(TocEntry {
            name: walked.name.to_vec(),
            kind,
            offset: walked.content,
            size: walked.size,
            link: if is_link { walked.link.to_vec() } else { Vec::new() },
            mode: mode(&block[100..108]).unwrap_or(i64::from(header.mode)),
            uid: pax.uid().map_err(bad)?.unwrap_or(header.uid),
            gid: pax.gid().map_err(bad)?.unwrap_or(header.gid),
            user: named(b"uname", &block[265..297]),
            group: named(b"gname", &block[297..329]),
            mtime: rfc3339::format(mtime)
                .ok_or_else(|| IndexError::unsupported(FORM, "a time outside the years 0 to 9999"))?,
            major: header.device_major,
            minor: header.device_minor,
            records: pax
                .records()
                .map(|(key, value)| (key.to_vec(), value.to_vec()))
                .collect(),
        })
    }

    /// An estimate of its bytes.
    fn length(&self) -> u64 {
        let records = self
            .records
            .iter()
            .map(|(key, value)| key.len() + value.len() + 40);
        (self.name.len()
            + self.link.len()
            + self.user.len()
            + self.group.len()
            + records.sum::<usize>()
            + 200) as u64
    }
}

/// The mode, including the type bits that some writers set and our headers drop.
fn mode(field: &[u8]) -> Option<i64> {
    let digits = field.split(|byte| *byte == 0).next()?.trim_ascii();
    i64::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}

type Buffer<'b> = FlatBufferBuilder<'b>;
type Text = WIPOffset<UOffsetT>;

/// Writes a ztoc. `spans` are those of the whole stored layer of `stored_size` bytes: deflate spans made at checkpoints about `span_size`
/// bytes of stream apart, with SHA-256 digests of their stored bytes; or plain ones of that size. Equal inputs give equal bytes.
///
/// # Errors
/// [`IndexError`] if the spans are of another kind, or if the ztoc would be too large.
pub fn write_ztoc(
    toc: &Toc,
    spans: &SpanTable,
    span_size: u64,
    stored_size: u64,
    build_tool: &str,
) -> Result<Vec<u8>, IndexError> {
    let written = checkpoints::write(spans, span_size, stored_size)?;
    let about: u64 = toc.entries.iter().map(TocEntry::length).sum();
    let stream_length = i64::try_from(spans.stream_length());
    let (Ok(stream_length), Ok(stored_size)) = (stream_length, i64::try_from(stored_size)) else {
        return Err(IndexError::unsupported(FORM, "more than 2^63 bytes"));
    };
    if about + written.blob.len() as u64 + 128 * written.digests.len() as u64 > MAX_ZTOC {
        return Err(IndexError::unsupported(
            FORM,
            "a layer whose ztoc would have more than 1 GiB",
        ));
    }
    let mut buffer = Buffer::with_capacity(about as usize + written.blob.len());
    let version = buffer.create_byte_string(VERSION).as_union_value();
    let tool = buffer.create_string(build_tool).as_union_value();
    let toc = table_of_contents(&mut buffer, toc);
    let compression = compression(&mut buffer, &written)?;
    let root = buffer.start_table();
    buffer.push_slot_always(slot(field::ztoc::VERSION), version);
    buffer.push_slot_always(slot(field::ztoc::BUILD_TOOL), tool);
    buffer.push_slot(slot(field::ztoc::COMPRESSED_SIZE), stored_size, 0);
    buffer.push_slot(slot(field::ztoc::UNCOMPRESSED_SIZE), stream_length, 0);
    buffer.push_slot_always(slot(field::ztoc::TOC), toc);
    buffer.push_slot_always(slot(field::ztoc::COMPRESSION), compression);
    let root = buffer.end_table(root);
    buffer.finish_minimal(root);
    Ok(buffer.finished_data().to_vec())
}

fn table_of_contents(buffer: &mut Buffer<'_>, toc: &Toc) -> Text {
    let files: Vec<Text> = toc.entries.iter().map(|entry| file(buffer, entry)).collect();
    let files = vector(buffer, &files);
    let table = buffer.start_table();
    buffer.push_slot_always(slot(field::toc::FILES), files);
    WIPOffset::new(buffer.end_table(table).value())
}

fn vector<'b>(buffer: &mut Buffer<'b>, items: &[Text]) -> WIPOffset<Vector<'b, ForwardsUOffset<UOffsetT>>> {
    let items: Vec<WIPOffset<UOffsetT>> = items.to_vec();
    buffer.create_vector(&items)
}

fn file(buffer: &mut Buffer<'_>, entry: &TocEntry) -> Text {
    let name = buffer.create_byte_string(&entry.name).as_union_value();
    let kind = buffer.create_string(entry.kind).as_union_value();
    let link = buffer.create_byte_string(&entry.link).as_union_value();
    let user = buffer.create_byte_string(&entry.user).as_union_value();
    let group = buffer.create_byte_string(&entry.group).as_union_value();
    let mtime = buffer.create_string(&entry.mtime).as_union_value();
    let mut records = Vec::with_capacity(entry.records.len());
    for (key, value) in &entry.records {
        let key = buffer.create_byte_string(key).as_union_value();
        let value = buffer.create_byte_string(value).as_union_value();
        let table = buffer.start_table();
        buffer.push_slot_always(slot(field::xattr::KEY), key);
        buffer.push_slot_always(slot(field::xattr::VALUE), value);
        records.push(WIPOffset::new(buffer.end_table(table).value()));
    }
    let records = vector(buffer, &records);
    let table = buffer.start_table();
    buffer.push_slot_always(slot(field::file::NAME), name);
    buffer.push_slot_always(slot(field::file::TYPE), kind);
    buffer.push_slot(slot(field::file::OFFSET), entry.offset as i64, 0);
    buffer.push_slot(slot(field::file::SIZE), entry.size as i64, 0);
    buffer.push_slot_always(slot(field::file::LINK), link);
    buffer.push_slot(slot(field::file::MODE), entry.mode, 0);
    buffer.push_slot(slot(field::file::UID), entry.uid, 0);
    buffer.push_slot(slot(field::file::GID), entry.gid, 0);
    buffer.push_slot_always(slot(field::file::USER), user);
    buffer.push_slot_always(slot(field::file::GROUP), group);
    buffer.push_slot_always(slot(field::file::MTIME), mtime);
    buffer.push_slot(slot(field::file::MAJOR), i64::from(entry.major), 0);
    buffer.push_slot(slot(field::file::MINOR), i64::from(entry.minor), 0);
    buffer.push_slot_always(slot(field::file::XATTRS), records);
    WIPOffset::new(buffer.end_table(table).value())
}

fn compression(buffer: &mut Buffer<'_>, written: &checkpoints::Written) -> Result<Text, IndexError> {
    let last = i32::try_from(written.digests.len() - 1)
        .map_err(|_| IndexError::unsupported(FORM, "more than 2^31 spans"))?;
    let digests: Vec<Text> = written
        .digests
        .iter()
        .map(|digest| {
            let text = Digest::from(*digest).to_string();
            WIPOffset::new(buffer.create_string(&text).value())
        })
        .collect();
    let digests = vector(buffer, &digests);
    let blob = buffer.create_vector(&written.blob);
    let table = buffer.start_table();
    let algorithm = if written.is_gzip { GZIP } else { UNCOMPRESSED };
    buffer.push_slot(slot(field::compression::ALGORITHM), algorithm, GZIP);
    buffer.push_slot(slot(field::compression::MAX_SPAN_ID), last, 0);
    buffer.push_slot_always(slot(field::compression::SPAN_DIGESTS), digests);
    buffer.push_slot_always(slot(field::compression::CHECKPOINTS), blob);
    Ok(WIPOffset::new(buffer.end_table(table).value()))
}
