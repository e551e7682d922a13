//! Referrers of a manifest: from the registry's referrers API, else from the index tagged `sha256-HEX`, or from a
//! layout's own index.
//!
//! Invariant: a listing is a claim. A caller that uses a referrer reads it and checks its `subject`.

use std::sync::Arc;

use reqwest::header::LINK;
use serde::Deserialize;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::{MAX_MANIFEST, OCI_INDEX};
use crate::progress::Progress;
use crate::reference::ImageRef;
use crate::registry::Rights;
use crate::registry::repository::Repository;
use crate::registry::request::Request;

use super::layout::Layout;
use super::push::fallback_tag;
use super::{Descriptor, SourceOptions};

/// Pages of a listing that are read.
const MAX_PAGES: usize = 32;
/// Manifests of a layout that are looked into.
const MAX_LOOKED_INTO: usize = 1024;

/// A manifest that refers to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Referrer {
    /// Its `artifactType`, or its config's media type if it has none.
    pub artifact_type: Option<String>,
    pub descriptor: Descriptor,
}

#[derive(Deserialize)]
struct Listing {
    #[serde(default)]
    manifests: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    artifact_type: Option<String>,
    #[serde(flatten)]
    descriptor: Descriptor,
}

impl From<Entry> for Referrer {
    fn from(entry: Entry) -> Self {
        Self {
            artifact_type: entry.artifact_type,
            descriptor: entry.descriptor,
        }
    }
}

fn parse(what: &str, bytes: &[u8]) -> Result<Vec<Referrer>, Error> {
    let listing: Listing = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
    Ok(listing.manifests.into_iter().map(Into::into).collect())
}

/// The manifests whose `subject` is `digest`, in the repository or directory of `reference`.
///
/// # Errors
/// Those of the registry, `Io` or `Malformed`.
pub async fn referrers(
    reference: &ImageRef,
    digest: &Digest,
    options: &SourceOptions,
    progress: Arc<dyn Progress>,
) -> Result<Vec<Referrer>, Error> {
    match reference {
        ImageRef::Registry(reference) => {
            let client = options.client()?;
            let registry = client
                .repository(reference, &options.registry(), Rights::Pull, progress)
                .await?;
            match listed(&registry, digest).await? {
                Some(referrers) => Ok(referrers),
                None => tagged(&registry, digest).await,
            }
        }
        ImageRef::Layout { directory, tag } => {
            let (layout, digest) = (Layout::open(directory.clone(), tag.clone())?, *digest);
            let look = move || in_layout(&layout, &digest);
            tokio::task::spawn_blocking(look)
                .await
                .map_err(|_| Error::Cancelled)?
        }
        ImageRef::Archive { .. } => Ok(Vec::new()),
    }
}

/// The registry's list; `None` if it does not support the API.
async fn listed(registry: &Repository, digest: &Digest) -> Result<Option<Vec<Referrer>>, Error> {
    let what = format!("the referrers of {digest}");
    let mut url = format!("{}/referrers/{digest}", registry.base);
    let mut referrers = Vec::new();
    for _ in 0..MAX_PAGES {
        let request = Request {
            accept: Some(OCI_INDEX),
            ..Request::get(&url, &what)
        };
        let sent = match registry.connection.ask(&request).await {
            Ok(sent) => sent,
            Err(Error::RegistryNotFound { .. }) => return Ok(None),
            Err(Error::RegistryFailed { status, .. }) if (400..500).contains(&status) => return Ok(None),
            Err(error) => return Err(error),
        };
        let next = sent
            .response
            .headers()
            .get(LINK)
            .and_then(|it| next_page(it.to_str().ok()?))
            .and_then(|next| sent.url.join(next).ok());
        let bytes = registry.body(sent.response, &what, MAX_MANIFEST).await?;
        match parse(&what, &bytes) {
            Ok(page) => referrers.extend(page),
            // A page for people: whatever answered, it was no registry that knows referrers.
            Err(_) if referrers.is_empty() => return Ok(None),
            Err(error) => return Err(error),
        }
        match next {
            Some(next) => url = next.to_string(),
            None => break,
        }
    }
    Ok(Some(referrers))
}

/// `<URL>; rel="next"`.
fn next_page(link: &str) -> Option<&str> {
    let (url, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
    let next = parameters
        .split(';')
        .any(|it| matches!(it.trim(), r#"rel="next""# | "rel=next"));
    next.then_some(url)
}

async fn tagged(registry: &Repository, digest: &Digest) -> Result<Vec<Referrer>, Error> {
    let tag = fallback_tag(digest);
    let what = format!("the index {tag} of referrers");
    match registry.manifest_at(&tag, &what).await {
        Ok((_, bytes)) => parse(&what, &bytes),
        Err(Error::RegistryNotFound { .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn in_layout(layout: &Layout, digest: &Digest) -> Result<Vec<Referrer>, Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Refers {
        subject: Option<Descriptor>,
        artifact_type: Option<String>,
        config: Option<Descriptor>,
    }
    let (what, index) = layout.index()?;
    let listing: Listing = serde_json::from_slice(&index).map_err(|error| Error::malformed(what, error))?;
    let mut referrers: Vec<Referrer> = Vec::new();
    for entry in listing.manifests.into_iter().take(MAX_LOOKED_INTO) {
        // A missing document, or one that is not a manifest, refers to nothing.
        let Ok(bytes) = layout.document("manifest", &entry.descriptor, MAX_MANIFEST) else {
            continue;
        };
        let Ok(refers) = serde_json::from_slice::<Refers>(&bytes) else {
            continue;
        };
        let known = referrers
            .iter()
            .any(|it| it.descriptor.digest == entry.descriptor.digest);
        if refers.subject.is_some_and(|subject| subject.digest == *digest) && !known {
            let config = refers.config.map(|config| config.media_type);
            referrers.push(Referrer {
                artifact_type: entry.artifact_type.or(refers.artifact_type).or(config),
                descriptor: entry.descriptor,
            });
        }
    }
    Ok(referrers)
}

#[cfg(test)]
mod tests {
    use super::next_page;

    #[test]
    fn pages() {
        assert_eq!(
            next_page(r#"</v2/x/referrers/y?n=2>; rel="next""#),
            Some("/v2/x/referrers/y?n=2")
        );
        assert_eq!(next_page(r#"</v2/x>; rel="prev""#), None);
        assert_eq!(next_page("nonsense"), None);
    }
}
