//! Reads in flight: callers that want the same run of spans share one read.
//!
//! Each read is a task of its own. It finishes even if its callers are gone, because its data was needed a moment ago. A guest's read does
//! not wait for a prefetch, whose turn may come late: it cancels the prefetch and starts a new read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use thaw_imagefs::digest::Digest;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::ranges::{Check, Priority};
use crate::span::{Run, SpanError};

use super::blob::Blob;
use super::chunk::{self, Expanded};
use super::{Asker, Inner, count, plan};
use thaw_sys::lock::Lock;

/// A span of a blob.
pub type SpanKey = (Digest, usize);

type Spans = Vec<Expanded>;

type Outcome = Result<Arc<Spans>, Arc<Error>>;

/// How often an overtaken prefetch begins again.
const ATTEMPTS: u32 = 64;

/// An unfinished read, as its waiting callers see it.
pub struct InFlight {
    priority: Priority,
    /// Cancelled when a guest needs the data that this prefetch reads.
    overtaken: CancellationToken,
    done: watch::Receiver<Option<Outcome>>,
}

impl InFlight {
    async fn outcome(&self) -> Outcome {
        let mut done = self.done.clone();
        match done.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(Arc::new(Error::Cancelled))),
            Err(_) => Err(Arc::new(Error::Cancelled)),
        }
    }
}

/// Lists a read under its spans. Dropping it removes the read from the list, however the read ends.
struct Listed {
    inner: Arc<Inner>,
    blob: Digest,
    spans: Range<usize>,
    read: Arc<InFlight>,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut in_flight = self.inner.in_flight.locked();
        for span in self.spans.clone() {
            let key = (self.blob, span);
            if in_flight.get(&key).is_some_and(|it| Arc::ptr_eq(it, &self.read)) {
                in_flight.remove(&key);
            }
        }
    }
}

/// The result of a search for spans.
#[derive(Default)]
struct Found {
    /// Spans kept from earlier reads.
    kept: Vec<(usize, Arc<[u8]>)>,
    /// Other callers' reads to wait for.
    joined: Vec<Arc<InFlight>>,
    /// Spans to read.
    missing: Vec<usize>,
}

impl Inner {
    /// The bytes of spans: kept from earlier reads, from reads that other callers started, or read now. Spans that `still` drops, because
    /// their chunks have become ready meanwhile, are left out.
    pub async fn gather(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        mut wanted: Vec<usize>,
        asker: &Asker,
        still: &(dyn Fn(Vec<usize>) -> Vec<usize> + Sync),
    ) -> Result<HashMap<usize, Arc<[u8]>>, Error> {
        let mut got = HashMap::new();
        for attempt in 0..ATTEMPTS {
            let reads;
            (reads, wanted) = self.join_or_start(blob, wanted, asker, still, &mut got);
            for (read, joined) in reads {
                match read.outcome().await {
                    Ok(spans) => {
                        let these = spans.iter().filter(|(span, ..)| wanted.contains(span));
                        got.extend(these.map(|(span, _, bytes)| (*span, bytes.clone())));
                    }
                    // Overtaken: the read that overtook it is in flight now.
                    Err(_) if read.overtaken.is_cancelled() => {}
                    // The read began before this call, and the cause of its failure may be gone: retry once.
                    Err(_) if joined && attempt == 0 => {}
                    Err(error) => return Err(Error::Shared(error)),
                }
            }
            wanted.retain(|span| !got.contains_key(span));
            if wanted.is_empty() {
                return Ok(got);
            }
        }
        Err(Error::Cancelled)
    }

    /// Finds or starts the reads that yield the spans; those kept from earlier reads go into `got`. Returns the reads, each with whether
    /// another caller started it, and the spans that are still needed.
    fn join_or_start(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        wanted: Vec<usize>,
        asker: &Asker,
        still: &dyn Fn(Vec<usize>) -> Vec<usize>,
        got: &mut HashMap<usize, Arc<[u8]>>,
    ) -> (Vec<(Arc<InFlight>, bool)>, Vec<usize>) {
        let Some(content) = blob.content() else {
            return (Vec::new(), wanted);
        };
        let mut in_flight = self.in_flight.locked();
        // Under the lock: a read leaves the list only after it has set its bits.
        let wanted = still(wanted);
        let found = self.search(blob, &wanted, asker.priority, &in_flight);
        got.extend(found.kept);
        let mut reads: Vec<_> = found.joined.into_iter().map(|read| (read, true)).collect();
        for run in plan::runs(&content.spans, &found.missing, asker.priority) {
            let read = self.start(blob, run, &found.missing, asker, &mut in_flight);
            reads.push((read, false));
        }
        (reads, wanted)
    }

    /// Looks for spans among the kept ones and the reads in flight. A demand cancels the prefetches that read its spans.
    fn search(
        &self,
        blob: &Blob,
        wanted: &[usize],
        priority: Priority,
        in_flight: &HashMap<SpanKey, Arc<InFlight>>,
    ) -> Found {
        let mut recent = self.recent.locked();
        let mut found = Found::default();
        for span in wanted {
            let key = (blob.id, *span);
            if let Some(bytes) = recent.get(&key) {
                count(&self.stats.kept, 1);
                found.kept.push((*span, bytes));
                continue;
            }
            match in_flight.get(&key) {
                Some(read) if read.priority == Priority::Demand || priority == Priority::Prefetch => {
                    if !found.joined.iter().any(|it| Arc::ptr_eq(it, read)) {
                        count(&self.stats.joined, 1);
                        found.joined.push(read.clone());
                    }
                }
                Some(read) => {
                    if !read.overtaken.is_cancelled() {
                        count(&self.stats.overtaken, 1);
                        read.overtaken.cancel();
                    }
                    found.missing.push(*span);
                }
                None => found.missing.push(*span),
            }
        }
        found
    }

    /// Starts the read of a run, and lists it under the run's spans.
    fn start(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        run: Run,
        missing: &[usize],
        asker: &Asker,
        in_flight: &mut HashMap<SpanKey, Arc<InFlight>>,
    ) -> Arc<InFlight> {
        let (finish, done) = watch::channel(None);
        let read = Arc::new(InFlight {
            priority: asker.priority,
            overtaken: CancellationToken::new(),
            done,
        });
        for span in run.spans.clone() {
            // Another read may have a neighbour between two missing spans; its callers still wait for that read.
            let place = in_flight.entry((blob.id, span));
            place
                .and_modify(|it| {
                    if missing.contains(&span) {
                        *it = read.clone();
                    }
                })
                .or_insert_with(|| read.clone());
        }
        let listed = Listed {
            inner: self.clone(),
            blob: blob.id,
            spans: run.spans.clone(),
            read: read.clone(),
        };
        let (inner, blob, asker) = (self.clone(), blob.clone(), asker.clone());
        tokio::spawn(async move {
            let overtaken = listed.read.overtaken.clone();
            let outcome = tokio::select! {
                biased;
                () = overtaken.cancelled() => Err(Arc::new(Error::Cancelled)),
                outcome = inner.read_run(blob, run, &asker) => outcome.map(Arc::new).map_err(Arc::new),
            };
            // Removed from the list first, so that the next caller finds the data instead of a finished read.
            drop(listed);
            let _ = finish.send(Some(outcome));
        });
        read
    }

    /// Reads a run, expands it, and writes every chunk that it yields completely.
    async fn read_run(self: &Arc<Self>, blob: Arc<Blob>, run: Run, asker: &Asker) -> Result<Spans, Error> {
        let priority = asker.priority;
        let memory = match priority {
            Priority::Demand => &self.memory,
            Priority::Prefetch => &self.prefetch_memory,
        };
        let room = memory.acquire_many(self.kib(&blob, &run, priority)).await;
        let _room = room.map_err(|_| Error::Cancelled)?;
        let slot = Arc::new(Mutex::new(None));
        let check: Check = {
            let (inner, blob, run, slot) = (self.clone(), blob.clone(), run.clone(), slot.clone());
            Arc::new(move |stored| {
                let expanded = inner.expand_run(&blob, &run, stored)?;
                *slot.locked() = Some(expanded);
                Ok(())
            })
        };
        let mut failed = Error::Cancelled;
        for origin in &blob.origins {
            count(&self.stats.reads, 1);
            let read = match self.reader(origin).await {
                Ok(reader) => {
                    reader
                        .read(&origin.stored, run.stored.clone(), priority, check.clone())
                        .await
                }
                Err(error) => Err(error),
            };
            match read {
                Ok(bytes) => {
                    count(&self.stats.stored_bytes, bytes.len() as u64);
                    count(&asker.fetched, bytes.len() as u64);
                    let expanded = slot.locked().take();
                    return expanded.unwrap_or_else(|| {
                        Err(Error::malformed(
                            format!("blob {}", origin.stored.digest),
                            "it was not checked",
                        ))
                    });
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn kib(&self, blob: &Blob, run: &Run, priority: Priority) -> u32 {
        let spans = blob.content().map_or(&[][..], |content| content.spans.spans());
        let of_run = spans.get(run.spans.clone()).unwrap_or_default();
        let stream: u64 = of_run
            .iter()
            .map(|span| span.stream.end - span.stream.start)
            .sum();
        let most = match priority {
            Priority::Demand => super::MEMORY_KIB,
            Priority::Prefetch => super::PREFETCH_KIB,
        };
        u32::try_from((stream >> 10).max(1)).unwrap_or(most).min(most)
    }

    /// Expands the bytes of a read. The outer error means that the bytes are wrong, so another place may have the right ones; the inner
    /// error means that the right bytes cannot be written.
    fn expand_run(&self, blob: &Arc<Blob>, run: &Run, stored: &[u8]) -> Result<Result<Spans, Error>, String> {
        let Some(content) = blob.content() else {
            return Err("the blob has no index".into());
        };
        let mut spans = Spans::new();
        for index in run.spans.clone() {
            let bytes = content
                .spans
                .of_run(index, run, stored)
                .and_then(|stored| content.spans.expand(index, stored));
            let bytes = bytes.map_err(|error| {
                if matches!(error, SpanError::Digest { .. }) {
                    count(&self.stats.mismatches, 1);
                }
                error.to_string()
            })?;
            let stream = content.spans.spans()[index].stream.clone();
            spans.push((index, stream, bytes.into()));
        }
        count(&self.stats.spans, spans.len() as u64);
        let (Some((_, first, _)), Some((_, last, _))) = (spans.first(), spans.last()) else {
            return Ok(Ok(spans));
        };
        let stream = first.start..last.end;
        match chunk::commit_whole(blob, &stream, &spans, &self.stats) {
            Err(error @ Error::ChunkDigest { .. }) => Err(error.to_string()),
            Err(error) => Ok(Err(error)),
            Ok(partly) => {
                let mut recent = self.recent.locked();
                for (index, _, bytes) in spans.iter().filter(|(index, ..)| partly.contains(index)) {
                    recent.put((blob.id, *index), bytes.clone());
                }
                drop(recent);
                Ok(Ok(spans))
            }
        }
    }
}
