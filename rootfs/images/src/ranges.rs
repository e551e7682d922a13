//! Reading ranges of stored blobs: the trait, priorities, and how the bytes are checked.
//!
//! [`crate::fetch`] opens a reader of an image's blobs; code that needs only bytes takes a [`Ranges`].

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;
use tokio::sync::watch;

use crate::error::Error;

/// Most bytes of one read, which bounds its memory.
pub const MAX_READ: u64 = 256 << 20;
/// A blob as its source stores it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoredBlob {
    /// SHA-256 of the whole.
    pub digest: Digest,
    /// Bytes.
    pub size: u64,
    /// Other addresses of the blob (foreign layers).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
}

/// Whether a caller waits for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// A guest waits.
    Demand,
    /// No caller waits yet: bounded in bandwidth, and after every demand.
    Prefetch,
}

/// Whether a caller has come to wait for a prefetch, which is a demand from then on.
#[derive(Debug, Default)]
pub struct Urgency(watch::Sender<bool>);

impl Urgency {
    /// From now on, a caller waits.
    pub fn raise(&self) {
        self.0.send_modify(|raised| *raised = true);
    }

    /// Whether a caller waits.
    pub fn is_raised(&self) -> bool {
        *self.0.borrow()
    }

    /// Returns once a caller waits.
    pub async fn raised(&self) {
        // The sender belongs to us, so it still exists.
        let _ = self.0.subscribe().wait_for(|raised| *raised).await;
    }
}

/// Checks that bytes are the right ones, or returns what is wrong with them. It hashes, which may take long, so it runs outside the
/// runtime.
pub type Check = Arc<dyn Fn(&[u8]) -> Result<(), String> + Send + Sync>;

/// A place whose blobs can be read in ranges. Cheap to share; connections and credentials are kept between reads.
#[async_trait]
pub trait Ranges: Send + Sync {
    /// Bytes `range` of the stored form of `blob`, accepted by `check`.
    ///
    /// # Errors
    /// That of the last place; `DigestMismatch` or `Malformed` if every place sent wrong bytes.
    async fn read(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        check: Check,
    ) -> Result<Bytes, Error>;

    /// As [`Ranges::read`] of a prefetch, which goes on as a demand once `urgency` is raised. What was read until then is kept.
    ///
    /// # Errors
    /// Those of [`Ranges::read`].
    async fn read_ahead(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        _urgency: &Urgency,
        check: Check,
    ) -> Result<Bytes, Error> {
        self.read(blob, range, Priority::Prefetch, check).await
    }
}

/// The length of a range; an error if it is empty, too long or not in the blob.
pub(crate) fn checked_range(blob: &StoredBlob, range: &Range<u64>) -> Result<u64, Error> {
    let length = range.end.saturating_sub(range.start);
    if length == 0 || length > MAX_READ || range.end > blob.size {
        let problem = format!(
            "bytes {} to {} of {} cannot be read: it has to be some, at most {MAX_READ}, and in the blob",
            range.start, range.end, blob.size
        );
        return Err(Error::malformed(format!("blob {}", blob.digest), problem));
    }
    Ok(length)
}

/// Checks the bytes on a blocking thread. Returns them, or what is wrong with them.
pub(crate) async fn run_check(check: &Check, bytes: Bytes) -> Result<Result<Bytes, String>, Error> {
    let check = check.clone();
    let run = move || check(&bytes).map(|()| bytes);
    tokio::task::spawn_blocking(run)
        .await
        .map_err(|_| Error::Cancelled)
}
