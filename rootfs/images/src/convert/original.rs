//! What a converted image records about the image it was converted from.

use serde::Deserialize;
use thaw_imagefs::digest::Digest;

use crate::reference::ImageRef;
use crate::source::{Descriptor, Resolved};

/// What a converted image records about the image it was converted from.
#[derive(Clone, Debug)]
pub struct Original {
    /// Digest of its manifest.
    pub image: Digest,
    /// Its manifest, if it is one that others can fetch.
    pub subject: Option<Descriptor>,
    /// Its config, unchanged.
    pub config: Vec<u8>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    media_type: Option<String>,
}

impl Original {
    /// Describes a resolved image. The manifest of an archive is written by Thaw and is not stored anywhere.
    pub fn of(resolved: &Resolved, reference: &ImageRef) -> Self {
        let head: Option<Head> = serde_json::from_slice(&resolved.manifest).ok();
        let media_type = head
            .and_then(|head| head.media_type)
            .unwrap_or_else(|| crate::source::OCI_MANIFEST.into());
        let subject = match reference {
            ImageRef::Archive { .. } => None,
            ImageRef::Layout { .. } | ImageRef::Registry(_) => {
                Some(Descriptor::of(&media_type, &resolved.manifest))
            }
        };
        Self {
            image: resolved.digest,
            subject,
            config: resolved.config_bytes.clone(),
        }
    }

    /// An OCI config, whatever media type the original had, because Docker's config has the same fields.
    pub(super) fn config_descriptor(&self) -> Descriptor {
        Descriptor::of(crate::source::OCI_CONFIG, &self.config)
    }
}
