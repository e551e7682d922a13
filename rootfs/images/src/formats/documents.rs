//! Reading documents that describe layers: whole ones, and parts of a layer that are parsed as they are checked.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use thaw_imagefs::digest::Digest;
use thaw_sys::lock::Lock;

use crate::error::Error;
use crate::index::error::IndexError;
use crate::ranges::{Check, Priority, Ranges, StoredBlob};
use crate::source::Descriptor;

/// Most bytes of a document, which bounds the cost of reading it.
pub(super) const MAX_DOCUMENT: u64 = 256 << 20;

static UNUSABLE: AtomicU64 = AtomicU64::new(0);

/// Indexes this process could not use, and streamed whole layers instead.
pub fn unusable_indexes() -> u64 {
    UNUSABLE.load(Ordering::Relaxed)
}

/// Logs and counts a document that cannot be used.
pub fn warn_unusable(what: &Digest, error: &Error) {
    UNUSABLE.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(%what, %error, "an index cannot be used; what it describes is read whole");
}

/// The whole document of a descriptor, compared with its digest. It has at most `most` bytes.
pub(super) async fn document(
    ranges: &dyn Ranges,
    descriptor: &Descriptor,
    most: u64,
) -> Result<bytes::Bytes, Error> {
    let what = format!("document {}", descriptor.digest);
    if descriptor.size == 0 || descriptor.size > MAX_DOCUMENT.min(most) {
        return Err(Error::malformed(
            what,
            format!("a size of {} bytes is out of bounds", descriptor.size),
        ));
    }
    let blob = StoredBlob {
        digest: descriptor.digest,
        size: descriptor.size,
        urls: Vec::new(),
    };
    let expected = descriptor.digest;
    let check: Check = Arc::new(move |bytes| match Digest::of(bytes) {
        got if got == expected => Ok(()),
        got => Err(format!("it has digest {got} instead of {expected}")),
    });
    ranges
        .read(&blob, 0..descriptor.size, Priority::Demand, check)
        .await
}

/// Reads a range of a layer. The check is that the bytes can be parsed.
pub(super) async fn read_as<T: Send + 'static>(
    ranges: &dyn Ranges,
    stored: &StoredBlob,
    range: Range<u64>,
    parse: impl Fn(&[u8]) -> Result<T, IndexError> + Send + Sync + 'static,
) -> Result<T, Error> {
    let slot = Arc::new(Mutex::new(None));
    let filled = slot.clone();
    let check: Check = Arc::new(move |bytes| {
        let parsed = parse(bytes).map_err(|error| error.to_string())?;
        *filled.locked() = Some(parsed);
        Ok(())
    });
    ranges.read(stored, range, Priority::Demand, check).await?;
    let parsed = slot.locked().take();
    parsed.ok_or_else(|| Error::malformed(format!("layer {}", stored.digest), "it was not checked"))
}

/// The error of a document to which the image is bound.
pub(super) fn malformed(error: IndexError) -> Error {
    Error::malformed("an index the image is bound to", error)
}
