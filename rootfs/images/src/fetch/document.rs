//! Reads a document by its descriptor, which states its size and digest.
//!
//! Bounds: a document has at least one byte, and at most as many as its caller names for this kind of document. The stated size is checked
//! before anything is requested. The document is one range and is held whole, so the caller's bound is also that of the memory.

use std::sync::Arc;

use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::Descriptor;
use crate::ranges::{Check, Priority, Ranges};

/// Reads the whole document that a descriptor refers to, and compares its digest.
///
/// # Errors
/// Those of `ranges`; `Malformed` if the document is empty or has more than `most` bytes.
pub async fn document(
    ranges: &dyn Ranges,
    name: &str,
    descriptor: &Descriptor,
    most: u64,
) -> Result<Vec<u8>, Error> {
    let what = format!("{name} {}", descriptor.digest);
    if descriptor.size == 0 || descriptor.size > most {
        return Err(Error::malformed(
            what,
            format!(
                "it has {} bytes, at least 1 and at most {most} are read",
                descriptor.size
            ),
        ));
    }
    let blob = descriptor.stored();
    let expected = descriptor.digest;
    let check: Check = Arc::new(move |bytes: &[u8]| match Digest::of(bytes) {
        got if got == expected => Ok(()),
        got => Err(format!("its digest is {got}, not {expected}")),
    });
    let bytes = ranges
        .read(&blob, 0..descriptor.size, Priority::Demand, check)
        .await?;
    Ok(bytes.to_vec())
}
