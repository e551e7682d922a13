//! Reading ranges of stored blobs: from a registry and its mirrors, or from a local layout.
//!
//! Invariants: what comes back has passed its [`Check`]; a wrong answer is counted against whoever gave it and another is
//! asked; a read ends within the retry budget, with bytes or with an error that names the blob, the range and the cause;
//! a prefetch never delays a read on demand.

mod answer;
mod backoff;
mod breaker;
mod bucket;
mod budget;
mod config;
mod endpoint;
mod gate;
mod local;
mod redirect;
mod remote;
mod setup;
mod stats;
#[cfg(test)]
pub(crate) mod tests;

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::progress::Progress;
use crate::reference::ImageRef;
use crate::source::SourceOptions;
use crate::source::archive::Archive;
use crate::source::layout::Layout;

pub(crate) use breaker::Permit;
pub use config::{Config, Mirror, MirrorKind};
pub(crate) use endpoint::Endpoint;
pub use setup::Fetcher;
pub(crate) use stats::EndpointStats;
pub use stats::{EndpointCounts, Stats};

/// Most bytes one read may want: bounds the memory it costs.
pub const MAX_READ: u64 = 256 << 20;
/// As the counters name files of this host.
const LOCAL: &str = "local";

/// A blob as its source stores it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoredBlob {
    /// SHA-256 of the whole.
    pub digest: Digest,
    /// Bytes.
    pub size: u64,
    /// Where else it may be (foreign layers).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
}

/// Who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// A guest.
    Demand,
    /// Nobody yet: bounded in bandwidth, and behind every demand.
    Prefetch,
}

/// Says whether bytes are the right ones, or what is wrong with them. May take a while (it hashes): called off the runtime.
pub type Check = Arc<dyn Fn(&[u8]) -> Result<(), String> + Send + Sync>;

/// A place whose blobs can be read in ranges. Cheap to share; connections and credentials are kept between reads.
#[async_trait]
pub trait Ranges: Send + Sync {
    /// Bytes `range` of the stored form of `blob`, accepted by `check`.
    ///
    /// # Errors
    /// What the last place asked said; `DigestMismatch` or `Malformed` when every place gave wrong bytes.
    async fn read(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        check: Check,
    ) -> Result<Bytes, Error>;
}

/// How to read one image's blobs.
#[derive(Clone)]
pub struct FetchOptions {
    /// How to reach the registry. Credentials are read again whenever the registry refuses those it accepted before.
    pub source: SourceOptions,
    pub fetcher: Arc<Fetcher>,
}

/// A reader for the blobs of the image `reference` names: its registry and the mirrors of it, its layout directory, or
/// its archive (whose members go by the digest of what is stored where the archive says it, else by the DiffID).
/// Nothing is transferred yet, and a registry that cannot be reached is no error yet.
///
/// A prefetch may wait for long behind demands. Who needs what a prefetch is fetching drops that read and reads anew.
///
/// # Errors
/// `NotFound`, `Malformed`, `Io` for local images; `Credentials`.
pub async fn open(
    reference: &ImageRef,
    options: &FetchOptions,
    progress: Arc<dyn Progress>,
) -> Result<Arc<dyn Ranges>, Error> {
    let fetcher = &options.fetcher;
    match reference {
        ImageRef::Registry(reference) => Ok(Arc::new(
            fetcher.remote(reference, &options.source, progress).await?,
        )),
        ImageRef::Layout { directory, tag } => {
            let layout = Layout::open(directory.clone(), tag.clone())?;
            let stats = fetcher.stats.endpoint(LOCAL);
            Ok(Arc::new(local::LocalRanges::layout(layout, stats)))
        }
        ImageRef::Archive { file, tag } => {
            let (file, tag, scratch) = (file.clone(), tag.clone(), options.source.scratch.clone());
            let stats = fetcher.stats.endpoint(LOCAL);
            let open = move || local::LocalRanges::archive(&Archive::open(file, tag, &scratch)?, stats);
            let opened = tokio::task::spawn_blocking(open).await;
            Ok(Arc::new(opened.map_err(|_| Error::Cancelled)??))
        }
    }
}

/// A range that can be read, and its length.
fn checked_range(blob: &StoredBlob, range: &Range<u64>) -> Result<u64, Error> {
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

/// Has the bytes checked by a thread that may take its time. They come back, or what is wrong with them.
async fn run_check(check: &Check, bytes: Bytes) -> Result<Result<Bytes, String>, Error> {
    let check = check.clone();
    let run = move || check(&bytes).map(|()| bytes);
    tokio::task::spawn_blocking(run)
        .await
        .map_err(|_| Error::Cancelled)
}
