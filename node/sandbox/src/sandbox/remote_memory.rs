//! The memory of a machine that runs while its snapshot is still being fetched, as its page server reads it.
//!
//! Invariant: the page server never waits here. A part that is not on this host is fetched by a task, and announced when it is there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::EventfdFlags;
use thaw_sys::lock::Lock;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Node;
use super::remote_files::{MEMORY, Part, RemoteFiles};
use crate::error::{Error, ErrorKind};
use crate::page_server::PageSource;
use crate::snapshot::Hash;
use crate::snapshot::manifest::ChunkedFile;
use crate::state::RemotePlace;

/// Interval between two attempts to find the snapshot of an adopted machine again.
const AGAIN: Duration = Duration::from_secs(1);

/// The snapshot that a machine's memory comes from.
pub(super) struct MemorySource {
    found: OnceCell<Arc<RemoteFiles>>,
    /// Where to find it again, for a machine that an earlier process thawed.
    place: Option<(Node, RemotePlace)>,
}

impl MemorySource {
    /// A snapshot that this process fetches.
    pub(super) fn of(files: Arc<RemoteFiles>) -> Arc<MemorySource> {
        Arc::new(MemorySource {
            found: OnceCell::new_with(Some(files)),
            place: None,
        })
    }

    /// A snapshot that an earlier process fetched. It is found when the machine first waits for a part.
    pub(super) fn at(node: Node, place: RemotePlace) -> Arc<MemorySource> {
        Arc::new(MemorySource {
            found: OnceCell::new(),
            place: Some((node, place)),
        })
    }

    /// Makes a part present, for as long as a read may take.
    async fn fetch(&self, part: Part) -> Result<(), Error> {
        let files = self.found.get_or_try_init(|| self.find()).await?;
        files.fetch(part).await
    }

    /// Finds the snapshot again. Tries for as long as a read of a registry may take.
    async fn find(&self) -> Result<Arc<RemoteFiles>, Error> {
        let lost = || Error::new(ErrorKind::SnapshotNotFound, "the snapshot is let go of");
        let (node, place) = self.place.as_ref().ok_or_else(lost)?;
        let until = Instant::now() + Duration::from_millis(node.images.config.fetch.budget_ms);
        loop {
            match node.remote.again(node, place).await {
                Err(e) if Instant::now() < until => {
                    tracing::debug!("{} is asked again: {e}", place.reference);
                    tokio::time::sleep(AGAIN).await;
                }
                found => return found,
            }
        }
    }
}

/// The parts that were fetched for one machine.
struct Arrivals {
    /// Readable while there are some.
    event: OwnedFd,
    parts: Mutex<Vec<(u64, Result<(), String>)>>,
}

/// The memory of one machine.
pub(super) struct RemoteMemory {
    source: Arc<MemorySource>,
    bytes: u64,
    hashes: Vec<Option<Hash>>,
    runtime: Handle,
    /// Stop when this is dropped.
    fetches: JoinSet<()>,
    arrivals: Arc<Arrivals>,
}

impl RemoteMemory {
    /// `expected` comes from the snapshot's manifest. Must be called within a tokio runtime.
    pub(super) fn new(source: Arc<MemorySource>, expected: &ChunkedFile) -> io::Result<RemoteMemory> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(RemoteMemory {
            source,
            bytes: expected.bytes,
            hashes: expected.by_chunk(),
            runtime: Handle::current(),
            fetches: JoinSet::new(),
            arrivals: Arc::new(Arrivals {
                event,
                parts: Mutex::default(),
            }),
        })
    }
}

impl PageSource for RemoteMemory {
    fn read(&mut self, number: u64, buffer: &mut [u8]) -> io::Result<bool> {
        let part = Part { file: MEMORY, number };
        if let Some(files) = self.source.found.get()
            && files.is_present(part)
        {
            return files.read(part, buffer).map(|()| true);
        }
        while self.fetches.try_join_next().is_some() {}
        let (source, arrivals) = (self.source.clone(), self.arrivals.clone());
        let fetch = async move {
            let fetched = source.fetch(part).await.map_err(|e| e.to_string());
            arrivals.parts.locked().push((number, fetched));
            // Fails only if the counter is full, and then the server has been woken already.
            let _ = rustix::io::write(&arrivals.event, &1u64.to_ne_bytes());
        };
        self.fetches.spawn_on(fetch, &self.runtime);
        Ok(false)
    }

    fn arrived(&mut self) -> Vec<(u64, Result<(), String>)> {
        // Emptied first: what comes after that wakes the server again.
        let _ = rustix::io::read(&self.arrivals.event, &mut [0; 8]);
        std::mem::take(&mut *self.arrivals.parts.locked())
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.arrivals.event.as_fd())
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn hash(&self, number: u64) -> Option<Hash> {
        self.hashes.get(usize::try_from(number).ok()?).copied().flatten()
    }
}
