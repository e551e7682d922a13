//! The ztoc: a layer's table of contents and its checkpoints.

use std::io::Read;

use crate::index::LayerIndex;
use crate::index::form::FormError;
use crate::layer::Limits;
use crate::span::SpanTable;

const FORM: &str = "ztoc";

/// The table of contents of a tar stream, with what a ztoc wants of it and a tree does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toc {
    /// Bytes of the stream, up to and with its end marker.
    pub stream_length: u64,
}

/// Reads a ztoc of a stored layer of `stored_size` bytes.
///
/// # Errors
/// [`FormError`] when it is none, lies, or describes a layer that would be refused.
pub fn read_ztoc(bytes: &[u8], stored_size: u64, limits: &Limits) -> Result<LayerIndex, FormError> {
    let _ = (bytes, stored_size, limits);
    Err(FormError::unsupported(FORM, "FlatBuffers"))
}

/// Reads an uncompressed tar stream to its end and notes what a ztoc says of it.
///
/// # Errors
/// [`FormError`] when the stream is no layer, or has what a ztoc cannot say (sparse files).
pub fn scan(tar: impl Read, limits: &Limits) -> Result<Toc, FormError> {
    let _ = (tar, limits);
    Err(FormError::unsupported(FORM, "tar streams"))
}

/// Writes a ztoc. `spans` are those of the whole stored layer of `stored_size` bytes: deflate spans made at
/// checkpoints about `span_size` bytes of stream apart, with SHA-256 digests of their stored bytes; or plain ones.
///
/// # Errors
/// [`FormError`] when the spans are of another kind.
pub fn write_ztoc(
    toc: &Toc,
    spans: &SpanTable,
    span_size: u64,
    stored_size: u64,
    build_tool: &str,
) -> Result<Vec<u8>, FormError> {
    let _ = (toc, spans, span_size, stored_size, build_tool);
    Err(FormError::unsupported(FORM, "FlatBuffers"))
}
