//! Reading ranges of stored blobs: from a registry and its mirrors, or from a local layout.
//!
//! Invariants: what comes back has passed its [`Check`]; a wrong answer is counted against whoever gave it and another is
//! asked; a read ends within the retry budget, with bytes or with an error that names the blob, the range and the cause;
//! a prefetch never delays a read on demand.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::Error;

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
