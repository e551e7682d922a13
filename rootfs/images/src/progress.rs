//! Progress of a pull, a conversion, a push or a prefetch, for the CLI to draw.

use std::time::Duration;

use thaw_imagefs::digest::Digest;

use crate::form::Form;

/// An event. Byte counts are totals so far, so a missed event loses nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The reference points to this image, which has this many distinct layers.
    Resolved { digest: Digest, layers: usize },
    /// The store has the layer (or another process has just added it).
    Cached { layer: Digest },
    /// The layer's transfer begins; its stored size in the source, if known.
    Started { layer: Digest, total: Option<u64> },
    /// Bytes received from the source and bytes of tar unpacked.
    Advanced {
        layer: Digest,
        received: u64,
        unpacked: u64,
    },
    /// The layer is verified and in the store.
    Unpacked { layer: Digest, unpacked: u64 },
    /// The registry wants or needs a pause.
    Retrying {
        registry: String,
        wait: Duration,
        reason: String,
    },
    /// The registry or its mirror has sent nothing for this time. `attempt` is the number of the request.
    Waiting {
        registry: String,
        attempt: u32,
        waited: Duration,
    },
    /// All layers are complete; the metadata is being written.
    Assembling,
    /// A damaged layer is being repaired from its source.
    Repairing { layer: Digest },
    /// The layer is in the store without its file data, which is fetched as it is read. `fetched` is the number of bytes of indexes and
    /// metadata that were fetched, and `form` their kind.
    Lazy { layer: Digest, form: Form, fetched: u64 },
    /// Bytes of a load order's runs that are ready, of all it has.
    Prefetched { done: u64, total: u64 },
    /// Bytes of file data converted or indexed.
    Converting { done: u64, total: u64 },
    /// Bytes of a blob that were pushed: all of them at once if the destination already has the blob.
    Pushing { blob: Digest, sent: u64, total: u64 },
}

/// Receives events, from any thread, and must not block.
pub trait Progress: Send + Sync {
    fn event(&self, event: Event);
}

/// Ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&self, _event: Event) {}
}
