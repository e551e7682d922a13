//! Reads in flight: one for each run of spans, whoever waits for it.
//!
//! A flight is a task of its own: it lands even if nobody waits any more, since what it reads was wanted a moment ago.
//! A guest does not wait for a prefetch, which may wait for long behind others: it breaks it off and reads anew.

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
use super::{Asker, Inner, count, lock, plan};

/// A span of a blob.
pub type SpanKey = (Digest, usize);

type Spans = Vec<Expanded>;

type Outcome = Result<Arc<Spans>, Arc<Error>>;

/// How often a prefetch that is overtaken begins again.
const ATTEMPTS: u32 = 64;

/// A read on its way.
pub struct Flight {
    priority: Priority,
    overtaken: CancellationToken,
    landed: watch::Receiver<Option<Outcome>>,
}

impl Flight {
    async fn outcome(&self) -> Outcome {
        let mut landed = self.landed.clone();
        match landed.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(Arc::new(Error::Cancelled))),
            Err(_) => Err(Arc::new(Error::Cancelled)),
        }
    }
}

/// Takes a flight off the board, however it ends.
struct Landing {
    inner: Arc<Inner>,
    blob: Digest,
    spans: Range<usize>,
    flight: Arc<Flight>,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut flights = lock(&self.inner.flights);
        for span in self.spans.clone() {
            let key = (self.blob, span);
            if flights.get(&key).is_some_and(|it| Arc::ptr_eq(it, &self.flight)) {
                flights.remove(&key);
            }
        }
    }
}

impl Inner {
    /// The bytes of spans: kept from before, from reads others have begun, or read now. Those that `still` drops, because
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
            let awaited;
            (awaited, wanted) = self.take_off(blob, wanted, asker, still, &mut got);
            for (flight, joined) in awaited {
                match flight.outcome().await {
                    Ok(spans) => {
                        let these = spans.iter().filter(|(span, ..)| wanted.contains(span));
                        got.extend(these.map(|(span, _, bytes)| (*span, bytes.clone())));
                    }
                    // Overtaken: what overtook it is in flight now.
                    Err(_) if flight.overtaken.is_cancelled() => {}
                    // It was begun before this was asked for: what it met may be over, so it is tried once more.
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

    /// Finds or begins what will yield the spans; those kept from before go into `got`. Each flight with whether it was
    /// found, begun by somebody else.
    fn take_off(
        self: &Arc<Self>,
        blob: &Arc<Blob>,
        wanted: Vec<usize>,
        asker: &Asker,
        still: &dyn Fn(Vec<usize>) -> Vec<usize>,
        got: &mut HashMap<usize, Arc<[u8]>>,
    ) -> (Vec<(Arc<Flight>, bool)>, Vec<usize>) {
        let Some(content) = blob.content() else {
            return (Vec::new(), wanted);
        };
        let priority = asker.priority;
        let mut flights = lock(&self.flights);
        // Under the lock: a flight is taken off the board only after it has set its bits.
        let wanted = still(wanted);
        let mut recent = lock(&self.recent);
        let mut awaited: Vec<(Arc<Flight>, bool)> = Vec::new();
        let mut fresh = Vec::new();
        for span in &wanted {
            let key = (blob.id, *span);
            if let Some(bytes) = recent.get(&key) {
                count(&self.stats.kept, 1);
                got.insert(*span, bytes);
                continue;
            }
            match flights.get(&key) {
                Some(flight) if flight.priority == Priority::Demand || priority == Priority::Prefetch => {
                    if !awaited.iter().any(|(it, _)| Arc::ptr_eq(it, flight)) {
                        count(&self.stats.joined, 1);
                        awaited.push((flight.clone(), true));
                    }
                }
                Some(flight) => {
                    if !flight.overtaken.is_cancelled() {
                        count(&self.stats.overtaken, 1);
                        flight.overtaken.cancel();
                    }
                    fresh.push(*span);
                }
                None => fresh.push(*span),
            }
        }
        drop(recent);
        for run in plan::runs(&content.spans, &fresh, priority) {
            let (land, landed) = watch::channel(None);
            let flight = Arc::new(Flight {
                priority,
                overtaken: CancellationToken::new(),
                landed,
            });
            for span in run.spans.clone() {
                // A neighbour between two may be in flight already; who waits for that goes on doing so.
                let place = flights.entry((blob.id, span));
                place
                    .and_modify(|it| {
                        if fresh.contains(&span) {
                            *it = flight.clone();
                        }
                    })
                    .or_insert_with(|| flight.clone());
            }
            let landing = Landing {
                inner: self.clone(),
                blob: blob.id,
                spans: run.spans.clone(),
                flight: flight.clone(),
            };
            let (inner, blob, asker) = (self.clone(), blob.clone(), asker.clone());
            tokio::spawn(async move {
                let overtaken = landing.flight.overtaken.clone();
                let outcome = tokio::select! {
                    biased;
                    () = overtaken.cancelled() => Err(Arc::new(Error::Cancelled)),
                    outcome = inner.fly(blob, run, &asker) => outcome.map(Arc::new).map_err(Arc::new),
                };
                // Off the board first: who looks next finds what it left, not a flight that is over.
                drop(landing);
                let _ = land.send(Some(outcome));
            });
            awaited.push((flight, false));
        }
        (awaited, wanted)
    }

    /// Reads a run, expands it, and writes every chunk it yields whole.
    async fn fly(self: &Arc<Self>, blob: Arc<Blob>, run: Run, asker: &Asker) -> Result<Spans, Error> {
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
                let landed = inner.land(&blob, &run, stored)?;
                *lock(&slot) = Some(landed);
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
                    let landed = lock(&slot).take();
                    return landed.unwrap_or_else(|| {
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

    /// Expands what was read. The outer error says that the bytes are wrong, and another place may have better ones; the
    /// inner one that right bytes cannot be written.
    fn land(&self, blob: &Arc<Blob>, run: &Run, stored: &[u8]) -> Result<Result<Spans, Error>, String> {
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
                let mut recent = lock(&self.recent);
                for (index, _, bytes) in spans.iter().filter(|(index, ..)| partly.contains(index)) {
                    recent.put((blob.id, *index), bytes.clone());
                }
                drop(recent);
                Ok(Ok(spans))
            }
        }
    }
}
