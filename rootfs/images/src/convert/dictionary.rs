//! Chunk dictionaries: the blobs of earlier converted images, whose chunks need not be stored again.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::Error;
use crate::ranges::Ranges;

use super::cut::Chunking;
use crate::accelerated::open::decode_table;
use crate::accelerated::table::{MAX_TABLE, Table};
use crate::fetch::document;
use crate::manifest::{ConvertedManifest, StoredTable};

/// A converted image to whose chunks another image may refer.
pub struct Dictionary {
    pub(super) blobs: Vec<DictionaryBlob>,
    /// How it was cut, because only an image that is cut in the same way shares many chunks with it.
    pub chunking: Option<Chunking>,
    /// A reader of its blobs, to copy them to the destination of an image that refers to them.
    pub(super) ranges: Arc<dyn Ranges>,
    /// Its repository, if it is in a registry, in the form for [`crate::source::push::Push::mount`].
    pub repository: Option<String>,
}

/// A blob of a dictionary.
pub(super) struct DictionaryBlob {
    pub stored: StoredTable,
    pub table: Table,
    pub document: Vec<u8>,
}

/// The place of a chunk in a dictionary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    pub dictionary: u32,
    pub blob: u32,
    /// Its offset in the blob's data file.
    pub offset: u64,
    pub length: u64,
}

impl Dictionary {
    /// Reads the chunk tables of a converted image.
    ///
    /// # Errors
    /// Those of [`super::open`].
    pub async fn open(manifest: &ConvertedManifest, ranges: Arc<dyn Ranges>) -> Result<Self, Error> {
        let mut blobs = Vec::with_capacity(manifest.blobs.len());
        for stored in &manifest.blobs {
            let document = document(&*ranges, "chunk table", &stored.table, MAX_TABLE).await?;
            blobs.push(DictionaryBlob {
                table: decode_table(&stored.table, &document, &stored.data)?,
                stored: stored.clone(),
                document,
            });
        }
        Ok(Self {
            blobs,
            chunking: manifest.chunking.as_ref().and_then(|text| text.parse().ok()),
            ranges,
            repository: None,
        })
    }
}

/// All chunks of all dictionaries. A chunk that several dictionaries have gets its place in the first.
pub(super) fn known(dictionaries: &[Dictionary]) -> HashMap<[u8; 32], Known> {
    let mut known = HashMap::new();
    for (dictionary, one) in (0..).zip(dictionaries) {
        for (blob, table) in (0..).zip(one.blobs.iter().map(|blob| &blob.table)) {
            for (range, chunk) in table.placed() {
                known.entry(chunk.digest).or_insert(Known {
                    dictionary,
                    blob,
                    offset: range.start,
                    length: range.end - range.start,
                });
            }
        }
    }
    known
}
