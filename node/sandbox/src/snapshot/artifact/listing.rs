//! The OCI manifest of a snapshot: its config, its documents and its packs.
//!
//! Invariant: a decoded listing has every required document once, in the order below, each of a size that it may have. So a reader
//! may allocate what a descriptor says.

use serde::{Deserialize, Serialize};
use thaw_images::manifest::{Descriptor, OCI_MANIFEST};

use super::{ArtifactError, MAX_PACK, MAX_PACKS, check_size, config, state, table};
use crate::snapshot::manifest::MAX_MANIFEST;
use crate::snapshot::signature::SIGNATURE;
use crate::snapshot::working_sets;

/// `artifactType` of the OCI manifest.
pub const ARTIFACT_TYPE: &str = "application/vnd.thaw.snapshot.v1";
/// [`super::Config`].
pub const CONFIG_TYPE: &str = "application/vnd.thaw.snapshot.config.v1+json";
/// The snapshot's own `manifest.json`.
pub const MANIFEST_TYPE: &str = "application/vnd.thaw.snapshot.manifest.v1+json";
/// `manifest.sig`.
pub const SIGNATURE_TYPE: &str = "application/vnd.thaw.snapshot.signature.v1";
/// `state`.
pub const STATE_TYPE: &str = "application/vnd.thaw.snapshot.state.v1";
/// A working set: the snapshot's own, or the one that the pushing node recorded.
pub const WORKING_SET_TYPE: &str = "application/vnd.thaw.snapshot.working-set.v1";
/// [`super::Table`].
pub const TABLE_TYPE: &str = "application/vnd.thaw.snapshot.table.v1";
/// A pack of chunks.
pub const PACK_TYPE: &str = "application/vnd.thaw.snapshot.chunks.v1";

/// Most bytes of an OCI manifest: as many as registries accept.
const MAX_LISTING: usize = 4 << 20;
const PART: &str = "OCI manifest";

/// The documents and packs of a snapshot in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub config: Descriptor,
    pub manifest: Descriptor,
    pub signature: Option<Descriptor>,
    pub state: Descriptor,
    pub working_set: Option<Descriptor>,
    pub table: Descriptor,
    /// In the order of their numbers in the table.
    pub packs: Vec<Descriptor>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    schema_version: u32,
    media_type: &'static str,
    artifact_type: &'static str,
    config: &'a Descriptor,
    layers: Vec<&'a Descriptor>,
}

/// Read first, so that another kind of document is named as such, whatever else it has.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    schema_version: Option<u32>,
    artifact_type: Option<String>,
    config: Option<HeadConfig>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HeadConfig {
    #[serde(default)]
    media_type: String,
}

#[derive(Deserialize)]
struct Read {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

impl Listing {
    /// The bytes of the OCI manifest.
    pub fn encode(&self) -> Vec<u8> {
        let documents = [Some(&self.manifest), self.signature.as_ref(), Some(&self.state)];
        let rest = [self.working_set.as_ref(), Some(&self.table)];
        let written = Written {
            schema_version: 2,
            media_type: OCI_MANIFEST,
            artifact_type: ARTIFACT_TYPE,
            config: &self.config,
            layers: documents
                .into_iter()
                .chain(rest)
                .flatten()
                .chain(&self.packs)
                .collect(),
        };
        // All map keys are strings, and no type here fails to serialise.
        serde_json::to_vec(&written).expect("a manifest is plain data")
    }

    /// Reads and checks an OCI manifest.
    ///
    /// # Errors
    /// [`ArtifactError::OtherType`] for anything but a snapshot, and those of documents that are missing, repeated or too large.
    pub fn decode(bytes: &[u8]) -> Result<Listing, ArtifactError> {
        let malformed = |problem: &dyn std::fmt::Display| ArtifactError::malformed(PART, problem);
        if bytes.len() > MAX_LISTING {
            return Err(ArtifactError::TooLarge {
                part: PART,
                bytes: bytes.len() as u64,
                most: MAX_LISTING as u64,
            });
        }
        let head: Head = serde_json::from_slice(bytes).map_err(|e| malformed(&e))?;
        if head.artifact_type.as_deref() != Some(ARTIFACT_TYPE) {
            // What tools show of a manifest without an artifactType.
            let config = head.config.map(|config| config.media_type);
            return Err(ArtifactError::OtherType(
                head.artifact_type.or(config).unwrap_or_default(),
            ));
        }
        if head.schema_version != Some(2) {
            return Err(malformed(&"schemaVersion is not 2"));
        }
        let Read { config, layers } = serde_json::from_slice(bytes).map_err(|e| malformed(&e))?;
        check(&config, "config", CONFIG_TYPE, config::MAX_CONFIG)?;
        let mut layers = layers.into_iter().peekable();
        let mut next = |part: &'static str, media_type: &str, most: u64| {
            let found = layers.next_if(|layer| layer.media_type == media_type);
            found
                .map(|layer| check(&layer, part, media_type, most).map(|()| layer))
                .transpose()
        };
        let missing =
            |part: &'static str| move || ArtifactError::malformed(part, "there is none in its place");
        let manifest = next("manifest", MANIFEST_TYPE, MAX_MANIFEST)?.ok_or_else(missing("manifest"))?;
        let signature = next("signature", SIGNATURE_TYPE, SIGNATURE as u64)?;
        let state = next("state", STATE_TYPE, state::MAX_STATE)?.ok_or_else(missing("state"))?;
        let working_set = next("working set", WORKING_SET_TYPE, working_sets::MOST_BYTES)?;
        let table = next("table", TABLE_TYPE, table::MAX_TABLE)?.ok_or_else(missing("table"))?;
        let packs: Vec<Descriptor> = layers.collect();
        if packs.len() > MAX_PACKS {
            return Err(malformed(&format!("it has more than {MAX_PACKS} packs")));
        }
        for pack in &packs {
            check(pack, "pack", PACK_TYPE, MAX_PACK)?;
        }
        Ok(Listing {
            config,
            manifest,
            signature,
            state,
            working_set,
            table,
            packs,
        })
    }
}

/// Whether a descriptor may be that of this part.
fn check(
    descriptor: &Descriptor,
    part: &'static str,
    media_type: &str,
    most: u64,
) -> Result<(), ArtifactError> {
    if descriptor.media_type != media_type {
        let problem = format!("its media type is {:?}", descriptor.media_type);
        return Err(ArtifactError::malformed(part, problem));
    }
    if !descriptor.urls.is_empty() {
        return Err(ArtifactError::malformed(
            part,
            "it is to be fetched from elsewhere",
        ));
    }
    check_size(part, descriptor.size, most)
}

#[cfg(test)]
#[path = "listing_test.rs"]
mod tests;
