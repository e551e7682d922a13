//! The blobs that a converted image refers to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;

use crate::accelerated::table::{MAX_TABLE, Table};
use crate::error::Error;
use crate::manifest::{BLOB_TYPE, Descriptor, MAX_BLOBS, StoredTable, TABLE_TYPE};

use super::body::Body;
use super::chunks::{Distinct, Place};
use super::dictionary::Dictionary;

/// The blobs of the converted image: first those of dictionaries that it needs, then its own blob.
pub struct Blobs {
    pub list: Vec<Blob>,
    /// Index in the list, by dictionary and blob of the dictionary.
    known: BTreeMap<(u32, u32), u32>,
}

/// A blob, its chunk table, and the place of its bytes.
pub struct Blob {
    pub stored: StoredTable,
    /// Bytes of the data file.
    pub length: u64,
    /// The chunk table.
    pub document: Vec<u8>,
    pub body: Body,
}

impl Blobs {
    /// `table` and `file` are the image's own blob.
    pub fn of(
        distinct: &[Distinct],
        dictionaries: &[Dictionary],
        table: Table,
        file: File,
    ) -> Result<Self, Error> {
        let used: BTreeSet<(u32, u32)> = distinct
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
            if document.len() as u64 > MAX_TABLE {
                return Err(Error::malformed(
                    "the converted image",
                    "it has too many chunks: choose a larger chunk size",
                ));
            }
            list.push(Blob {
                stored: StoredTable {
                    table: Descriptor::of(TABLE_TYPE, &document),
                    data: Descriptor::new(BLOB_TYPE, table.blob, table.stored_length),
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

    /// The place of each distinct chunk: the blob, and the offset in its data file.
    pub fn places(&self, distinct: &[Distinct], groups: &[Vec<u32>]) -> Vec<(u32, u64)> {
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
