//! Fakes for tests of formats.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs::{BlobPlacement, Summary};

use crate::error::Error;
use crate::lazy::{LazyBlob, LazyImage};
use crate::ranges::{Check, Priority, Ranges, StoredBlob};

/// A registry in memory.
#[derive(Clone, Default)]
pub(crate) struct Memory {
    pub(crate) blobs: Arc<Mutex<HashMap<Digest, Vec<u8>>>>,
}

#[async_trait]
impl Ranges for Memory {
    async fn read(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        _: Priority,
        check: Check,
    ) -> Result<Bytes, Error> {
        let blobs = self.blobs.lock().unwrap();
        let what = || format!("blob {}", blob.digest);
        let bytes = blobs
            .get(&blob.digest)
            .and_then(|bytes| bytes.get(range.start as usize..range.end as usize))
            .ok_or_else(|| Error::malformed(what(), "it is not there"))?;
        check(bytes).map_err(|problem| Error::malformed(what(), problem))?;
        Ok(Bytes::copy_from_slice(bytes))
    }
}

impl Memory {
    pub(crate) fn insert(&self, bytes: &[u8]) {
        self.blobs
            .lock()
            .unwrap()
            .insert(Digest::of(bytes), bytes.to_vec());
    }

    pub(crate) fn get(&self, digest: &Digest) -> Vec<u8> {
        self.blobs.lock().unwrap()[digest].clone()
    }

    /// The data file of a blob, filled from its spans, with zeros between them.
    pub(crate) fn data(&self, blob: &LazyBlob) -> Result<Vec<u8>, String> {
        let stored = self.get(&blob.stored.digest);
        let spans = &blob.content.spans;
        let mut data = Vec::new();
        for (index, span) in spans.spans().iter().enumerate() {
            let stored = &stored[span.stored.start as usize..span.stored.end as usize];
            data.resize(span.stream.start as usize, 0);
            data.extend(spans.expand(index, stored).map_err(|error| error.to_string())?);
        }
        data.resize(blob.content.data_length as usize, 0);
        Ok(data)
    }
}

impl LazyImage {
    /// The data files of the image's blobs, and their places in its address space.
    pub(crate) fn expanded(&self, memory: &Memory) -> (Summary, Vec<Vec<u8>>) {
        let data = self.blobs.iter().map(|blob| memory.data(blob).unwrap());
        let placed = self.blobs.iter().map(|blob| BlobPlacement {
            address: blob.address,
            length: blob.content.data_length,
        });
        let summary = Summary {
            metadata_length: self.metadata.len() as u64,
            total_length: 0,
            blobs: placed.collect(),
            inodes: 0,
        };
        (summary, data.collect())
    }
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}
