//! Conversion of images to Thaw's own format: chunk-deduplicated, compressed in frames, with ready-made EROFS metadata
//! (`docs/image-format.md`).
//!
//! A [`Job`] pulls an image, converts it and pushes the result. [`convert`] does the work: it cuts files into chunks, leaves
//! out those that *dictionary* images have, compresses the others in frames, and writes metadata that refers to both.
//!
//! Invariant: the same input and options give the same bytes.

mod blobs;
mod body;
mod chunks;
mod cut;
mod dictionary;
mod facts;
mod frames;
mod input;
mod job;
mod layout;
mod original;
mod parts;
mod publish;

use std::fs::File;
use std::io::{self, BufWriter, Seek};
use std::path::Path;

use thaw_imagefs::erofs;

use crate::accelerated::table::Table;
use crate::accelerated::{Placed, metadata};
use crate::error::Error;
use crate::progress::{Event, Progress};

pub use body::Body;
pub use chunks::{DataFile, SourceBlob};
pub use cut::{Chunking, ChunkingError};
pub use dictionary::Dictionary;
pub use facts::Facts;
pub use input::Input;
pub use job::{Job, Outcome};
pub use original::Original;
pub use parts::{Converted, Part};
pub use publish::{Pushed, find};

use blobs::Blobs;
use chunks::Chunks;
use layout::Ordered;
use parts::Documents;

/// How to convert.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to cut files. `None`: as the first dictionary was cut, or else [`Chunking::default`].
    pub chunking: Option<Chunking>,
    /// The compression level of zstd, 1 to 22.
    pub level: i32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            chunking: None,
            level: 9,
        }
    }
}

/// Converts an image. The blob is written to an unnamed file in `scratch`. This takes long, so call it on a blocking thread.
///
/// # Errors
/// `Io` and `DiskFull`; `Malformed` for a tree whose data is not in its blobs; `Metadata`.
pub fn convert(
    mut input: Input,
    original: &Original,
    options: &Options,
    dictionaries: &[Dictionary],
    scratch: &Path,
    progress: &dyn Progress,
) -> Result<Converted, Error> {
    let total = input.bytes();
    let told = |done| progress.event(Event::Converting { done, total });
    let chunking = options
        .chunking
        .or_else(|| dictionaries.iter().find_map(|dictionary| dictionary.chunking))
        .unwrap_or_default();
    // Cutting and hashing count as half of the work, compressing as the other half.
    let known = dictionary::known(dictionaries);
    let chunks = Chunks::of(&input.tree, &input.blobs, chunking, &known, &|done| {
        told(done / 2)
    })?;
    drop(known);
    let order = input
        .load_order
        .as_ref()
        .map(|order| Ordered::of(order, &input.blobs, &chunks));

    let groups = layout::groups(&chunks, order.as_ref());
    let compressed = |done: u64, new: u64| {
        let share = u128::from(total - total / 2) * u128::from(done) / u128::from(new.max(1));
        told(total / 2 + share as u64);
    };
    let (table, file) = compress(&groups, &chunks, &input, options.level, scratch, &compressed)?;
    told(total);

    let blobs = Blobs::of(&chunks.distinct, dictionaries, table, file)?;
    let places = blobs.places(&chunks.distinct, &groups);
    layout::set_extents(&mut input.tree, &chunks.pieces, &chunks.distinct, &places);
    let (image, placed) = write_metadata(&input, &blobs)?;
    let (document, head) =
        metadata::encode(&image, &placed, options.level).map_err(|error| Error::io(scratch, error))?;
    let load_order = order
        .map(|order| order.document(original.image, &blobs, &chunks.distinct, &places))
        .transpose()?;

    let facts = facts::count(
        chunking,
        &chunks,
        &blobs,
        image.len(),
        document.len(),
        load_order.as_ref(),
    );
    let documents = Documents {
        metadata: document,
        head,
        load_order: load_order.map(|(document, _)| document),
    };
    parts::assemble(original, chunking, options.level, blobs, documents, facts)
}

/// Writes the new chunks in frames to an unnamed file.
fn compress(
    groups: &[Vec<u32>],
    chunks: &Chunks,
    input: &Input,
    level: i32,
    scratch: &Path,
    written: &dyn Fn(u64, u64),
) -> Result<(Table, File), Error> {
    let io = |error| Error::io(scratch, error);
    let mut file = tempfile::tempfile_in(scratch).map_err(io)?;
    let mut out = BufWriter::with_capacity(1 << 20, &file);
    let table = frames::write(groups, &chunks.distinct, &input.blobs, level, &mut out, &written)?;
    io::Write::flush(&mut out).map_err(io)?;
    drop(out);
    file.rewind().map_err(io)?;
    Ok((table, file))
}

/// The EROFS metadata of the tree, and where it places the blobs.
fn write_metadata(input: &Input, blobs: &Blobs) -> Result<(Vec<u8>, Vec<Placed>), Error> {
    let lengths: Vec<u64> = blobs.list.iter().map(|blob| blob.length).collect();
    let mut image = Vec::new();
    let summary = erofs::write(&input.tree, &lengths, &mut image).map_err(Error::Metadata)?;
    if image.len() as u64 > metadata::MAX_METADATA {
        return Err(Error::Metadata(erofs::WriteError::TooLarge {
            what: "metadata",
            limit: metadata::MAX_METADATA,
        }));
    }
    let placed = summary.blobs.iter().zip(&blobs.list);
    let placed = placed.map(|(placement, blob)| Placed {
        address: placement.address,
        length: placement.length,
        table: blob.stored.table.digest,
    });
    Ok((image, placed.collect()))
}

#[cfg(test)]
#[path = "convert_test.rs"]
mod tests;
