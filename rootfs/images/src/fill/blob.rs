//! A blob that is being filled: its files, its index, and the places to read it from, opened once.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use thaw_imagefs::blob::CHUNK_SIZE;
use thaw_imagefs::digest::Digest;
use tokio::sync::OnceCell;

use crate::blocking::blocking;
use crate::error::Error;
use crate::fetch::{self, FetchOptions};
use crate::index::{Content, Piece, Pieces};
use crate::progress::Silent;
use crate::ranges::Ranges;
use crate::store::{BlobFiles, BlobOrigin};

use super::{Inner, count};
use thaw_sys::lock::Lock;

/// Chunks that a span may fill in addition to the requested ones, however small the span is.
const LEAST_CHUNKS: u64 = 256;
/// Number of blobs that are kept open.
const OPEN: usize = 256;

/// One blob and its open files. If the blob is emptied, another one is opened in its place.
pub struct Blob {
    pub id: Digest,
    pub files: BlobFiles,
    identity: Option<(u64, u64)>,
    /// The places from which it can be read, best first.
    pub origins: Vec<BlobOrigin>,
    /// Pieces in the order of the stream, if that differs from the order of the data file.
    by_stream: Option<Vec<u32>>,
}

/// The open blobs, with the last use of each.
#[derive(Default)]
pub struct Blobs {
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    clock: u64,
    blobs: HashMap<Digest, (u64, Arc<Blob>)>,
}

type Reader = Arc<OnceCell<Arc<dyn Ranges>>>;

/// Readers of the images' sources, by reference.
#[derive(Default)]
pub struct Origins {
    pub readers: Mutex<HashMap<(String, bool), Reader>>,
}

impl Inner {
    /// Opens a blob, or finds it open, and makes sure that its data file is complete.
    pub async fn blob(self: &Arc<Self>, id: &Digest) -> Result<Arc<Blob>, Error> {
        let identity = self.store.blob_identity(id);
        let blob = match self.blobs.get(id).filter(|blob| blob.identity == identity) {
            Some(blob) => blob,
            None => {
                let (inner, id) = (self.clone(), *id);
                let blob = Arc::new(blocking(move || inner.open(id)).await?);
                self.blobs.put(blob.clone());
                blob
            }
        };
        let files = &blob.files;
        let length = files.data.metadata().map(|it| it.len());
        if length.is_ok_and(|length| length < files.ready.length()) {
            let (inner, cut) = (self.clone(), blob.clone());
            if blocking(move || inner.store.restore_data(&cut.id, &cut.files)).await? {
                count(&self.stats.cut, 1);
            }
        }
        // Read before the search for missing chunks, because a later change would invalidate its result.
        let failed = |error| Error::blob(blob.id, &blob.files.directory, error);
        if files
            .ready
            .looks_changed(|| files.data.metadata())
            .map_err(failed)?
        {
            let changed = blob.clone();
            let voided = blocking(move || {
                let files = &changed.files;
                let voided = files.ready.void_if_changed(|| files.data.metadata());
                voided.map_err(|error| Error::blob(changed.id, &files.directory, error))
            });
            voided.await?;
        }
        Ok(blob)
    }

    fn open(&self, id: Digest) -> Result<Blob, Error> {
        let identity = self.store.blob_identity(&id);
        let mut files = self.store.blob_files(&id)?;
        let mut origins = Vec::new();
        if let Some(kept) = &files.kept {
            origins = self.store.blob_origins(&id, &kept.stored)?;
            if origins.is_empty() {
                // The images with this layer store it in another form than the index's.
                files.kept = None;
            }
        }
        let by_stream = files.kept.as_ref().and_then(|kept| by_stream(&kept.content));
        Ok(Blob {
            id,
            files,
            identity,
            origins,
            by_stream,
        })
    }

    /// The reader of a place, opened at first use.
    pub async fn reader(&self, origin: &BlobOrigin) -> Result<Arc<dyn Ranges>, Error> {
        let plain_http = origin.plain_http || self.options.source.plain_http;
        let key = (origin.reference.to_string(), plain_http);
        let cell = self.origins.readers.locked().entry(key).or_default().clone();
        let open = || async {
            let mut options = FetchOptions {
                source: self.options.source.clone(),
                client: self.options.client.clone(),
            };
            options.source.plain_http = plain_http;
            options.source.scratch = self.store.root().to_owned();
            fetch::open(&origin.reference, &options, Arc::new(Silent)).await
        };
        cell.get_or_try_init(open).await.cloned()
    }
}

impl Blobs {
    fn get(&self, id: &Digest) -> Option<Arc<Blob>> {
        let Open { clock, blobs } = &mut *self.open.locked();
        *clock += 1;
        let (used, blob) = blobs.get_mut(id)?;
        *used = *clock;
        Some(blob.clone())
    }

    fn put(&self, blob: Arc<Blob>) {
        let Open { clock, blobs } = &mut *self.open.locked();
        *clock += 1;
        blobs.insert(blob.id, (*clock, blob));
        while blobs.len() > OPEN {
            let oldest = blobs.iter().min_by_key(|(_, (used, _))| *used).map(|(id, _)| *id);
            oldest.and_then(|id| blobs.remove(&id));
        }
    }
}

impl Blob {
    pub fn content(&self) -> Option<&Content> {
        self.files.kept.as_ref().map(|kept| &kept.content)
    }

    /// The pieces a chunk consists of.
    pub fn pieces(&self, chunk: u64) -> Vec<Piece> {
        let range = self.files.ready.chunk_range(chunk);
        self.content()
            .map(|content| content.pieces.within(range))
            .unwrap_or_default()
    }

    /// The next missing chunks of `at..end`, at most `most`; moves `at` behind them.
    pub fn missing(&self, at: &mut u64, end: u64, most: usize) -> Vec<u64> {
        let mut missing = Vec::new();
        while *at < end && missing.len() < most {
            if !self.files.ready.is_ready(*at) {
                missing.push(*at);
            }
            *at += 1;
        }
        missing
    }

    /// Makes chunks ready whose bytes already exist; returns the others.
    pub fn compare(&self, chunks: Vec<u64>) -> Result<Vec<u64>, Error> {
        let path = || self.files.directory.join("data");
        let mut missing = Vec::new();
        let mut buffer = Vec::new();
        for chunk in chunks {
            let ready = &self.files.ready;
            if ready.is_ready(chunk) {
                continue;
            }
            // A hole was never written, unless the chunk has no pieces and thus consists of zeros.
            let range = ready.chunk_range(chunk);
            if is_hole(&self.files.data, &range) && !self.pieces(chunk).is_empty() {
                missing.push(chunk);
                continue;
            }
            let there = ready.verify(&self.files.data, chunk, &mut buffer);
            if !there.map_err(|error| Error::blob(self.id, &path(), error))? {
                missing.push(chunk);
            }
        }
        Ok(missing)
    }

    /// How many of these spans to gather at a time.
    pub fn batch(&self, spans: &[usize], most: u64) -> usize {
        let Some(content) = self.content() else {
            return spans.len();
        };
        let mut bytes = 0;
        let fits = spans.iter().take_while(|span| {
            let stream = content.spans.spans().get(**span).map(|span| span.stream.clone());
            bytes += stream.map_or(0, |stream| stream.end - stream.start);
            bytes <= most
        });
        fits.count().clamp(1, spans.len().max(1))
    }

    /// Chunks that need a part of `stream`. If pieces overlap in the stream, some may be missing, which costs a later read.
    pub fn chunks_within(&self, stream: &Range<u64>) -> Vec<u64> {
        let Some(content) = self.content() else {
            return Vec::new();
        };
        let ready = &self.files.ready;
        // A hostile index may scatter a span over the whole blob. The requested chunks are filled regardless.
        let most = (stream.end - stream.start) / CHUNK_SIZE * 4 + LEAST_CHUNKS;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let mut chunks: Vec<u64> = match &content.pieces {
            Pieces::Identity => ready.chunks_of(stream.start, stream.end - stream.start).collect(),
            Pieces::Map(pieces) => {
                let piece = |at: usize| match &self.by_stream {
                    Some(order) => order.get(at).and_then(|at| pieces.get(*at as usize)),
                    None => pieces.get(at),
                };
                let first = partition(pieces.len(), |at| {
                    piece(at).is_some_and(|piece| piece.stream_offset + piece.length <= stream.start)
                });
                let mut last = None;
                (first..pieces.len())
                    .map_while(piece)
                    .take_while(|piece| piece.stream_offset < stream.end)
                    .flat_map(|piece| {
                        let from = piece.stream_offset.max(stream.start) - piece.stream_offset;
                        let to = (piece.stream_offset + piece.length).min(stream.end) - piece.stream_offset;
                        ready.chunks_of(piece.data_offset + from, to.saturating_sub(from))
                    })
                    // Many small files share a chunk, one after another.
                    .filter(|chunk| last.replace(*chunk) != Some(*chunk))
                    .take(most)
                    .collect()
            }
        };
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    }
}

/// The first index in `0..length` for which `before` is false; `before` must be true for all earlier ones.
fn partition(length: usize, before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, length);
    while low < high {
        let middle = low + (high - low) / 2;
        if before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

fn by_stream(content: &Content) -> Option<Vec<u32>> {
    let Pieces::Map(pieces) = &content.pieces else {
        return None;
    };
    if pieces.is_sorted_by_key(|piece| piece.stream_offset) {
        return None;
    }
    let mut order: Vec<u32> = (0..u32::try_from(pieces.len()).ok()?).collect();
    order.sort_by_key(|at| pieces[*at as usize].stream_offset);
    Some(order)
}

/// Whether `range` was never written.
fn is_hole(data: &File, range: &Range<u64>) -> bool {
    match rustix::fs::seek(data.as_fd(), rustix::fs::SeekFrom::Data(range.start)) {
        Ok(next) => next >= range.end,
        Err(rustix::io::Errno::NXIO) => true,
        Err(_) => false,
    }
}
