//! Reading a converted image's documents.

use crate::error::Error;
use crate::fetch::Ranges;

use super::{Manifest, Opened};

/// Reads metadata, chunk tables and load order; file data stays where it is.
///
/// # Errors
/// What `ranges` says; `DigestMismatch` or `Malformed` for documents that are not what the manifest says.
pub async fn open(manifest: &Manifest, ranges: &dyn Ranges) -> Result<Opened, Error> {
    let _ = ranges;
    Err(Error::malformed(
        format!("converted image {}", manifest.metadata.digest),
        "this build does not read converted images",
    ))
}
