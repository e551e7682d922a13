//! eStargz: a gzip layer whose files are gzip members of their own, with a table of contents at its end.
//!
//! The table is bound to the image by an annotation of the layer's descriptor. Read as hostile nevertheless; nothing is
//! fetched here.

use std::ops::Range;

use crate::digest::Digest;
use crate::index::LayerIndex;
use crate::index::form::FormError;
use crate::layer::Limits;

const FORM: &str = "eStargz table of contents";

/// The annotation of a layer's descriptor: the digest of the table, uncompressed.
pub const TOC_DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";
/// Bytes of the end of the stored layer that hold its footer.
pub const FOOTER: u64 = 51;

/// The digest of the table of a layer with these annotations; none where it is not an eStargz layer.
///
/// # Errors
/// When the annotation is there and is no digest.
pub fn toc_digest<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<Option<Digest>, FormError> {
    annotations
        .into_iter()
        .find(|(name, _)| *name == TOC_DIGEST)
        .map(|(_, value)| value.parse::<Digest>())
        .transpose()
        .map_err(|error| FormError::malformed(FORM, format!("the layer's annotation {TOC_DIGEST}: {error}")))
}

/// Where the table is stored, from the last [`FOOTER`] bytes of a layer of `stored_size` bytes.
///
/// # Errors
/// When they are not a footer.
pub fn toc_location(footer: &[u8], stored_size: u64) -> Result<Range<u64>, FormError> {
    let _ = (footer, stored_size);
    Err(FormError::unsupported(FORM, "footers"))
}

/// Reads the table from its stored bytes ([`toc_location`]).
///
/// # Errors
/// [`FormError`] when it has another digest, lies, or describes a layer that would be refused.
pub fn read_toc(
    stored: &[u8],
    expected: &Digest,
    location: Range<u64>,
    limits: &Limits,
) -> Result<LayerIndex, FormError> {
    let _ = (stored, expected, location, limits);
    Err(FormError::unsupported(FORM, "tables"))
}
