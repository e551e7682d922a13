//! The memory and the disks of a snapshot in a registry: files with holes, whose parts are fetched when they are wanted. A part is the 2 MiB
//! of which `manifest.json` has one hash.
//!
//! Invariants: no byte is written before its whole part matches that hash, so a signature covers it too. A part that is present stays so.
//! A part is fetched once at a time, however many machines wait for it. A machine that wants a part which is being prefetched waits for
//! that fetch, which then is a demand like others. At most [`DEMANDS`] parts are fetched at once for those that wait, which bounds the
//! memory that they take.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_failpoint::{Failpoint, reach};
use thaw_images::ranges::{Check, Priority, Ranges, StoredBlob, Urgency};
use thaw_sys::lock::Lock;
use tokio::sync::{OnceCell, Semaphore};

use super::remote_demands::{Demand, Demands};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::images::failure;
use crate::snapshot::Hash;
use crate::snapshot::artifact::ArtifactError;
use crate::snapshot::artifact::part::PackRead;
use crate::snapshot::artifact::unpack::Placed;
use crate::snapshot::manifest::{CHUNK, ChunkedFile};

/// Number of the memory among the files. The disks follow.
pub(super) const MEMORY: usize = 0;
/// Parts fetched at once for those that wait. Each takes its bytes, and its stored bytes, which are no more.
const DEMANDS: usize = 16;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Part {
    /// Number of the file.
    pub file: usize,
    /// Number of the part in the file.
    pub number: u64,
}

/// Where the parts are stored.
pub(super) struct Packs {
    /// The reference, for messages.
    pub reference: String,
    pub ranges: Arc<dyn Ranges>,
    /// By number.
    pub packs: Vec<StoredBlob>,
    /// Has been compared with the packs, and with the sizes of the files.
    pub table: Arc<Placed>,
}

/// The files of a snapshot.
pub(super) struct RemoteFiles {
    /// `None` if all parts are present.
    packs: Option<Packs>,
    files: Vec<RemoteFile>,
    demands: Demands,
    /// For those that wait.
    turns: Semaphore,
    /// Each with the number of those that share it.
    in_flight: Mutex<HashMap<Part, (Arc<InFlight>, usize)>>,
}

/// A fetch of a part.
#[derive(Debug, Default)]
struct InFlight {
    /// What became of it.
    outcome: OnceCell<Result<(), Failed>>,
    /// Raised once a caller waits for it.
    urgency: Urgency,
}

/// A failure that several callers get.
#[derive(Clone, Debug)]
struct Failed {
    kind: ErrorKind,
    what: String,
    /// Of a prefetch: its time began before a caller waited.
    is_ahead: bool,
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        Error::new(failed.kind, failed.what)
    }
}

/// One of those that share a fetch. The last one takes it off the list, or the first once it is over.
struct Sharing<'a> {
    files: &'a RemoteFiles,
    part: Part,
    fetch: Arc<InFlight>,
}

impl Drop for Sharing<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.files.in_flight.locked();
        let Entry::Occupied(mut listed) = in_flight.entry(self.part) else {
            return;
        };
        let (fetch, sharing) = listed.get_mut();
        if !Arc::ptr_eq(fetch, &self.fetch) {
            return;
        }
        *sharing -= 1;
        if *sharing == 0 || fetch.outcome.initialized() {
            listed.remove();
        }
    }
}

struct RemoteFile {
    file: File,
    bytes: u64,
    /// By part; `None` for a part of zeros.
    hashes: Vec<Option<Hash>>,
    present: Vec<AtomicBool>,
}

impl RemoteFile {
    fn new(file: File, expected: &ChunkedFile) -> RemoteFile {
        let hashes = expected.by_chunk();
        RemoteFile {
            file,
            bytes: expected.bytes,
            present: hashes.iter().map(|hash| hash.is_none().into()).collect(),
            hashes,
        }
    }

    fn is_present(&self, part: u64) -> bool {
        let present = usize::try_from(part).ok().and_then(|part| self.present.get(part));
        present.is_some_and(|present| present.load(Ordering::Acquire))
    }
}

impl RemoteFiles {
    /// Of the memory and the disks, in this order. All of them are holes.
    pub(super) fn new(packs: Packs, files: Vec<(File, &ChunkedFile)>) -> RemoteFiles {
        RemoteFiles::over(Some(packs), files)
    }

    /// Of a stored snapshot's memory, all of which is present.
    pub(super) fn complete(memory: File, expected: &ChunkedFile) -> RemoteFiles {
        let files = RemoteFiles::over(None, vec![(memory, expected)]);
        let present = files.files.iter().flat_map(|file| &file.present);
        present.for_each(|part| part.store(true, Ordering::Release));
        files
    }

    fn over(packs: Option<Packs>, files: Vec<(File, &ChunkedFile)>) -> RemoteFiles {
        let files = files
            .into_iter()
            .map(|(file, expected)| RemoteFile::new(file, expected));
        RemoteFiles {
            packs,
            files: files.collect(),
            demands: Demands::new(),
            turns: Semaphore::new(DEMANDS),
            in_flight: Mutex::default(),
        }
    }

    /// The parts of a file that are not zero.
    pub(super) fn parts(&self, file: usize) -> impl Iterator<Item = Part> {
        let hashes = self.files.get(file).map_or(&[][..], |file| &file.hashes[..]);
        let parts = (0..).zip(hashes).filter(|(_, hash)| hash.is_some());
        parts.map(move |(number, _)| Part { file, number })
    }

    /// Number of parts of a file, those of zeros included.
    pub(super) fn length(&self, file: usize) -> u64 {
        self.files.get(file).map_or(0, |file| file.hashes.len() as u64)
    }

    /// Number of files.
    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    /// Whether a part can be read.
    pub(super) fn is_present(&self, part: Part) -> bool {
        self.files
            .get(part.file)
            .is_some_and(|file| file.is_present(part.number))
    }

    /// Reads a part that is present. `buffer` has its length. Blocks.
    pub(super) fn read(&self, part: Part, buffer: &mut [u8]) -> std::io::Result<()> {
        match self.files.get(part.file) {
            Some(file) if file.is_present(part.number) => {
                file.file.read_exact_at(buffer, part.number * CHUNK)
            }
            _ => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    /// Fetches a part for a caller that waits, and returns once it is present. Callers that wait for one part share its fetch, and its
    /// failure, also that of a prefetch which had begun. A fetch gives up after `[fetch] budget_ms`; if that was a prefetch, a caller
    /// fetches once more.
    ///
    /// # Errors
    /// Those of the registry; [`ErrorKind::SnapshotMalformed`] if what it sends is not what `manifest.json` says.
    pub(super) async fn fetch(&self, part: Part) -> Result<(), Error> {
        if self.is_present(part) {
            return Ok(());
        }
        let _waits = self.demands.begin();
        let fetched = match self.share(part, Priority::Demand).await {
            Err(failed) if failed.is_ahead => self.share(part, Priority::Demand).await,
            fetched => fetched,
        };
        Ok(fetched?)
    }

    /// Fetches a part that no caller waits for yet: after all that are waited for, and within the bandwidth for that.
    ///
    /// # Errors
    /// Those of [`RemoteFiles::fetch`].
    pub(super) async fn prefetch(&self, part: Part) -> Result<(), Error> {
        match self.is_present(part) {
            true => Ok(()),
            false => Ok(self.share(part, Priority::Prefetch).await?),
        }
    }

    /// Counts as a caller that waits until it is dropped: a machine that is about to touch its memory.
    pub(super) fn expect_demands(&self) -> Demand<'_> {
        self.demands.begin()
    }

    /// Returns once no caller has waited for so long.
    pub(super) async fn quiet(&self, time: Duration) {
        self.demands.quiet(time).await;
    }

    /// Joins the fetch of a part, or begins it.
    async fn share(&self, part: Part, priority: Priority) -> Result<(), Failed> {
        let sharing = self.sharing(part);
        let InFlight { outcome, urgency } = &*sharing.fetch;
        if priority == Priority::Demand {
            urgency.raise();
        }
        let fetched = outcome.get_or_init(|| async {
            // A fetch may have ended after the caller looked.
            if self.is_present(part) {
                return Ok(());
            }
            let _turn = match priority {
                Priority::Demand => Some(self.turns.acquire().await),
                Priority::Prefetch => None,
            };
            self.obtain(part, priority, urgency).await.map_err(|e| Failed {
                kind: e.kind,
                what: e.what,
                is_ahead: priority == Priority::Prefetch,
            })
        });
        fetched.await.clone()
    }

    fn sharing(&self, part: Part) -> Sharing<'_> {
        let mut in_flight = self.in_flight.locked();
        let (fetch, sharing) = in_flight.entry(part).or_default();
        *sharing += 1;
        Sharing {
            files: self,
            part,
            fetch: fetch.clone(),
        }
    }

    /// Reads a part from its packs, compares it, and writes it.
    async fn obtain(&self, part: Part, priority: Priority, urgency: &Urgency) -> Result<(), Error> {
        let no_file = || Error::new(ErrorKind::SnapshotMalformed, format!("{part:?} is of no file"));
        let (packs, file) = self
            .packs
            .as_ref()
            .zip(self.files.get(part.file))
            .ok_or_else(no_file)?;
        let reads = packs.table.table().reads(part.file, part.number);
        let chunks = packs.all_chunks(reads, priority, urgency).await?;
        reach(Failpoint::RemotePartRead);
        let target = file.file.try_clone();
        let expected = Expected {
            file: target.map_err(|e| Error::system("cannot write the snapshot", &e))?,
            start: part.number * CHUNK,
            length: CHUNK.min(file.bytes.saturating_sub(part.number * CHUNK)) as usize,
            hash: file.hashes.get(part.number as usize).copied().flatten(),
        };
        if !blocking(move || expected.write(&chunks)).await? {
            let what = format!(
                "part {} of file {} is not what manifest.json says",
                part.number, part.file
            );
            return Err(ArtifactError::malformed("pack", what).of(&packs.reference));
        }
        reach(Failpoint::RemotePartWritten);
        if let Some(present) = file.present.get(part.number as usize) {
            present.store(true, Ordering::Release);
        }
        Ok(())
    }
}

/// A part that is to be written.
struct Expected {
    file: File,
    /// Its first byte in the file.
    start: u64,
    /// Its bytes.
    length: usize,
    hash: Option<Hash>,
}

impl Expected {
    /// Compares these chunks with the hash, and writes them. Places without a chunk stay holes. Returns false if they are wrong. Blocks.
    fn write(&self, chunks: &[(usize, Vec<u8>)]) -> Result<bool, Error> {
        let mut bytes = vec![0; self.length];
        for (at, chunk) in chunks {
            match bytes.get_mut(*at..at + chunk.len()) {
                Some(place) => place.copy_from_slice(chunk),
                None => return Ok(false),
            }
        }
        if self.hash != Some(Hash::of(&bytes)) {
            return Ok(false);
        }
        let write = |(at, chunk): &(usize, Vec<u8>)| self.file.write_all_at(chunk, self.start + *at as u64);
        let written = chunks.iter().try_for_each(write);
        written.map_err(|e| Error::system("cannot write the snapshot", &e))?;
        Ok(true)
    }
}

/// The chunks of a part, each with its first byte in the part.
type Chunks = Vec<(usize, Vec<u8>)>;

impl Packs {
    /// Does all reads of a part. For a caller that waits two at once, because most parts are in two packs; otherwise one after the other,
    /// so that a demand is never behind more than one of them.
    async fn all_chunks(
        &self,
        reads: Vec<PackRead>,
        priority: Priority,
        urgency: &Urgency,
    ) -> Result<Chunks, Error> {
        let mut chunks = Chunks::new();
        let mut reads = reads.into_iter();
        while let Some(read) = reads.next() {
            let beside = match priority {
                Priority::Demand => reads.next(),
                Priority::Prefetch => None,
            };
            let first = self.chunks(read, priority, urgency);
            match beside {
                None => chunks.extend(first.await?),
                Some(read) => {
                    let second = self.chunks(read, priority, urgency);
                    let (first, second) = tokio::try_join!(first, second)?;
                    chunks.extend(first.into_iter().chain(second));
                }
            }
        }
        Ok(chunks)
    }

    /// Reads chunks of a pack. A mirror whose bytes are wrong is passed over.
    async fn chunks(&self, read: PackRead, priority: Priority, urgency: &Urgency) -> Result<Chunks, Error> {
        let no_pack = || ArtifactError::malformed("table", "it names a pack that is not there");
        let pack = self.packs.get(read.pack as usize);
        let pack = pack.ok_or_else(|| no_pack().of(&self.reference))?;
        let (stored, found) = (read.stored.clone(), Arc::new(Mutex::new(Vec::new())));
        let expanded = found.clone();
        let check: Check = Arc::new(move |bytes| {
            *expanded.locked() = read.chunks(bytes).map_err(|e| e.to_string())?;
            Ok(())
        });
        let bytes = match priority {
            Priority::Demand => self.ranges.read(pack, stored, priority, check).await,
            Priority::Prefetch => self.ranges.read_ahead(pack, stored, urgency, check).await,
        };
        bytes.map_err(failure)?;
        Ok(std::mem::take(&mut *found.locked()))
    }
}

impl std::fmt::Debug for RemoteFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteFiles")
            .field("reference", &self.packs.as_ref().map(|packs| &packs.reference))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "remote_files_test.rs"]
pub(super) mod tests;
