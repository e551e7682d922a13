//! Statistics of a conversion.

use serde::Serialize;

use super::blobs::Blobs;
use super::body::Body;
use super::chunks::{Chunks, Place};
use super::cut::Chunking;

/// Statistics of a conversion. Lengths are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    pub chunking: String,
    /// Files with data.
    pub files: u64,
    /// Chunks of all files, and their bytes.
    pub chunks: u64,
    pub logical_bytes: u64,
    /// The part of those bytes in chunks of zeros, which become holes.
    pub zero_bytes: u64,
    /// Distinct chunks.
    pub unique_chunks: u64,
    pub unique_bytes: u64,
    /// Distinct chunks that dictionaries have.
    pub reused_chunks: u64,
    pub reused_bytes: u64,
    /// Distinct chunks that are stored anew, and their stored bytes.
    pub new_chunks: u64,
    pub new_bytes: u64,
    pub stored_bytes: u64,
    /// EROFS metadata, expanded and as stored.
    pub metadata_bytes: u64,
    pub stored_metadata_bytes: u64,
    pub table_bytes: u64,
    pub load_order_bytes: u64,
    /// Bytes of the load order's runs for which no chunk was found, because they are of another image or another form of it.
    pub unmatched_load_order_bytes: u64,
    /// Bytes to push to a registry that has the dictionaries' images: blobs, documents, config and manifest.
    pub push_bytes: u64,
}

/// Counts the result of a conversion. `metadata` and `document` are the bytes of the EROFS metadata, expanded and as stored.
pub fn count(
    chunking: Chunking,
    chunks: &Chunks,
    blobs: &Blobs,
    metadata: usize,
    document: usize,
    load_order: Option<&(Vec<u8>, u64)>,
) -> Facts {
    let mut facts = Facts {
        chunking: chunking.to_string(),
        files: chunks.files,
        chunks: chunks.pieces.len() as u64,
        logical_bytes: chunks.bytes,
        zero_bytes: chunks.zeros,
        unique_chunks: chunks.distinct.len() as u64,
        metadata_bytes: metadata as u64,
        stored_metadata_bytes: document as u64,
        ..Facts::default()
    };
    for chunk in &chunks.distinct {
        facts.unique_bytes += chunk.length;
        let (count, bytes) = match chunk.place {
            Place::Known(_) => (&mut facts.reused_chunks, &mut facts.reused_bytes),
            Place::Source { .. } => (&mut facts.new_chunks, &mut facts.new_bytes),
        };
        *count += 1;
        *bytes += chunk.length;
    }
    if let Some(own) = blobs.list.iter().find(|blob| matches!(blob.body, Body::File(_))) {
        facts.stored_bytes = own.stored.data.size;
        facts.table_bytes = own.stored.table.size;
    }
    if let Some((document, unmatched)) = load_order {
        facts.load_order_bytes = document.len() as u64;
        facts.unmatched_load_order_bytes = *unmatched;
    }
    facts
}
