//! The config of a snapshot in a registry: what a node must know to refuse it before it fetches the rest.
//!
//! Invariant: it is a claim of whoever pushed it. What it repeats of the snapshot's manifest is compared with that
//! ([`Config::check_manifest`]) before anything large is fetched.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use thaw_hypervisor::CpuId;
use thaw_hypervisor::state::decode_cpuid;
use thaw_imagefs::digest::Digest;
use thaw_images::reference::{ImageRef, RegistryRef};
use thaw_protocol::control::VCPUS;

use super::{ArtifactError, CHUNK};
use crate::id::is_id;
use crate::snapshot::hash::Hash;
use crate::snapshot::manifest::{Cpu, Kind, Machine, Manifest, WholeFile};

/// The version of the config, the table and the packs.
pub const FORMAT: u32 = 1;
/// Most bytes of a config.
pub const MAX_CONFIG: u64 = 1 << 20;
/// Most images of a sandbox: slots of its root device.
const MAX_IMAGES: usize = 4096;
const PART: &str = "config";

/// A config.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// [`FORMAT`].
    pub format: u32,
    /// The stored snapshot's name and labels on the node that pushed it, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Id of the sandbox that was frozen.
    pub sandbox: String,
    /// Size and hash of `manifest.json`.
    pub manifest: WholeFile,
    #[serde(flatten)]
    pub facts: Facts,
    /// The first vCPU's CPUID, as the record of `state` has it, in base64. A host must offer all of it.
    pub cpuid: String,
    /// Names of its feature bits, for people and schedulers.
    #[serde(default)]
    pub features: Vec<String>,
    /// [`CHUNK`].
    pub chunk_bytes: u32,
    /// Bytes of the memory's and the disks' chunks that are not zero, equal ones counted each time: what they occupy on a disk.
    pub data_bytes: u64,
    /// The images of the sandbox, in the order of the snapshot's manifest.
    pub images: Vec<ImageSource>,
    /// Of a paused sandbox: what another node needs to be that sandbox, sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
}

/// What the snapshot's manifest says too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The version of Thaw that froze it.
    pub thaw: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
    pub machine: Machine,
    pub cpu: Cpu,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm: Option<Hash>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Hash>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_image: Option<Hash>,
    /// Bytes of the memory file, holes included.
    pub memory_bytes: u64,
    /// Bytes of each disk, holes included.
    pub disk_bytes: Vec<u64>,
}

/// An image of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSource {
    /// The registry's reference by which the pushing node had it, without a digest. `None` if it was from no registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Digest of the image's manifest.
    pub digest: String,
    /// Hash of its EROFS metadata.
    pub metadata: Hash,
}

impl Facts {
    /// The facts in a manifest.
    pub fn of(manifest: &Manifest) -> Facts {
        let subject = &manifest.subject;
        Facts {
            thaw: manifest.thaw.clone(),
            created: manifest.created,
            machine: subject.machine,
            cpu: subject.cpu.clone(),
            vmm: subject.vmm,
            kernel: subject.kernel,
            guest_image: subject.guest_image,
            memory_bytes: manifest.files.memory.bytes,
            disk_bytes: manifest.files.disks.iter().map(|it| it.contents.bytes).collect(),
        }
    }
}

impl ImageSource {
    /// Where to pull the image from, with its digest. `None` if it was from no registry.
    ///
    /// # Errors
    /// [`ArtifactError::Malformed`]: the reference names something else than an image in a registry, or the digest is none.
    pub fn place(&self) -> Result<Option<RegistryRef>, ArtifactError> {
        let malformed = |problem: &dyn std::fmt::Display| {
            ArtifactError::malformed(PART, format!("image {:?}: {problem}", self.digest))
        };
        let digest = self.digest.parse::<Digest>().map_err(|e| malformed(&e))?;
        let Some(reference) = &self.reference else {
            return Ok(None);
        };
        match reference.parse() {
            Ok(ImageRef::Registry(place)) => Ok(Some(RegistryRef {
                digest: Some(digest),
                ..place
            })),
            Ok(_) => Err(malformed(&"its reference is of no registry")),
            Err(e) => Err(malformed(&e)),
        }
    }
}

impl Config {
    /// The bytes of the document.
    pub fn encode(&self) -> Vec<u8> {
        // All map keys are strings, and no type here fails to serialise.
        serde_json::to_vec(self).expect("a config is plain data")
    }

    /// Reads and checks a config.
    ///
    /// # Errors
    /// [`ArtifactError::Version`], [`ArtifactError::Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Config, ArtifactError> {
        /// The version is read first, because the meaning of all other fields depends on it.
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let malformed = |e: serde_json::Error| ArtifactError::malformed(PART, e);
        let Version { format } = serde_json::from_slice(bytes).map_err(malformed)?;
        if format != u64::from(FORMAT) {
            return Err(ArtifactError::Version { found: format });
        }
        let config: Config = serde_json::from_slice(bytes).map_err(malformed)?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ArtifactError> {
        let malformed = |problem: String| Err(ArtifactError::malformed(PART, problem));
        if self.chunk_bytes != CHUNK {
            return malformed(format!("chunks have {} bytes, not {CHUNK}", self.chunk_bytes));
        }
        if !VCPUS.contains(&self.facts.machine.vcpus) {
            return malformed(format!("no machine has {} vCPUs", self.facts.machine.vcpus));
        }
        if !is_id(&self.sandbox) {
            return malformed("sandbox is no id".into());
        }
        if self.images.len() > MAX_IMAGES {
            return malformed(format!("there are more than {MAX_IMAGES} images"));
        }
        let files = self.facts.disk_bytes.iter();
        let whole = files.fold(self.facts.memory_bytes, |sum, bytes| sum.saturating_add(*bytes));
        if self.data_bytes > whole {
            return malformed(format!(
                "the files have {whole} bytes, and {} of data",
                self.data_bytes
            ));
        }
        for image in &self.images {
            image.place()?;
        }
        self.cpuid().map(drop)
    }

    /// The CPUID that a host must offer.
    ///
    /// # Errors
    /// [`ArtifactError::Malformed`].
    pub fn cpuid(&self) -> Result<CpuId, ArtifactError> {
        let bytes = self.cpuid_bytes()?;
        decode_cpuid(&bytes).map_err(|e| ArtifactError::malformed(PART, e))
    }

    /// The CPUID as the record of `state` has it.
    ///
    /// # Errors
    /// [`ArtifactError::Malformed`].
    pub fn cpuid_bytes(&self) -> Result<Vec<u8>, ArtifactError> {
        let decoded = STANDARD.decode(&self.cpuid);
        decoded.map_err(|e| ArtifactError::malformed(PART, format!("cpuid: {e}")))
    }

    /// A CPUID as a config has it.
    pub fn encoded_cpuid(bytes: &[u8]) -> String {
        STANDARD.encode(bytes)
    }

    /// Compares the claims of this config with the snapshot's manifest, whose bytes have the hash that the config names.
    ///
    /// # Errors
    /// [`ArtifactError::Malformed`]: they differ, or the manifest is of a template or of a delta, which are not pushed.
    pub fn check_manifest(&self, manifest: &Manifest) -> Result<(), ArtifactError> {
        let malformed = |problem: &str| Err(ArtifactError::malformed("manifest", problem));
        let subject = &manifest.subject;
        if subject.kind != Kind::Sandbox {
            return malformed("it is not of a sandbox");
        }
        if subject.base.is_some() {
            return malformed("it is of a delta");
        }
        let claimed = self.images.iter().map(|image| (&image.digest, image.metadata));
        let images = subject.images.iter().map(|image| (&image.digest, image.metadata));
        if Facts::of(manifest) != self.facts || !claimed.eq(images) {
            return malformed("the config says otherwise");
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "config_test.rs"]
mod tests;
