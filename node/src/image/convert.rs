//! `thaw image convert`: an image of the store becomes a converted one in a registry or a layout.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use thaw_rootfs::accelerated::{self, Dictionary, Facts, Input, Options, Original, Pushed, find};
use thaw_rootfs::digest::Digest;
use thaw_rootfs::fetch::{self, FetchOptions};
use thaw_rootfs::prefetch::{self, LoadOrder};
use thaw_rootfs::progress::Progress;
use thaw_rootfs::reference::ImageRef;
use thaw_rootfs::source::{self, Platform, Push};
use thaw_rootfs::store::PullOptions;

use super::{place, record};
use crate::exit::{ExitCode, Failure};
use crate::images::{Images, Pull, failure};

/// What is asked for.
#[derive(Debug)]
pub struct Wanted<'a> {
    pub from: &'a str,
    pub to: &'a str,
    pub dictionaries: &'a [String],
    /// A recorded load order; without, that which is beside the image in the store.
    pub trace: Option<&'a Path>,
    pub options: Options,
    pub plain_http: bool,
}

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Made {
    pub reference: String,
    pub digest: Digest,
    /// Of the original's manifest.
    pub original: Digest,
    pub facts: Facts,
    pub pushed: Pushed,
    /// Whether it has a load order.
    pub load_order: bool,
}

/// Pulls the image whole, converts and pushes it.
pub async fn convert(
    images: &Images,
    wanted: Wanted<'_>,
    progress: Arc<dyn Progress>,
) -> Result<Made, Failure> {
    let (from, to) = (place::parse(wanted.from)?, place::parse(wanted.to)?);
    place::check_writable(&to)?;
    let trace = wanted.trace.map(read_trace).transpose()?;
    let options = images.source_options(wanted.plain_http);
    let mut dictionaries = Vec::new();
    for reference in wanted.dictionaries {
        dictionaries.push(dictionary(images, reference, &to, wanted.plain_http, progress.clone()).await?);
    }
    let source = source::open(&from, &options, progress.clone()).await.map_err(failure)?;
    let resolved = source::resolve(&*source, &Platform::linux_amd64())
        .await
        .map_err(failure)?;
    let original = Original::of(&resolved, &from);
    let whole = PullOptions {
        lazy: false,
        ..images.pull_options(Pull::Always, wanted.plain_http)
    };
    let image = images.pull_with(&from, &whole, progress.clone()).await?;
    if image.digest != resolved.digest {
        let what = format!("{from} was pushed again while it was converted");
        return Err(Failure::new(ExitCode::RegistryFailed, what).remedy("convert it again"));
    }
    // Leased: nobody empties its files while they are read.
    let lease = image.lease().map_err(failure)?;
    let (shared, scratch, convert_options) =
        (images.clone(), images.store.root().to_owned(), wanted.options);
    let work = move || -> Result<_, Failure> {
        let _lease = lease;
        let order = match trace {
            Some(order) => Some(order),
            None => prefetch::find(&image).map(|(order, _)| order),
        };
        let mut input = Input::of_image(&image, order).map_err(failure)?;
        let known = record::blobs(&shared, &image);
        for blob in &mut input.blobs {
            blob.layer = known
                .iter()
                .find(|it| it.digest == blob.id)
                .and_then(|it| it.layer);
        }
        let converted =
            accelerated::convert(input, &original, &convert_options, &dictionaries, &scratch).map_err(failure)?;
        Ok((converted, dictionaries, original.image, scratch))
    };
    let (converted, dictionaries, original, scratch) = tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))??;
    let (digest, facts) = (converted.digest, converted.facts.clone());
    let push = Push::open(&to, &options, progress).await.map_err(failure)?;
    let pushed = converted
        .push(&push, place::tag(&to), &dictionaries, &scratch)
        .await
        .map_err(failure)?;
    Ok(Made {
        reference: to.to_string(),
        digest,
        original,
        load_order: facts.load_order_bytes > 0,
        facts,
        pushed,
    })
}

fn read_trace(path: &Path) -> Result<LoadOrder, Failure> {
    let invalid = |why: String| {
        Failure::new(
            ExitCode::LoadOrderInvalid,
            format!("{}: {why}", path.display()),
        )
    };
    let length = std::fs::metadata(path).map_err(|e| invalid(e.to_string()))?.len();
    if length > prefetch::MAX_DOCUMENT as u64 {
        return Err(invalid("it is too large for a load order".into()));
    }
    let bytes = std::fs::read(path).map_err(|e| invalid(e.to_string()))?;
    LoadOrder::from_json(&bytes).map_err(|e| invalid(e.to_string()))
}

async fn dictionary(
    images: &Images,
    reference: &str,
    to: &ImageRef,
    plain_http: bool,
    progress: Arc<dyn Progress>,
) -> Result<Dictionary, Failure> {
    let from = place::parse(reference)?;
    let options = FetchOptions {
        source: images.source_options(plain_http),
        fetcher: images.fetcher.clone(),
    };
    let source = source::open(&from, &options.source, progress.clone())
        .await
        .map_err(failure)?;
    let manifest = find(&*source, &format!("the dictionary {from}"))
        .await
        .map_err(failure)?;
    let ranges = fetch::open(&from, &options, progress).await.map_err(failure)?;
    let mut dictionary = Dictionary::open(&manifest, ranges).await.map_err(failure)?;
    dictionary.repository = place::mountable(&from, to);
    Ok(dictionary)
}
