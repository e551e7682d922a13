//! `thaw image convert`: converts an image and writes the result to a registry or a layout directory.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use thaw_imagefs::digest::Digest;
use thaw_images::convert::{Facts, Job, Options, Pushed};
use thaw_images::load_order::{LoadOrder, MAX_DOCUMENT};
use thaw_images::prefetch;
use thaw_images::progress::Progress;
use thaw_images::source::Platform;

use super::destination;
use crate::error::{Error, ErrorKind};
use crate::images::{Images, Pull, failure};

/// A conversion request.
#[derive(Debug)]
pub struct Wanted<'a> {
    pub from: &'a str,
    pub to: &'a str,
    pub dictionaries: &'a [String],
    /// A recorded load order. `None`: use the one beside the image in the store.
    pub trace: Option<&'a Path>,
    pub options: Options,
    pub plain_http: bool,
}

/// The converted image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Made {
    pub reference: String,
    pub digest: Digest,
    /// Digest of the original's manifest.
    pub original: Digest,
    pub facts: Facts,
    pub pushed: Pushed,
    /// Whether the image has a load order.
    pub load_order: bool,
}

/// Pulls the complete image, converts it and pushes the result.
pub async fn convert(
    images: &Images,
    wanted: Wanted<'_>,
    progress: Arc<dyn Progress>,
) -> Result<Made, Error> {
    let (source, destination) = (destination::parse(wanted.from)?, destination::parse(wanted.to)?);
    destination::check_writable(&destination)?;
    let dictionaries = wanted
        .dictionaries
        .iter()
        .map(|reference| destination::parse(reference))
        .collect::<Result<Vec<_>, _>>()?;
    let load_order = match wanted.trace {
        Some(path) => Some(read_trace(path)?),
        None => images
            .store
            .find(&source)
            .map_err(failure)?
            .and_then(|image| prefetch::find(&image))
            .map(|(order, _)| order),
    };
    let job = Job {
        store: &images.store,
        source: &source,
        destination: &destination,
        platform: &Platform::linux_amd64(),
        dictionaries: &dictionaries,
        options: wanted.options,
        load_order,
        pull: images.pull_options(Pull::Always, wanted.plain_http),
    };
    let done = job.run(progress).await.map_err(failure)?;
    Ok(Made {
        reference: destination.to_string(),
        digest: done.digest,
        original: done.source,
        load_order: done.facts.load_order_bytes > 0,
        facts: done.facts,
        pushed: done.pushed,
    })
}

fn read_trace(path: &Path) -> Result<LoadOrder, Error> {
    let invalid = |why: String| Error::new(ErrorKind::LoadOrderInvalid, format!("{}: {why}", path.display()));
    let length = std::fs::metadata(path).map_err(|e| invalid(e.to_string()))?.len();
    if length > MAX_DOCUMENT as u64 {
        return Err(invalid("it is too large for a load order".into()));
    }
    let bytes = std::fs::read(path).map_err(|e| invalid(e.to_string()))?;
    LoadOrder::from_json(&bytes).map_err(|e| invalid(e.to_string()))
}
