//! Conversion: from a tree and its data files to the parts of a converted image.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter, Seek};
use std::path::Path;

use serde::Serialize;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs;
use thaw_imagefs::tree::{BlobExtent, Kind, Tree};

use crate::error::Error;
use crate::prefetch::{LoadOrder, OrderedBlob, Run};
use crate::progress::{Event, Progress};
use crate::source::Descriptor;
use crate::store::{Form, layer_key};

use super::chunks::{Chunks, Distinct, Piece, Place, SourceBlob};
use super::cut::Chunking;
use super::dictionary::{Dictionary, known};
use super::input::Input;
use super::manifest::{MAX_BLOBS, Manifest, StoredTable, descriptor};
use super::metadata::{self, HEAD_ANNOTATION, Placed, ROOT_ANNOTATION};
use super::original::Original;
use super::table::Table;
use super::{BLOB_TYPE, LOAD_ORDER_TYPE, METADATA_TYPE, TABLE_TYPE, frames};

/// How to convert.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to cut files; none: as the first dictionary was, or [`Chunking::default`].
    pub chunking: Option<Chunking>,
    /// Of zstd, 1 to 22.
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

/// What a conversion came to. Lengths are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    pub chunking: String,
    /// Files with data.
    pub files: u64,
    /// Chunks of all files, and their bytes.
    pub chunks: u64,
    pub logical_bytes: u64,
    /// Of those bytes, chunks of zeros, which become holes.
    pub zero_bytes: u64,
    /// Distinct chunks.
    pub unique_chunks: u64,
    pub unique_bytes: u64,
    /// Distinct chunks that dictionaries have.
    pub reused_chunks: u64,
    pub reused_bytes: u64,
    /// Distinct chunks that are stored anew, and what they take.
    pub new_chunks: u64,
    pub new_bytes: u64,
    pub stored_bytes: u64,
    /// EROFS metadata, expanded and as it is stored.
    pub metadata_bytes: u64,
    pub stored_metadata_bytes: u64,
    pub table_bytes: u64,
    pub load_order_bytes: u64,
    /// Bytes of the load order's runs that no chunk was found for: of another image, or another form of it.
    pub unmatched_load_order_bytes: u64,
    /// What a registry that has the dictionaries' images must be sent: blobs, documents, config and manifest.
    pub push_bytes: u64,
}

/// Content of a part.
pub enum Body {
    Bytes(Vec<u8>),
    File(File),
    /// Of that dictionary, where it can be had.
    Dictionary(usize),
}

/// A blob the manifest refers to.
pub struct Part {
    pub descriptor: Descriptor,
    pub body: Body,
}

/// A converted image, ready to be written.
pub struct Converted {
    pub manifest: Vec<u8>,
    pub digest: Digest,
    /// The config first.
    pub parts: Vec<Part>,
    pub facts: Facts,
}

/// Converts. The blob is written to a file without a name in `scratch`. Takes long: call it where that is allowed.
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
    // Cutting and hashing count as half of the work, compressing as the other.
    let known = known(dictionaries);
    let chunks = Chunks::of(&input.tree, &input.blobs, chunking, &known, &|done| {
        told(done / 2)
    })?;
    drop(known);
    let order = input
        .load_order
        .as_ref()
        .map(|order| Ordered::of(order, &input.blobs, &chunks));

    let mut file = tempfile::tempfile_in(scratch).map_err(|error| Error::io(scratch, error))?;
    let groups = groups(&chunks, order.as_ref());
    let table = {
        let mut out = BufWriter::with_capacity(1 << 20, &file);
        let written = |done: u64, new: u64| {
            let share = u128::from(total - total / 2) * u128::from(done) / u128::from(new.max(1));
            told(total / 2 + share as u64);
        };
        let table = frames::write(
            &groups,
            &chunks.distinct,
            &input.blobs,
            options.level,
            &mut out,
            &written,
        )?;
        io::Write::flush(&mut out).map_err(|error| Error::io(scratch, error))?;
        table
    };
    told(total);
    file.rewind().map_err(|error| Error::io(scratch, error))?;

    let blobs = Blobs::of(&chunks.distinct, dictionaries, table, file)?;
    let places = blobs.places(&chunks.distinct, &groups);
    set_extents(&mut input.tree, &chunks.pieces, &chunks.distinct, &places);
    let lengths: Vec<u64> = blobs.list.iter().map(|blob| blob.length).collect();
    let mut image = Vec::new();
    let summary = erofs::write(&input.tree, &lengths, &mut image).map_err(Error::Metadata)?;
    let placed: Vec<Placed> = summary
        .blobs
        .iter()
        .zip(&blobs.list)
        .map(|(placement, blob)| Placed {
            address: placement.address,
            length: placement.length,
            table: blob.stored.table.digest,
        })
        .collect();
    if image.len() as u64 > metadata::MAX_METADATA {
        return Err(Error::Metadata(erofs::WriteError::TooLarge {
            what: "metadata",
            limit: metadata::MAX_METADATA,
        }));
    }
    let (document, head) =
        metadata::encode(&image, &placed, options.level).map_err(|error| Error::io(scratch, error))?;
    let load_order = order
        .map(|order| order.document(original.image, &blobs, &chunks.distinct, &places))
        .transpose()?;

    let facts = facts(
        chunking,
        &chunks,
        &blobs,
        image.len(),
        document.len(),
        load_order.as_ref(),
    );
    assemble(
        original,
        chunking,
        options.level,
        blobs,
        (document, head),
        load_order,
        facts,
    )
}

/// The blobs of the converted image: those of dictionaries it needs, then its own.
struct Blobs {
    list: Vec<Blob>,
    /// Dictionary and blob of it, to the place in the list.
    known: BTreeMap<(u32, u32), u32>,
}

struct Blob {
    stored: StoredTable,
    length: u64,
    document: Vec<u8>,
    /// The file, of the image's own.
    body: Body,
}

impl Blobs {
    fn of(
        distinct: &[Distinct],
        dictionaries: &[Dictionary],
        table: Table,
        file: File,
    ) -> Result<Self, Error> {
        let used: std::collections::BTreeSet<(u32, u32)> = distinct
            .iter()
            .filter_map(|chunk| match chunk.place {
                Place::Known(known) => Some((known.dictionary, known.blob)),
                Place::Source { .. } => None,
            })
            .collect();
        let mut list: Vec<Blob> = Vec::new();
        let mut known = BTreeMap::new();
        for (dictionary, blob) in used {
            let place = list.len() as u32;
            let one = &dictionaries[dictionary as usize].blobs[blob as usize];
            known.insert((dictionary, blob), place);
            list.push(Blob {
                stored: one.stored.clone(),
                length: one.table.data_length,
                document: one.document.clone(),
                body: Body::Dictionary(dictionary as usize),
            });
        }
        if table.data_length > 0 {
            let document = table.encode();
            if document.len() as u64 > super::table::MAX_TABLE {
                return Err(Error::malformed(
                    "the converted image",
                    "it has too many chunks: choose a larger chunk size",
                ));
            }
            list.push(Blob {
                stored: StoredTable {
                    table: descriptor(TABLE_TYPE, &document),
                    data: Descriptor {
                        media_type: BLOB_TYPE.into(),
                        digest: table.blob,
                        size: table.stored_length,
                        urls: Vec::new(),
                        platform: None,
                        annotations: None,
                    },
                },
                length: table.data_length,
                document,
                body: Body::File(file),
            });
        }
        if list.len() > MAX_BLOBS {
            return Err(Error::malformed(
                "the converted image",
                "it would refer to more than 256 blobs: use fewer dictionaries",
            ));
        }
        Ok(Self { list, known })
    }

    /// Where each distinct chunk is: the blob, and the offset in its data file.
    fn places(&self, distinct: &[Distinct], groups: &[Vec<u32>]) -> Vec<(u32, u64)> {
        let own = self.list.len().saturating_sub(1) as u32;
        let mut places: Vec<(u32, u64)> = distinct
            .iter()
            .map(|chunk| match chunk.place {
                Place::Known(known) => (self.known[&(known.dictionary, known.blob)], known.offset),
                Place::Source { .. } => (own, 0),
            })
            .collect();
        let mut offset = 0;
        for index in groups.iter().flatten() {
            places[*index as usize].1 = offset;
            offset += distinct[*index as usize].length;
        }
        places
    }
}

/// A load order in terms of distinct chunks.
struct Ordered {
    /// Each chunk once, by its first read.
    chunks: Vec<u32>,
    dropped: u64,
    unmatched: u64,
}

impl Ordered {
    fn of(order: &LoadOrder, sources: &[SourceBlob], chunks: &Chunks) -> Self {
        // The document's blobs, as the source counts them.
        let blobs: Vec<Option<u32>> = order
            .blobs
            .iter()
            .map(|wanted| {
                let is_it = |source: &SourceBlob| {
                    source.length == wanted.length
                        && (source.id == wanted.digest
                            || (wanted.layer.is_some() && source.layer == wanted.layer))
                };
                sources.iter().position(is_it).map(|place| place as u32)
            })
            .collect();
        let mut pieces: Vec<&Piece> = chunks.pieces.iter().collect();
        pieces.sort_unstable_by_key(|piece| piece.source);
        let mut seen = HashSet::new();
        let mut ordered = Self {
            chunks: Vec::new(),
            dropped: order.dropped,
            unmatched: 0,
        };
        for run in &order.runs {
            let Some(blob) = blobs.get(run.blob as usize).copied().flatten() else {
                ordered.unmatched += run.length;
                continue;
            };
            let end = run.offset.saturating_add(run.length);
            let last_before = pieces
                .partition_point(|piece| piece.source <= (blob, run.offset))
                .saturating_sub(1);
            for piece in &pieces[last_before..] {
                if piece.source >= (blob, end) {
                    break;
                }
                let length = chunks.distinct[piece.chunk as usize].length;
                let reaches = piece.source.0 == blob && piece.source.1 + length > run.offset;
                if reaches && seen.insert(piece.chunk) {
                    ordered.chunks.push(piece.chunk);
                }
            }
        }
        ordered
    }

    fn document(
        self,
        image: Digest,
        blobs: &Blobs,
        distinct: &[Distinct],
        places: &[(u32, u64)],
    ) -> Result<(Vec<u8>, u64), Error> {
        let names = blobs.list.iter().map(|blob| OrderedBlob {
            digest: layer_key(
                Form::Accelerated,
                &blob.stored.data.digest,
                &blob.stored.table.digest,
            ),
            layer: None,
            length: blob.length,
        });
        let mut runs: Vec<Run> = Vec::new();
        for index in self.chunks {
            let (blob, offset) = places[index as usize];
            let length = distinct[index as usize].length;
            match runs.last_mut() {
                Some(last) if last.blob == blob && last.offset + last.length == offset => {
                    last.length += length;
                }
                _ => runs.push(Run { blob, offset, length }),
            }
        }
        let order = LoadOrder::new(image, names.collect(), runs, self.dropped)?;
        Ok((order.to_json()?, self.unmatched))
    }
}

/// The chunks to store: those a start reads, in its order; then the others as they appeared.
fn groups(chunks: &Chunks, order: Option<&Ordered>) -> Vec<Vec<u32>> {
    let is_new = |index: &u32| matches!(chunks.distinct[*index as usize].place, Place::Source { .. });
    let first: Vec<u32> = order
        .iter()
        .flat_map(|order| &order.chunks)
        .copied()
        .filter(is_new)
        .collect();
    let early: HashSet<u32> = first.iter().copied().collect();
    let rest = (0..chunks.distinct.len() as u32)
        .filter(|index| is_new(index) && !early.contains(index))
        .collect();
    vec![first, rest]
}

/// Gives every file the extents of its chunks.
fn set_extents(tree: &mut Tree, pieces: &[Piece], distinct: &[Distinct], places: &[(u32, u64)]) {
    for inode in &mut tree.inodes {
        if let Kind::File { extents, .. } = &mut inode.kind {
            extents.clear();
        }
    }
    for piece in pieces {
        let Kind::File { extents, .. } = &mut tree.inodes[piece.inode as usize].kind else {
            continue;
        };
        let (blob, data_offset) = places[piece.chunk as usize];
        let length = distinct[piece.chunk as usize].length;
        match extents.last_mut() {
            Some(last)
                if last.blob == blob
                    && last.file_offset + last.length == piece.file_offset
                    && last.data_offset + last.length == data_offset =>
            {
                last.length += length;
            }
            _ => extents.push(BlobExtent {
                file_offset: piece.file_offset,
                blob,
                data_offset,
                length,
            }),
        }
    }
}

fn facts(
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

fn assemble(
    original: &Original,
    chunking: Chunking,
    level: i32,
    blobs: Blobs,
    (document, head): (Vec<u8>, usize),
    load_order: Option<(Vec<u8>, u64)>,
    mut facts: Facts,
) -> Result<Converted, Error> {
    let mut metadata = descriptor(METADATA_TYPE, &document);
    metadata.annotations = Some(BTreeMap::from([
        (
            ROOT_ANNOTATION.into(),
            blake3::hash(&document[..head]).to_hex().to_string(),
        ),
        (HEAD_ANNOTATION.into(), head.to_string()),
    ]));
    let load_order = load_order.map(|(document, _)| (descriptor(LOAD_ORDER_TYPE, &document), document));
    let manifest = Manifest {
        config: original.config_descriptor(),
        subject: original.subject.clone(),
        metadata: metadata.clone(),
        blobs: blobs.list.iter().map(|blob| blob.stored.clone()).collect(),
        load_order: load_order.as_ref().map(|(descriptor, _)| descriptor.clone()),
        chunking: Some(chunking),
    };
    let bytes = manifest.encode(level)?;
    let mut parts = vec![
        Part {
            descriptor: manifest.config,
            body: Body::Bytes(original.config.clone()),
        },
        Part {
            descriptor: metadata,
            body: Body::Bytes(document),
        },
    ];
    for blob in blobs.list {
        let table_body = match blob.body {
            Body::Dictionary(dictionary) => Body::Dictionary(dictionary),
            Body::Bytes(_) | Body::File(_) => Body::Bytes(blob.document),
        };
        parts.push(Part {
            descriptor: blob.stored.table,
            body: table_body,
        });
        parts.push(Part {
            descriptor: blob.stored.data,
            body: blob.body,
        });
    }
    parts.extend(load_order.map(|(descriptor, document)| Part {
        descriptor,
        body: Body::Bytes(document),
    }));
    facts.push_bytes = bytes.len() as u64
        + parts
            .iter()
            .filter(|part| !matches!(part.body, Body::Dictionary(_)))
            .map(|part| part.descriptor.size)
            .sum::<u64>();
    Ok(Converted {
        digest: Digest::of(&bytes),
        manifest: bytes,
        parts,
        facts,
    })
}
