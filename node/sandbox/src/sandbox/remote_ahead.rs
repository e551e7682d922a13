//! Fetches the parts of a snapshot in a registry that no machine waits for yet.
//!
//! | what | when | at once |
//! |---|---|---|
//! | the parts of the working set, in its order | from the beginning | [`PARTS_AT_ONCE`] |
//! | the rest of the memory, then the disks | whenever no machine has waited for a part for [`QUIET`], and in any case [`LATEST`] after the beginning | one read |
//!
//! Invariant: a machine that begins to wait waits for at most one read of the rest to end. All reads here begin only while no read on demand of
//! this process is under way ([`thaw_images::ranges::Priority`]), so the working set gives way too.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::remote_files::{MEMORY, Part, RemoteFiles};
use crate::error::{Error, ErrorKind};
use crate::snapshot::manifest::CHUNK;
use crate::snapshot::working_sets::page_runs;

/// Parts of one snapshot that are fetched at once, of the working set or of the disks.
const PARTS_AT_ONCE: usize = 4;
/// How long no machine must have waited for a part before the rest is fetched.
const QUIET: Duration = Duration::from_secs(2);
/// How long after the beginning the rest is fetched also while machines wait again and again.
const LATEST: Duration = Duration::from_secs(30);
/// Pauses between the attempts to fetch a part: the first, and the longest.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long a part is tried to be fetched.
const GIVE_UP: Duration = Duration::from_secs(600);
/// Bytes of a page, the unit of a working set.
const PAGE: u64 = 4096;

/// All parts of a snapshot that are not zero, in the order in which they are fetched.
#[derive(Debug)]
pub(super) struct FetchAhead {
    pub working_set: Vec<Part>,
    pub rest: Vec<Part>,
    /// When the rest is fetched in any case.
    latest: Instant,
}

impl FetchAhead {
    /// The parts of a snapshot, which begins to be fetched now.
    pub(super) fn of(files: &RemoteFiles, working_set: Option<&[u8]>) -> FetchAhead {
        let end = files.length(MEMORY);
        let touched = page_runs(working_set.unwrap_or_default()).flat_map(|(page, pages)| {
            let (first, last) = (page * PAGE / CHUNK, (page + pages - 1) * PAGE / CHUNK);
            (first..end.min(last + 1)).map(|number| Part { file: MEMORY, number })
        });
        let all: HashSet<Part> = files.parts(MEMORY).collect();
        let mut taken = HashSet::new();
        // The working set is a hint of whoever pushed it: parts that are none are left out.
        let touched = touched.filter(|part| all.contains(part) && taken.insert(*part));
        let working_set = touched.collect();
        let rest = (0..files.count()).flat_map(|file| files.parts(file));
        FetchAhead {
            working_set,
            rest: rest.filter(|part| !taken.contains(part)).collect(),
            latest: Instant::now() + LATEST,
        }
    }

    /// Fetches the working set.
    ///
    /// # Errors
    /// Those of [`RemoteFiles::fetch`], if a part cannot be had for [`GIVE_UP`].
    pub(super) async fn working_set(&self, files: &Arc<RemoteFiles>) -> Result<(), Error> {
        each(self.working_set.clone(), |part| {
            let files = files.clone();
            async move { fetch_one(&files, part).await }
        })
        .await
    }

    /// Fetches the rest.
    ///
    /// # Errors
    /// Those of [`FetchAhead::working_set`].
    pub(super) async fn rest(&self, files: &RemoteFiles) -> Result<(), Error> {
        for part in &self.rest {
            // A machine has touched it meanwhile.
            if files.is_present(*part) {
                continue;
            }
            // After that time it is fetched without quiet.
            let _ = timeout_at(self.latest, files.quiet(QUIET)).await;
            fetch_one(files, *part).await?;
        }
        Ok(())
    }
}

/// Fetches a part that no machine waits for. Tries again while the registry fails.
async fn fetch_one(files: &RemoteFiles, part: Part) -> Result<(), Error> {
    let (until, mut pause) = (Instant::now() + GIVE_UP, PAUSE);
    loop {
        match files.prefetch(part).await {
            Err(e) if e.kind != ErrorKind::SnapshotMalformed && Instant::now() < until => {
                tracing::debug!("fetched ahead again in {pause:?}: {e}");
                sleep(pause).await;
                pause = LONGEST_PAUSE.min(pause * 2);
            }
            fetched => return fetched,
        }
    }
}

/// Does this for each part, a few at once, up to the first failure.
pub(super) async fn each<F: Future<Output = Result<(), Error>> + Send + 'static>(
    parts: Vec<Part>,
    fetch: impl Fn(Part) -> F,
) -> Result<(), Error> {
    let mut fetches = JoinSet::new();
    for part in parts {
        if fetches.len() >= PARTS_AT_ONCE {
            joined(fetches.join_next().await)?;
        }
        fetches.spawn(fetch(part));
    }
    while let Some(done) = fetches.join_next().await {
        joined(Some(done))?;
    }
    Ok(())
}

fn joined(done: Option<Result<Result<(), Error>, tokio::task::JoinError>>) -> Result<(), Error> {
    match done {
        Some(done) => done.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?,
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "remote_ahead_test.rs"]
pub(super) mod tests;
