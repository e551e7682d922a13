//! Reading ranges of stored blobs: from a registry and its mirrors, or from a local layout or archive.
//!
//! Invariants: the bytes of a successful read have passed its [`Check`](crate::ranges::Check). A wrong answer counts as a fault of its
//! endpoint, and the next endpoint is asked. A read ends within the retry budget, with bytes or with an error that names the blob, the
//! range and the cause. A prefetch never delays a read on demand.

mod document;
mod local;
mod remote;
#[cfg(test)]
#[path = "fetch_test.rs"]
pub(crate) mod tests;

use std::sync::Arc;

use crate::error::Error;
use crate::progress::Progress;
use crate::ranges::Ranges;
use crate::reference::ImageRef;
use crate::registry::Client;
use crate::source::SourceOptions;
use crate::source::archive::Archive;
use crate::source::layout::Layout;

pub(crate) use document::document;

/// The counters' name for files of this host.
const LOCAL: &str = "local";

/// How to read one image's blobs.
#[derive(Clone)]
pub struct FetchOptions {
    /// How to reach the registry. Credentials are read again whenever the registry refuses those that it accepted before.
    pub source: SourceOptions,
    pub client: Arc<Client>,
}

/// Opens a reader for the blobs of the image to which `reference` points: in its registry and that registry's mirrors, its layout
/// directory, or its archive (whose members are identified by the digest of their stored form if the archive contains it, or else by the
/// DiffID). Nothing is transferred yet, and an unreachable registry is not yet an error.
///
/// A prefetch may wait long behind demands. A caller that needs the bytes drops the prefetch and reads anew, or raises the urgency of
/// [`Ranges::read_ahead`].
///
/// # Errors
/// `NotFound`, `Malformed`, `Io` for local images; `Credentials`.
pub async fn open(
    reference: &ImageRef,
    options: &FetchOptions,
    progress: Arc<dyn Progress>,
) -> Result<Arc<dyn Ranges>, Error> {
    let client = &options.client;
    match reference {
        ImageRef::Registry(reference) => {
            let registry = options.source.registry();
            let endpoints = client.endpoints(reference, &registry, progress).await?;
            Ok(Arc::new(remote::Remote::new(client.clone(), endpoints)))
        }
        ImageRef::Layout { directory, tag } => {
            let layout = Layout::open(directory.clone(), tag.clone())?;
            let stats = client.stats.endpoint(LOCAL);
            Ok(Arc::new(local::LocalRanges::layout(layout, stats)))
        }
        ImageRef::Archive { file, tag } => {
            let (file, tag, scratch) = (file.clone(), tag.clone(), options.source.scratch.clone());
            let stats = client.stats.endpoint(LOCAL);
            let open = move || local::LocalRanges::archive(&Archive::open(file, tag, &scratch)?, stats);
            let opened = tokio::task::spawn_blocking(open).await;
            Ok(Arc::new(opened.map_err(|_| Error::Cancelled)??))
        }
    }
}
