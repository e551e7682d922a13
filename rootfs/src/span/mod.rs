//! A stored blob cut into *spans*, each of which can be fetched and expanded without the others.
//!
//! A blob as a registry stores it (gzip, zstd, plain tar, compressed chunks) yields a *stream* of bytes. A [`SpanTable`]
//! says which stored bytes yield which stream bytes, and what is needed to expand them: for deflate, the bits before and
//! the last 32 KiB of output (a *zran* checkpoint); for whole gzip members, zstd frames, LZ4 blocks and plain bytes, nothing.
//!
//! Invariant: a table is hostile until checked. [`SpanTable::new`] accepts only spans that are sorted, do not overlap, lie in
//! the blob, and expand to no more than [`MAX_SPAN`] bytes; [`SpanTable::expand`] yields exactly a span's stream bytes,
//! verified against its digest, or an error, and never more memory than that.

use std::ops::Range;
use std::sync::Arc;

/// Most bytes a span may yield or take: bounds the memory one read costs.
pub const MAX_SPAN: u64 = 64 << 20;

/// How a span's stored bytes become its stream bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expansion {
    /// They are the stream bytes.
    Plain,
    /// Deflate resumed within a gzip member (zlib's `examples/zran.c`): `bits` of the byte *before* the span's first are
    /// its first bits, and `window` is what came before in the stream. The first stored byte of the span is the one that
    /// holds those bits, if there are any.
    Deflate { bits: u8, window: Window },
    /// One or more whole gzip members, or the start of one.
    Gzip,
    /// Whole zstd frames.
    Zstd,
    /// One LZ4 block (RAFS).
    Lz4,
}

/// Up to 32 KiB of output before a checkpoint, kept compressed in memory.
#[derive(Clone, PartialEq, Eq)]
pub struct Window(Arc<[u8]>);

/// What a span is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpanDigest {
    /// Nothing: whoever uses it compares what the span becomes part of.
    None,
    /// SHA-256 of the stored bytes (SOCI).
    StoredSha256([u8; 32]),
    /// SHA-256 of the stream bytes (eStargz, Nydus).
    StreamSha256([u8; 32]),
    /// BLAKE3 of the stream bytes (Nydus).
    StreamBlake3([u8; 32]),
    /// Length and BLAKE3 of each piece the stream bytes consist of, in order (converted images, whose spans are frames of
    /// several chunks). The lengths must sum to the span's.
    StreamChunksBlake3(Arc<[(u32, [u8; 32])]>),
}

/// One span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Bytes of the stored blob to fetch.
    pub stored: Range<u64>,
    /// Bytes of the stream it yields.
    pub stream: Range<u64>,
    pub digest: SpanDigest,
    pub expansion: Expansion,
}

/// Why a span cannot be had from what was fetched, or a table is refused.
#[derive(Debug, thiserror::Error)]
pub enum SpanError {
    #[error("span {span}: its bytes have another digest than the index says")]
    Digest { span: usize },
    #[error("span {span}: it does not expand: {why}")]
    Expansion { span: usize, why: String },
    #[error("the span table is malformed: {0}")]
    Table(&'static str),
}

/// All spans of one stored blob, by stream offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpanTable {
    spans: Vec<Span>,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Window({} bytes compressed)", self.0.len())
    }
}
