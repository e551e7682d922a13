//! Numbers, pieces and spans in the kept index: small differences to the previous one, as LEB128.

use std::sync::Arc;

use crate::index::{Content, Piece, Pieces};
use crate::span::{Expansion, Span, SpanDigest, SpanTable, StreamPart, WINDOW, Window};

use super::KeptError;

const IDENTITY: u8 = 0;
const MAP: u8 = 1;

const PLAIN: u8 = 0;
const DEFLATE: u8 = 1;
const GZIP: u8 = 2;
const ZSTD: u8 = 3;
const LZ4: u8 = 4;

const NONE: u8 = 0;
const STORED_SHA256: u8 = 1;
const STREAM_SHA256: u8 = 2;
const STREAM_BLAKE3: u8 = 3;
const CHUNKS_BLAKE3: u8 = 4;
const PARTS_SHA256: u8 = 5;

/// Most bytes of a compressed window, with ample room for 32 KiB that zstd cannot compress.
const MAX_WINDOW: usize = WINDOW + 1024;

/// Makes the body.
pub struct Writer(Vec<u8>);

impl Writer {
    /// Leaves room for a header.
    pub fn new(header: usize) -> Writer {
        Writer(vec![0; header])
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }

    pub fn fixed(&mut self, bytes: &[u8; 32]) {
        self.0.extend_from_slice(bytes);
    }

    /// Seven bits per byte, lowest first; the highest bit means that more bytes follow.
    pub fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// A difference, signed: 0, -1, 1, -2 are the numbers 0, 1, 2, 3.
    fn difference(&mut self, from: u64, to: u64) {
        let difference = to.wrapping_sub(from) as i64;
        self.number(((difference << 1) ^ (difference >> 63)) as u64);
    }

    pub fn content(&mut self, content: &Content) {
        self.number(content.data_length);
        match &content.pieces {
            Pieces::Identity => self.0.push(IDENTITY),
            Pieces::Map(pieces) => {
                self.0.push(MAP);
                self.number(pieces.len() as u64);
                let (mut data, mut stream) = (0, 0);
                for piece in pieces {
                    self.number(piece.data_offset - data);
                    self.number(piece.length);
                    self.difference(stream, piece.stream_offset);
                    data = piece.data_offset + piece.length;
                    stream = piece.stream_offset + piece.length;
                }
            }
        }
        let spans = content.spans.spans();
        self.number(spans.len() as u64);
        let (mut stored, mut stream) = (0, 0);
        for span in spans {
            self.difference(stored, span.stored.start);
            self.number(span.stored.end - span.stored.start);
            self.number(span.stream.start - stream);
            self.number(span.stream.end - span.stream.start);
            (stored, stream) = (span.stored.end, span.stream.end);
            self.digest(&span.digest);
            self.expansion(&span.expansion);
        }
    }

    fn digest(&mut self, digest: &SpanDigest) {
        let mut plain = |kind, bytes| {
            self.0.push(kind);
            self.fixed(bytes);
        };
        match digest {
            SpanDigest::None => self.0.push(NONE),
            SpanDigest::StoredSha256(bytes) => plain(STORED_SHA256, bytes),
            SpanDigest::StreamSha256(bytes) => plain(STREAM_SHA256, bytes),
            SpanDigest::StreamBlake3(bytes) => plain(STREAM_BLAKE3, bytes),
            SpanDigest::StreamChunksBlake3(chunks) => {
                self.0.push(CHUNKS_BLAKE3);
                self.number(chunks.len() as u64);
                for (length, bytes) in chunks.iter() {
                    self.number(u64::from(*length));
                    self.fixed(bytes);
                }
            }
            SpanDigest::StreamPartsSha256(parts) => {
                self.0.push(PARTS_SHA256);
                self.number(parts.len() as u64);
                for part in parts.iter() {
                    self.number(u64::from(part.skip));
                    self.number(u64::from(part.length));
                    self.fixed(&part.sha256);
                }
            }
        }
    }

    fn expansion(&mut self, expansion: &Expansion) {
        match expansion {
            Expansion::Plain => self.0.push(PLAIN),
            Expansion::Deflate { bits, window } => {
                self.0.extend_from_slice(&[DEFLATE, *bits]);
                self.number(window.compressed().len() as u64);
                self.0.extend_from_slice(window.compressed());
            }
            Expansion::Gzip => self.0.push(GZIP),
            Expansion::Zstd => self.0.push(ZSTD),
            Expansion::Lz4 => self.0.push(LZ4),
        }
    }
}

/// Reads the body. A count is trusted only once its bytes are present.
pub struct Reader<'a>(&'a [u8]);

const SHORT: KeptError = KeptError::Damaged("it ends early");

impl<'a> Reader<'a> {
    pub fn new(body: &'a [u8]) -> Reader<'a> {
        Reader(body)
    }

    /// Checks that no bytes are left.
    pub fn end(self) -> Result<(), KeptError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(KeptError::Damaged("something follows its end"))
        }
    }

    fn bytes(&mut self, length: usize) -> Result<&'a [u8], KeptError> {
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(SHORT)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn byte(&mut self) -> Result<u8, KeptError> {
        Ok(self.bytes(1)?[0])
    }

    pub fn fixed(&mut self) -> Result<[u8; 32], KeptError> {
        let mut fixed = [0; 32];
        fixed.copy_from_slice(self.bytes(32)?);
        Ok(fixed)
    }

    pub fn number(&mut self) -> Result<u64, KeptError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(KeptError::Damaged("a number is larger than 64 bits"))
    }

    /// `from` plus a number, signed or not.
    fn after(&mut self, from: u64, is_signed: bool) -> Result<u64, KeptError> {
        const BEYOND: KeptError = KeptError::Damaged("an offset is beyond 2^64");
        let number = self.number()?;
        if !is_signed {
            return from.checked_add(number).ok_or(BEYOND);
        }
        let difference = (number >> 1) as i64 ^ -((number & 1) as i64);
        from.checked_add_signed(difference).ok_or(BEYOND)
    }

    pub fn content(&mut self, stored_length: u64) -> Result<Content, KeptError> {
        let data_length = self.number()?;
        let pieces = match self.byte()? {
            IDENTITY => Pieces::Identity,
            MAP => Pieces::Map(self.pieces()?),
            _ => return Err(KeptError::Damaged("its pieces are of no known kind")),
        };
        let spans = SpanTable::new(self.spans()?, stored_length)?;
        Ok(Content::new(data_length, pieces, spans)?)
    }

    fn pieces(&mut self) -> Result<Vec<Piece>, KeptError> {
        let count = self.number()?;
        let mut pieces = Vec::new();
        let (mut data, mut stream) = (0, 0);
        for _ in 0..count {
            let data_offset = self.after(data, false)?;
            let end = self.after(data_offset, false)?;
            let length = end - data_offset;
            let stream_offset = self.after(stream, true)?;
            pieces.push(Piece {
                data_offset,
                length,
                stream_offset,
            });
            data = end;
            stream = stream_offset
                .checked_add(length)
                .ok_or(KeptError::Damaged("an offset is beyond 2^64"))?;
        }
        pieces.shrink_to_fit();
        Ok(pieces)
    }

    fn spans(&mut self) -> Result<Vec<Span>, KeptError> {
        let count = self.number()?;
        let mut spans = Vec::new();
        let (mut stored, mut stream) = (0, 0);
        for _ in 0..count {
            let stored_start = self.after(stored, true)?;
            stored = self.after(stored_start, false)?;
            let stream_start = self.after(stream, false)?;
            stream = self.after(stream_start, false)?;
            spans.push(Span {
                stored: stored_start..stored,
                stream: stream_start..stream,
                digest: self.digest()?,
                expansion: self.expansion()?,
            });
        }
        spans.shrink_to_fit();
        Ok(spans)
    }

    fn short(&mut self) -> Result<u32, KeptError> {
        u32::try_from(self.number()?).map_err(|_| KeptError::Damaged("a chunk is larger than 4 GiB"))
    }

    fn digest(&mut self) -> Result<SpanDigest, KeptError> {
        Ok(match self.byte()? {
            NONE => SpanDigest::None,
            STORED_SHA256 => SpanDigest::StoredSha256(self.fixed()?),
            STREAM_SHA256 => SpanDigest::StreamSha256(self.fixed()?),
            STREAM_BLAKE3 => SpanDigest::StreamBlake3(self.fixed()?),
            CHUNKS_BLAKE3 => {
                let count = self.number()?;
                let mut chunks = Vec::new();
                for _ in 0..count {
                    chunks.push((self.short()?, self.fixed()?));
                }
                SpanDigest::StreamChunksBlake3(Arc::from(chunks))
            }
            PARTS_SHA256 => {
                let count = self.number()?;
                let mut parts = Vec::new();
                for _ in 0..count {
                    parts.push(StreamPart {
                        skip: self.short()?,
                        length: self.short()?,
                        sha256: self.fixed()?,
                    });
                }
                SpanDigest::StreamPartsSha256(Arc::from(parts))
            }
            _ => return Err(KeptError::Damaged("a span's digest is of no known kind")),
        })
    }

    fn expansion(&mut self) -> Result<Expansion, KeptError> {
        Ok(match self.byte()? {
            PLAIN => Expansion::Plain,
            DEFLATE => {
                let bits = self.byte()?;
                let length = self.number()?;
                if length > MAX_WINDOW as u64 {
                    return Err(KeptError::Damaged("a window is larger than 32 KiB"));
                }
                let window = Window::from_compressed(self.bytes(length as usize)?);
                Expansion::Deflate { bits, window }
            }
            GZIP => Expansion::Gzip,
            ZSTD => Expansion::Zstd,
            LZ4 => Expansion::Lz4,
            _ => return Err(KeptError::Damaged("a span is of no known kind")),
        })
    }
}
