//! The table itself: JSON, read entry by entry, because its entries may take many times its size in memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use thaw_imagefs::digest::Digest;
use thaw_imagefs::tree::Timestamp;

use crate::index::LayerIndex;
use crate::index::error::IndexError;
use crate::index::foreign::{Builder, Entry, Part, What, owner};
use crate::index::rfc3339;
use crate::layer::LayerLimits;
use crate::span::{Expansion, Span, SpanDigest, SpanTable, StreamPart};

use super::{FORM, TOC_NAME};

/// Files that control a prefetch and are not part of the image.
const LANDMARKS: [&[u8]; 2] = [b".prefetch.landmark", b".no.prefetch.landmark"];

/// How chunks are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    Gzip,
    Zstd,
}

/// An entry as written. Absent numbers are zero.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Wire<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    size: u64,
    #[serde(borrow)]
    modtime: Option<Cow<'a, str>>,
    #[serde(borrow)]
    link_name: Cow<'a, str>,
    mode: i64,
    uid: u32,
    gid: u32,
    dev_major: u32,
    dev_minor: u32,
    xattrs: Option<BTreeMap<String, String>>,
    #[serde(borrow)]
    digest: Cow<'a, str>,
    offset: u64,
    inner_offset: u64,
    end_offset: u64,
    chunk_offset: u64,
    chunk_size: u64,
    #[serde(borrow)]
    chunk_digest: Cow<'a, str>,
    #[serde(borrow)]
    chunk_type: Cow<'a, str>,
}

/// Reads a table. Chunks end before `end` of the stored layer, where the table begins.
pub fn read(json: &[u8], end: u64, codec: Codec, limits: &LayerLimits) -> Result<LayerIndex, IndexError> {
    let mut reader = Reader {
        builder: Builder::new(FORM, limits),
        codec,
        left: limits.entries,
        seen: 0,
        open: None,
        stream_end: 0,
        member: None,
        spans: Vec::new(),
        error: None,
    };
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let outcome = Document(&mut reader)
        .deserialize(&mut deserializer)
        .and_then(|()| deserializer.end());
    if let Some(error) = reader.error.take() {
        return Err(error);
    }
    outcome.map_err(|error| IndexError::malformed(FORM, error.to_string()))?;
    reader.finish(end)
}

/// Builds the layer entry by entry.
///
/// The stream is synthetic: the chunks, one after another. Within a member, the bytes between chunks are part of it too.
struct Reader<'l> {
    builder: Builder<'l>,
    codec: Codec,
    /// Entries that may still follow.
    left: u64,
    /// Entries so far.
    seen: u64,
    /// The file whose chunks follow.
    open: Option<File>,
    /// End of the stream so far.
    stream_end: u64,
    /// The gzip member or zstd frame whose chunks follow.
    member: Option<Member>,
    spans: Vec<Span>,
    /// The error that stopped it, which a JSON error cannot carry.
    error: Option<IndexError>,
}

/// A regular file whose chunks are incomplete so far.
struct File {
    head: Wire<'static>,
    parts: Vec<Part>,
    /// Bytes of the file in `parts`.
    have: u64,
}

struct Member {
    stored: u64,
    /// End of its stored bytes, if the table contains it.
    stored_end: Option<u64>,
    stream: u64,
    /// End of its last chunk, from its start.
    length: u64,
    /// Start, from the member's, length and digest of each chunk.
    chunks: Vec<(u64, u64, [u8; 32])>,
}

/// The chunks in the form of a span's digests.
fn parts(chunks: &[(u64, u64, [u8; 32])]) -> Result<Arc<[StreamPart]>, IndexError> {
    let mut end = 0;
    let part = |&(start, length, sha256): &(u64, u64, [u8; 32])| {
        let short = |length| u32::try_from(length).map_err(|_| malformed("a chunk is larger than 4 GiB"));
        let part = StreamPart {
            skip: short(start - end)?,
            length: short(length)?,
            sha256,
        };
        end = start + length;
        Ok(part)
    };
    chunks.iter().map(part).collect()
}

fn malformed(why: &str) -> IndexError {
    IndexError::malformed(FORM, why)
}

impl Wire<'_> {
    /// The same entry, independent of the table's text.
    fn detached(self) -> Wire<'static> {
        let own = |text: Cow<'_, str>| Cow::Owned(text.into_owned());
        Wire {
            name: own(self.name),
            kind: own(self.kind),
            modtime: self.modtime.map(own),
            link_name: own(self.link_name),
            digest: own(self.digest),
            chunk_digest: own(self.chunk_digest),
            chunk_type: own(self.chunk_type),
            xattrs: self.xattrs,
            ..self
        }
    }
}

impl Reader<'_> {
    fn entry(&mut self, wire: Wire<'_>) -> Result<(), IndexError> {
        self.seen += 1;
        self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| IndexError::unsupported(FORM, "more entries than a layer may have"))?;
        if wire.kind == "chunk" {
            let mut file = self
                .open
                .take()
                .ok_or_else(|| malformed("a chunk belongs to no file"))?;
            self.chunk(&mut file, &wire)?;
            self.open = Some(file);
            return Ok(());
        }
        self.close_file()?;
        if wire.kind == "reg" {
            let mut file = File {
                head: Wire::default(),
                parts: Vec::new(),
                have: 0,
            };
            if wire.size > 0 {
                file.head.size = wire.size;
                self.chunk(&mut file, &wire)?;
            }
            file.head = wire.detached();
            self.open = Some(file);
            return Ok(());
        }
        self.push(&wire, &[])
    }

    /// The next chunk of a file.
    fn chunk(&mut self, file: &mut File, wire: &Wire<'_>) -> Result<(), IndexError> {
        let left = file.head.size.saturating_sub(file.have);
        let length = if wire.chunk_size == 0 {
            left
        } else {
            wire.chunk_size
        };
        if wire.chunk_offset != file.have || length == 0 || length > left {
            return Err(malformed("a file's chunks do not make up the file"));
        }
        file.have += length;
        let stream_offset = if wire.chunk_type == "zeros" {
            None
        } else {
            // A file of one chunk may have only the digest of the file.
            let is_whole = length == file.head.size && wire.kind == "reg";
            let text = match (&*wire.chunk_digest, is_whole) {
                ("", true) => &wire.digest,
                (text, _) => text,
            };
            let digest = text
                .parse::<Digest>()
                .map_err(|error| IndexError::malformed(FORM, format!("a chunk's digest: {error}")))?;
            Some(self.place(wire, length, *digest.bytes())?)
        };
        file.parts.push(Part {
            length,
            stream_offset,
        });
        Ok(())
    }

    /// Finds a place in the stream for a chunk.
    fn place(&mut self, wire: &Wire<'_>, length: u64, digest: [u8; 32]) -> Result<u64, IndexError> {
        let too_far = || malformed("a chunk ends beyond 2^63");
        let inner_end = wire
            .inner_offset
            .checked_add(length)
            .filter(|end| *end < 1 << 63)
            .ok_or_else(too_far)?;
        if let Some(member) = &mut self.member
            && member.stored == wire.offset
        {
            if wire.inner_offset < member.length {
                return Err(malformed("chunks overlap"));
            }
            member.chunks.push((wire.inner_offset, length, digest));
            member.length = inner_end;
            return member.stream.checked_add(wire.inner_offset).ok_or_else(too_far);
        }
        if self
            .member
            .as_ref()
            .is_some_and(|member| wire.offset < member.stored)
        {
            return Err(malformed("chunks are out of order"));
        }
        self.close_member(wire.offset)?;
        let stream = self.stream_end;
        // Only the end of the last chunk of a file with several chunks is known; it is not before the end of this one.
        let is_whole = wire.kind == "reg" && length == wire.size;
        self.member = Some(Member {
            stored: wire.offset,
            stored_end: (is_whole && wire.end_offset > 0).then_some(wire.end_offset),
            stream,
            length: inner_end,
            chunks: vec![(wire.inner_offset, length, digest)],
        });
        stream.checked_add(wire.inner_offset).ok_or_else(too_far)
    }

    /// Ends the member before `end` of the stored layer.
    fn close_member(&mut self, end: u64) -> Result<(), IndexError> {
        let Some(member) = self.member.take() else {
            return Ok(());
        };
        let stored_end = member.stored_end.map_or(end, |said| said.min(end));
        if stored_end <= member.stored {
            return Err(malformed("a chunk is not within the layer"));
        }
        self.stream_end = member
            .stream
            .checked_add(member.length)
            .ok_or_else(|| malformed("chunks end beyond 2^64"))?;
        let digest = match member.chunks[..] {
            [(0, _, digest)] => SpanDigest::StreamSha256(digest),
            _ => SpanDigest::StreamPartsSha256(parts(&member.chunks)?),
        };
        self.spans.push(Span {
            stored: member.stored..stored_end,
            stream: member.stream..self.stream_end,
            digest,
            expansion: match self.codec {
                Codec::Gzip => Expansion::Gzip,
                Codec::Zstd => Expansion::Zstd,
            },
        });
        Ok(())
    }

    fn close_file(&mut self) -> Result<(), IndexError> {
        let Some(file) = self.open.take() else {
            return Ok(());
        };
        if file.have != file.head.size {
            return Err(malformed("a file's chunks do not make up the file"));
        }
        self.push(&file.head, &file.parts)
    }

    fn push(&mut self, wire: &Wire<'_>, parts: &[Part]) -> Result<(), IndexError> {
        let name = wire.name.as_bytes();
        let cleaned = name.strip_prefix(b"./").unwrap_or(name);
        if cleaned == TOC_NAME || LANDMARKS.contains(&cleaned) {
            return Ok(());
        }
        let link = wire.link_name.as_bytes();
        let device = |is_char| What::Device {
            is_char,
            major: wire.dev_major,
            minor: wire.dev_minor,
        };
        let what = match &*wire.kind {
            "reg" => What::File(parts),
            "dir" => What::Directory,
            "symlink" => What::Symlink(link),
            "hardlink" => What::HardLink(link),
            "char" => device(true),
            "block" => device(false),
            "fifo" => What::Fifo,
            other => {
                let other: String = other.chars().take(32).collect();
                return Err(IndexError::unsupported(
                    FORM,
                    format!("an entry of type {other:?}"),
                ));
            }
        };
        let mtime = match wire.modtime.as_deref() {
            None | Some("") => Timestamp::default(),
            Some(text) => {
                rfc3339::parse(text.as_bytes()).ok_or_else(|| malformed("a file's time is not one"))?
            }
        };
        let decode = |(name, value): (&String, &String)| {
            let value = base64::engine::general_purpose::STANDARD.decode(value);
            value.map(|value| (name.clone(), value))
        };
        let xattrs: Vec<(String, Vec<u8>)> = wire
            .xattrs
            .iter()
            .flatten()
            .map(decode)
            .collect::<Result<_, _>>()
            .map_err(|_| malformed("an extended attribute is not base64"))?;
        self.builder.push(&Entry {
            at: self.seen,
            name,
            what,
            owner: owner(wire.mode, wire.uid, wire.gid, mtime),
            xattrs: xattrs
                .iter()
                .map(|(name, value)| (name.as_bytes(), value.as_slice()))
                .collect(),
        })
    }

    fn finish(mut self, end: u64) -> Result<LayerIndex, IndexError> {
        self.close_file()?;
        self.close_member(end)?;
        let spans =
            SpanTable::new(self.spans, end).map_err(|source| IndexError::Spans { form: FORM, source })?;
        self.builder.finish(spans)
    }
}

/// The whole table.
struct Document<'r, 'l>(&'r mut Reader<'l>);

impl<'de> DeserializeSeed<'de> for Document<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of contents")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_entries = false;
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            if key != "entries" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if has_entries {
                return Err(A::Error::duplicate_field("entries"));
            }
            has_entries = true;
            map.next_value_seed(Entries(self.0))?;
        }
        if has_entries {
            Ok(())
        } else {
            Err(A::Error::missing_field("entries"))
        }
    }
}

/// Its list of entries.
struct Entries<'r, 'l>(&'r mut Reader<'l>);

impl<'de> DeserializeSeed<'de> for Entries<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(wire) = entries.next_element::<Wire<'_>>()? {
            if let Err(error) = self.0.entry(wire) {
                self.0.error = Some(error);
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}
