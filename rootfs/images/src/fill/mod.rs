//! Filling cache files with the data that guests read, from spans of the stored blobs, by the layers' indexes.
//!
//! Invariant: a chunk is written as a whole, from bytes that were compared with their digest, and its bit is set
//! afterwards. A crash or failure at any moment leaves a missing chunk, never a wrong one. In a process, each span is
//! read on demand once at a time, however many callers wait for it; processes that fill the same blob write the same
//! bytes.
//!
//! Steps: missing chunks, the pieces of the data file in them, the spans that hold those pieces ([`plan`]), runs of
//! neighbouring spans ([`in_flight`]). The spans that were read are expanded and verified; every chunk that they yield
//! completely is written at once ([`chunk`]), and spans that yield a part of a chunk stay in memory for a while
//! ([`recent`]).

mod blob;
mod chunk;
mod in_flight;
mod plan;
mod recent;
#[cfg(test)]
#[path = "fill_test.rs"]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use thaw_imagefs::digest::Digest;
use tokio::sync::Semaphore;

use crate::blocking::blocking;
use crate::error::Error;
use crate::fetch::FetchOptions;
use crate::progress::Silent;
use crate::ranges::Priority;
use crate::source::SourceOptions;
use crate::store::Store;

use blob::{Blob, Blobs, Origins};
use chunk::Assembly;
use in_flight::{InFlight, SpanKey};
use recent::Recent;
use thaw_sys::lock::Lock;

/// Chunks filled together, which bounds the memory of their assembly.
const WINDOW: usize = 32;
/// Bytes of expanded spans that are gathered before they are copied to their chunks (one span may be larger).
const GATHERED: u64 = 32 << 20;
/// KiB of expanded spans of all reads in flight in the process; a read waits until there is room.
const MEMORY_KIB: u32 = 256 << 10;
/// The same for prefetches, so that they never take the room of a demand.
const PREFETCH_KIB: u32 = 64 << 10;

/// Counters of a filler, for metrics.
#[derive(Debug, Default)]
pub struct FillStats {
    /// Fills requested.
    pub asked: AtomicU64,
    /// Requested fills whose chunks were already ready.
    pub ready: AtomicU64,
    /// Reads of stored ranges.
    pub reads: AtomicU64,
    /// Bytes of stored ranges.
    pub stored_bytes: AtomicU64,
    /// Spans expanded.
    pub spans: AtomicU64,
    /// Chunks made ready.
    pub chunks: AtomicU64,
    /// Fills that joined a read in flight.
    pub joined: AtomicU64,
    /// Prefetches cancelled because a guest needed the same data.
    pub overtaken: AtomicU64,
    /// Spans found among those expanded shortly before.
    pub kept: AtomicU64,
    /// Chunks or spans refused for a wrong digest.
    pub mismatches: AtomicU64,
    /// Cache files that were found truncated.
    pub cut: AtomicU64,
    /// Layers unpacked again because they lacked an index.
    pub repairs: AtomicU64,
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Fills blobs of one store. Cheap to clone; one per process, so that misses share reads.
#[derive(Clone)]
pub struct Filler {
    inner: Arc<Inner>,
    /// Bytes of stored ranges that were read for this filler's owner.
    fetched: Fetched,
}

/// Counts bytes of stored ranges.
type Fetched = Arc<AtomicU64>;

/// The originator of a fill.
#[derive(Clone)]
struct Asker {
    priority: Priority,
    fetched: Fetched,
}

struct Inner {
    store: Store,
    options: FetchOptions,
    stats: FillStats,
    blobs: Blobs,
    origins: Origins,
    in_flight: Mutex<HashMap<SpanKey, Arc<InFlight>>>,
    recent: Mutex<Recent>,
    memory: Semaphore,
    prefetch_memory: Semaphore,
}

impl Filler {
    pub fn new(store: Store, options: FetchOptions) -> Self {
        Self {
            inner: Arc::new(Inner {
                store,
                options,
                stats: FillStats::default(),
                blobs: Blobs::default(),
                origins: Origins::default(),
                in_flight: Mutex::default(),
                recent: Mutex::default(),
                memory: Semaphore::new(MEMORY_KIB as usize),
                prefetch_memory: Semaphore::new(PREFETCH_KIB as usize),
            }),
            fetched: Fetched::default(),
        }
    }

    /// The same filler with its own count of fetched bytes, for one sandbox.
    pub fn counting_alone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            fetched: Fetched::default(),
        }
    }

    /// Bytes of stored ranges read for the fills of this filler and its clones. A read that another filler started counts there.
    pub fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    fn asker(&self, priority: Priority) -> Asker {
        Asker {
            priority,
            fetched: self.fetched.clone(),
        }
    }

    /// The counters.
    pub fn stats(&self) -> &FillStats {
        &self.inner.stats
    }

    /// Makes `offset..offset + length` of a blob ready, and returns once the bits are set. A range beyond the blob's end is cut. Dropping
    /// the future loses nothing: a read begun for a demand continues.
    ///
    /// # Errors
    /// `NotFound` for a blob the store does not have, `DiskFull`, and errors of the source.
    pub async fn fill(
        &self,
        blob: &Digest,
        offset: u64,
        length: u64,
        priority: Priority,
    ) -> Result<(), Error> {
        let stats = &self.inner.stats;
        count(&stats.asked, 1);
        let blob = self.inner.blob(blob).await?;
        let chunks = blob.files.ready.chunks_of(offset, length);
        let mut at = chunks.start;
        let mut idle = true;
        let asker = self.asker(priority);
        while at < chunks.end {
            let window = blob.missing(&mut at, chunks.end, WINDOW);
            if window.is_empty() {
                break;
            }
            idle = false;
            self.inner.fill_window(&blob, window, &asker, false).await?;
        }
        if idle {
            count(&stats.ready, 1);
        }
        Ok(())
    }

    /// Fetches chunks again even if they are ready, and writes them in place. It repairs bad chunks that [`Store::verify`] found while a
    /// sandbox uses the layer.
    ///
    /// # Errors
    /// Those of [`Filler::fill`].
    pub async fn refetch(&self, blob: &Digest, chunks: &[u64]) -> Result<(), Error> {
        let blob = self.inner.blob(blob).await?;
        if blob.content().is_none() {
            // Unpacking again writes the missing chunks.
            chunks
                .iter()
                .for_each(|chunk| blob.files.ready.clear(*chunk..chunk + 1));
        }
        for window in chunks.chunks(WINDOW) {
            let within = |chunk: &&u64| **chunk < blob.files.ready.chunk_count();
            let window: Vec<u64> = window.iter().filter(within).copied().collect();
            self.inner
                .fill_window(&blob, window, &self.asker(Priority::Demand), true)
                .await?;
        }
        Ok(())
    }
}

impl Inner {
    /// Makes some chunks ready. With `again`, also those that are ready.
    async fn fill_window(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        mut chunks: Vec<u64>,
        asker: &Asker,
        again: bool,
    ) -> Result<(), Error> {
        if !again {
            // After a reboot, or in a hole that belongs there, the bytes may already exist.
            let (checked, wanted) = (blob.clone(), chunks);
            chunks = blocking(move || checked.compare(wanted)).await?;
        }
        if chunks.is_empty() {
            return Ok(());
        }
        if blob.content().is_none() {
            return self.repair(blob, &chunks).await;
        }
        let mut assembly = Assembly::new(blob.clone(), chunks, again);
        let spans = assembly.spans();
        let mut rest = &spans[..];
        while !rest.is_empty() {
            let (batch, after) = rest.split_at(blob.batch(rest, GATHERED));
            rest = after;
            let expanded = {
                // Chunks that other readers have filled meanwhile need not be gathered.
                let still = |spans: Vec<usize>| match again {
                    true => spans,
                    false => assembly.still_wanted(&spans),
                };
                self.gather(blob, batch.to_vec(), asker, &still).await?
            };
            if !again && assembly.is_ready() {
                return Ok(());
            }
            assembly = blocking(move || {
                expanded
                    .iter()
                    .for_each(|(span, bytes)| assembly.add(*span, bytes));
                Ok(assembly)
            })
            .await?;
        }
        let inner = self.clone();
        blocking(move || {
            let refused = assembly.commit(&inner.stats);
            if let Err(Error::ChunkDigest { .. }) = &refused {
                inner.forget(assembly.blob().id, &spans);
            }
            refused
        })
        .await
    }

    /// Unpacks a layer without an index again.
    async fn repair(&self, blob: &Blob, chunks: &[u64]) -> Result<(), Error> {
        count(&self.stats.repairs, 1);
        let options = SourceOptions {
            scratch: self.store.root().to_owned(),
            client: Some(self.options.client.clone()),
            ..self.options.source.clone()
        };
        for chunk in chunks {
            let range = blob.files.ready.chunk_range(*chunk);
            self.store
                .repair(
                    &blob.id,
                    range.start,
                    range.end - range.start,
                    &options,
                    Arc::new(Silent),
                )
                .await?;
        }
        Ok(())
    }

    fn forget(&self, blob: Digest, spans: &[usize]) {
        let mut recent = self.recent.locked();
        spans.iter().for_each(|span| recent.remove(&(blob, *span)));
    }
}

/// Whether `inner` lies in `outer`.
fn within(inner: &Range<u64>, outer: &Range<u64>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}
