//! Reading small documents by their descriptors.

use std::sync::Arc;

use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::Descriptor;
use crate::ranges::{Check, Priority, Ranges};

/// Reads the whole document that a descriptor refers to, and compares its digest.
///
/// # Errors
/// Those of `ranges`; `Malformed` if the document is empty or longer than `limit`.
pub async fn document(
    ranges: &dyn Ranges,
    name: &str,
    descriptor: &Descriptor,
    limit: u64,
) -> Result<Vec<u8>, Error> {
    let what = format!("{name} {}", descriptor.digest);
    if descriptor.size == 0 || descriptor.size > limit {
        return Err(Error::malformed(
            what,
            format!(
                "it has {} bytes, at least 1 and at most {limit} are read",
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
