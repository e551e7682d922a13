//! Prefetching by a load order.
//!
//! Invariants: at most [`AT_ONCE`] pieces are requested at a time, in the order of the document, each with the priority
//! of a prefetch, behind every demand. No more pieces are requested once the [`Prefetch`] is dropped. Errors are
//! ignored: the guest's own read will meet them and report them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::StreamExt;
use thaw_imagefs::blob::CHUNK_SIZE;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::progress::{Event, Progress};
use crate::store::Image;

use crate::load_order::{LoadOrder, Run};

/// Pieces that are requested at a time.
const AT_ONCE: usize = 4;
/// Bytes of a piece: small enough that cancellations and demands take effect soon.
const PIECE: u64 = 8 * CHUNK_SIZE;
/// Consecutive failures after which the rest is skipped, because the source is unavailable.
const FAILURES: u32 = 4;

/// A running prefetch. Dropping it stops it.
#[derive(Debug)]
pub struct Prefetch {
    task: tokio::task::JoinHandle<()>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    done: AtomicU64,
    failed: AtomicU64,
    total: u64,
}

/// How far a prefetch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Bytes that are ready.
    pub done: u64,
    /// Bytes that could not be fetched.
    pub failed: u64,
    pub total: u64,
}

/// A piece of a blob of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub blob: Digest,
    pub offset: u64,
    pub length: u64,
}

/// The parts of an image that a load order names, in pieces and up to `limit` bytes. Blobs that the image lacks are left out: the recording
/// may be of another form of the image.
pub fn wanted(order: &LoadOrder, image: &Image, limit: u64) -> Vec<Wanted> {
    let ours = |run: &Run| {
        let recorded = order.blob(run)?;
        image
            .blobs
            .iter()
            .find(|blob| {
                blob.length == recorded.length
                    && (blob.id == recorded.digest || Some(blob.id) == recorded.layer)
            })
            .map(|blob| blob.id)
    };
    let mut left = limit;
    let mut pieces = Vec::new();
    for run in &order.runs {
        let Some(blob) = ours(run) else { continue };
        let mut offset = run.offset;
        let end = run.offset + run.length;
        while offset < end && left > 0 {
            let length = (PIECE - offset % PIECE).min(end - offset).min(left);
            pieces.push(Wanted { blob, offset, length });
            offset += length;
            left -= length;
        }
    }
    pieces
}

impl Prefetch {
    /// Starts a prefetch, within a tokio runtime. `fill` makes a piece ready with the priority of a prefetch; a piece that is already ready
    /// costs nothing.
    pub fn start<F, Filled>(pieces: Vec<Wanted>, progress: Arc<dyn Progress>, fill: F) -> Prefetch
    where
        F: Fn(Wanted) -> Filled + Send + Sync + 'static,
        Filled: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let counters = Arc::new(Counters {
            total: pieces.iter().map(|piece| piece.length).sum(),
            ..Counters::default()
        });
        let task = tokio::spawn(run(pieces, progress, fill, counters.clone()));
        Prefetch { task, counters }
    }

    /// How far it is.
    pub fn status(&self) -> Ahead {
        Ahead {
            done: self.counters.done.load(Ordering::Relaxed),
            failed: self.counters.failed.load(Ordering::Relaxed),
            total: self.counters.total,
        }
    }

    /// Waits until it has ended.
    pub async fn finished(&mut self) {
        let _ = (&mut self.task).await;
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run<F, Filled>(pieces: Vec<Wanted>, progress: Arc<dyn Progress>, fill: F, counters: Arc<Counters>)
where
    F: Fn(Wanted) -> Filled + Send + Sync,
    Filled: Future<Output = Result<(), Error>> + Send,
{
    let mut in_a_row = 0;
    let mut results = futures_util::stream::iter(pieces)
        .map(|piece| {
            let filled = fill(piece);
            async move { (piece, filled.await) }
        })
        .buffer_unordered(AT_ONCE);
    while let Some((piece, result)) = results.next().await {
        match result {
            Ok(()) => {
                in_a_row = 0;
                let done = counters.done.fetch_add(piece.length, Ordering::Relaxed) + piece.length;
                progress.event(Event::Prefetched {
                    done,
                    total: counters.total,
                });
            }
            Err(error) => {
                counters.failed.fetch_add(piece.length, Ordering::Relaxed);
                let Wanted { blob, offset, .. } = piece;
                tracing::info!(%blob, offset, "not read ahead: {error}");
                in_a_row += 1;
                if in_a_row == FAILURES {
                    tracing::warn!("reading ahead is given up after {FAILURES} failures in a row: {error}");
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use crate::progress::Silent;

    use super::*;

    fn pieces(count: u64) -> Vec<Wanted> {
        (0..count)
            .map(|at| Wanted {
                blob: Digest::of(b"blob"),
                offset: at * PIECE,
                length: PIECE,
            })
            .collect()
    }

    #[tokio::test]
    async fn pieces_are_asked_for_in_order_and_few_at_a_time() {
        let (asked, running, most) = <(Arc<Mutex<Vec<u64>>>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let mut prefetch = Prefetch::start(pieces(40), Arc::new(Silent), {
            let (asked, running, most) = (asked.clone(), running.clone(), most.clone());
            move |piece| {
                asked.lock().unwrap().push(piece.offset);
                let (running, most) = (running.clone(), most.clone());
                async move {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    running.fetch_sub(1, Ordering::SeqCst);
                    Ok(())
                }
            }
        });
        prefetch.finished().await;
        assert!(asked.lock().unwrap().is_sorted());
        assert_eq!(asked.lock().unwrap().len(), 40);
        assert_eq!(most.load(Ordering::SeqCst), AT_ONCE);
        let status = prefetch.status();
        assert_eq!(
            (status.done, status.failed, status.total),
            (40 * PIECE, 0, 40 * PIECE)
        );
    }

    #[tokio::test]
    async fn a_source_that_is_gone_is_not_asked_for_all() {
        let asked = Arc::new(AtomicUsize::default());
        let mut prefetch = Prefetch::start(pieces(1000), Arc::new(Silent), {
            let asked = asked.clone();
            move |_| {
                asked.fetch_add(1, Ordering::SeqCst);
                async { Err(Error::Cancelled) }
            }
        });
        prefetch.finished().await;
        assert!(asked.load(Ordering::SeqCst) <= AT_ONCE + FAILURES as usize);
    }

    #[tokio::test]
    async fn it_stops_when_it_is_dropped() {
        let held = Arc::new(());
        let prefetch = Prefetch::start(pieces(8), Arc::new(Silent), {
            let held = held.clone();
            move |_| {
                let held = held.clone();
                async move {
                    let _held = held;
                    std::future::pending().await
                }
            }
        });
        tokio::task::yield_now().await;
        assert!(Arc::strong_count(&held) > 2);
        drop(prefetch);
        while Arc::strong_count(&held) > 1 {
            tokio::task::yield_now().await;
        }
    }
}
