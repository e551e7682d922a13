//! `manifest.json`: the description of a snapshot, for people and programs, and the hashes of all its files.
//!
//! Invariants: a manifest of another format version is refused; unknown fields are ignored. [`Manifest::decode`] returns only manifests
//! that are consistent (sizes, chunk numbers, names), whatever its input. The manifest's hash is that of the file's bytes, so it covers all
//! other files too.

use serde::{Deserialize, Serialize};
use thaw_protocol::control::{CpuBaseline, DeviceId};
use thaw_protocol::disk_layer::file_bytes;

use super::hash::Hash;

/// Version of the manifest and of the directory's layout. `state` and `working-set` have versions of their own.
pub const FORMAT: u32 = 1;
/// The version if a disk is a layer: a reader of version 1 would take the layer for the whole disk.
pub const LAYERED_FORMAT: u32 = 2;
/// Size in bytes of the chunks of memory and disks that are hashed. The last chunk of a file may be shorter.
pub const CHUNK: u64 = 2 << 20;
/// Maximum size of a manifest, bytes: 64 GiB of memory and the same of disks need 5 MiB.
pub const MAX_MANIFEST: u64 = 32 << 20;
/// Maximum size of a memory or disk file, bytes: that of a layer of the largest disk.
const MAX_FILE: u64 = file_bytes(1 << 40);
/// Maximum number of snapshots in a chain of deltas, including the base: the number of layers that `state` supports.
pub const MAX_LAYERS: usize = 8;

/// The kind of guest that was frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A guest whose agent listens and which never had an identity. It can become any sandbox.
    Template,
    /// A running sandbox with its containers.
    Sandbox,
    /// A template of a tiny test guest, which has no agent.
    Bare,
}

impl Kind {
    /// What people call such a snapshot.
    pub fn noun(self) -> &'static str {
        match self {
            Kind::Template | Kind::Bare => "template",
            Kind::Sandbox => "snapshot",
        }
    }
}

/// The size of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// vCPUs of the machine: the maximum that can be online.
    pub vcpus: u8,
    /// Boot memory in MiB; virtio-mem may add to it.
    pub memory_mib: u32,
}

/// The kind of its vCPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    pub baseline: CpuBaseline,
    /// The processor of the host it was frozen on, for people. `state` decides whether another host is compatible.
    pub host: String,
}

/// The base of a delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Hash of the base's manifest.
    pub manifest: Hash,
    /// The base's directory. A relative path starts at this snapshot's directory.
    pub place: std::path::PathBuf,
}

/// An image that was in a slot of the root device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    pub slot: u16,
    /// Directory name under the root device's root.
    pub name: String,
    /// Digest of the image's manifest.
    pub digest: String,
    /// Hash of its EROFS metadata: the guest's inode numbers are valid only for this metadata.
    pub metadata: Hash,
}

/// The whole manifest except its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    pub kind: Kind,
    pub machine: Machine,
    pub cpu: Cpu,
    /// Hash of the thaw-vmm that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm: Option<Hash>,
    /// Hash of the vmlinux it booted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Hash>,
    /// Hash of the guest image. The same image must be attached again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_image: Option<Hash>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_line: Option<String>,
    /// Names of the machine's devices, in slot order.
    pub devices: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageRecord>,
    /// What a node must know of the containers to serve them again. Its form is the node's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<serde_json::Value>,
}

/// A file with one hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WholeFile {
    pub bytes: u64,
    pub blake3: Hash,
}

/// A sparse file with a hash for each chunk of [`CHUNK`] bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkedFile {
    pub bytes: u64,
    /// Number of bytes that were not in holes when it was written: the size of a copy.
    pub data_bytes: u64,
    /// The chunks with a non-zero byte. All others are zero, whether they are holes or not.
    pub chunks: Vec<ChunkRun>,
}

/// Hashes of consecutive chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRun {
    /// Number of the first chunk.
    pub first: u64,
    /// One hash per chunk.
    pub blake3: Vec<Hash>,
}

/// A disk, in `disks/<id>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFile {
    /// Name of its file: letters, digits and dashes.
    pub id: String,
    /// The file is a layer ([`thaw_protocol::disk_layer`]) over the disk of this name of the next snapshot below in which it is whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub layer: bool,
    #[serde(flatten)]
    pub contents: ChunkedFile,
}

/// The files beside the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Files {
    pub state: WholeFile,
    pub memory: ChunkedFile,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<WholeFile>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskFile>,
}

/// A manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`Files::format`].
    pub format: u32,
    /// The version of Thaw that wrote it.
    pub thaw: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
    #[serde(flatten)]
    pub subject: Subject,
    pub files: Files,
}

/// Why bytes are not a valid manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    #[error("it is of format version {found}; this thaw reads versions {FORMAT} and {LAYERED_FORMAT}")]
    Version { found: u64 },
    #[error("it cannot be read: {0}")]
    Malformed(String),
}

impl Manifest {
    /// The file's bytes: JSON with indentation.
    pub fn encode(&self) -> Vec<u8> {
        // All map keys are strings, and no type here fails to serialise.
        let mut bytes = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        bytes.push(b'\n');
        bytes
    }

    /// Reads and checks a manifest.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        /// The version is read first, because the meaning of all other fields depends on it.
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let malformed = |e: serde_json::Error| ManifestError::Malformed(e.to_string());
        let Version { format } = serde_json::from_slice(bytes).map_err(malformed)?;
        if ![FORMAT, LAYERED_FORMAT].map(u64::from).contains(&format) {
            return Err(ManifestError::Version { found: format });
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(malformed)?;
        manifest.check().map_err(ManifestError::Malformed)?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        self.files.memory.check("memory")?;
        let mut ids: Vec<&str> = Vec::new();
        for disk in &self.files.disks {
            check_disk_id(&disk.id)?;
            if ids.contains(&disk.id.as_str()) {
                return Err(format!("disk {} is there twice", disk.id));
            }
            ids.push(&disk.id);
            disk.contents.check(&disk.id)?;
        }
        let format = self.files.format();
        if self.format != format {
            return Err(format!(
                "it is of format version {}, and its disks of {format}",
                self.format
            ));
        }
        match format == LAYERED_FORMAT && self.subject.base.is_none() {
            true => Err("a disk is a layer, but the snapshot lies on none".into()),
            false => Ok(()),
        }
    }
}

impl Files {
    /// Version of the format of a manifest with these files.
    pub fn format(&self) -> u32 {
        match self.disks.iter().any(|disk| disk.layer) {
            true => LAYERED_FORMAT,
            false => FORMAT,
        }
    }
}

/// Whether this is a valid id of a disk. It becomes a file name.
pub fn check_disk_id(id: &str) -> Result<(), String> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || c == b'-';
    match (1..=32).contains(&id.len()) && id.bytes().all(plain) {
        true => Ok(()),
        false => Err(format!(
            "{id:?} is no disk's name: at most 32 letters, digits and dashes"
        )),
    }
}

impl ChunkedFile {
    /// The number of chunks, including zero ones.
    pub fn chunk_count(&self) -> u64 {
        self.bytes.div_ceil(CHUNK)
    }

    /// The hashes of all chunks in order; `None` for a zero chunk.
    pub fn by_chunk(&self) -> Vec<Option<Hash>> {
        let mut all = vec![None; self.chunk_count() as usize];
        for run in &self.chunks {
            for (slot, hash) in all.iter_mut().skip(run.first as usize).zip(&run.blake3) {
                *slot = Some(*hash);
            }
        }
        all
    }

    /// From the hashes of the non-zero chunks, by number.
    pub(super) fn from_hashes(bytes: u64, data_bytes: u64, hashes: Vec<(u64, Hash)>) -> ChunkedFile {
        let mut chunks: Vec<ChunkRun> = Vec::new();
        for (number, hash) in hashes {
            match chunks.last_mut() {
                Some(run) if run.first + run.blake3.len() as u64 == number => run.blake3.push(hash),
                _ => chunks.push(ChunkRun {
                    first: number,
                    blake3: vec![hash],
                }),
            }
        }
        ChunkedFile {
            bytes,
            data_bytes,
            chunks,
        }
    }

    fn check(&self, name: &str) -> Result<(), String> {
        if self.bytes > MAX_FILE {
            return Err(format!(
                "{name} has {} bytes, which is more than any can",
                self.bytes
            ));
        }
        let mut next = 0;
        for run in &self.chunks {
            let end = run.first.saturating_add(run.blake3.len() as u64);
            if run.first < next || end > self.chunk_count() {
                return Err(format!(
                    "{name}'s chunks from {} on are out of order or too many",
                    run.first
                ));
            }
            next = end;
        }
        Ok(())
    }
}

/// The manifest's names of the devices that every machine has.
pub fn inventory() -> Vec<String> {
    DeviceId::ALL
        .iter()
        .map(|d| format!("{d:?}").to_lowercase())
        .collect()
}
