//! Reading ranges of stored blobs: from a registry and its mirrors, or from a local layout.
//!
//! Invariants: what comes back has passed its [`Check`]; a wrong answer is counted against whoever gave it and another is
//! asked; a read ends within the retry budget, with bytes or with an error that names the blob, the range and the cause;
//! a prefetch never delays a read on demand.

mod config;
mod stats;

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::Error;
use crate::progress::Progress;
use crate::reference::ImageRef;
use crate::source::SourceOptions;

pub use config::{Config, Mirror, MirrorKind};
pub use stats::{EndpointCounts, Stats};

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

/// What the readers of one process share: configuration, breakers, the prefetches' bandwidth, connections and counters.
/// One per process: limits hold among those that share it.
pub struct Fetcher {
    config: Config,
    stats: Arc<Stats>,
}

impl Fetcher {
    /// # Errors
    /// `Malformed` for a mirror whose address or headers cannot be, or a limit of zero.
    pub fn new(config: Config) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            config,
            stats: Arc::default(),
        }))
    }

    /// The counters, for metrics.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    pub fn config(&self) -> &Config {
        &self.config
    }
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
    let _ = (options.fetcher.config().budget(), progress);
    Err(Error::malformed(
        reference.to_string(),
        "reading it in ranges is not possible in this build",
    ))
}
