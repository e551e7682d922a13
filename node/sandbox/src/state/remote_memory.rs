//! What a later owner needs to serve the memory of a sandbox that was thawed while its snapshot was being fetched.

use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;
use thaw_protocol::control::MappedRegion;

use crate::snapshot::Hash;
use crate::tenant::Tenant;

/// The memory in a record. Its userfaultfd is found in the VMM, and its hashes in the manifest in the sandbox's directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteMemory {
    pub(crate) place: RemotePlace,
    /// The VMM's mappings of the memory.
    pub(crate) regions: Vec<MappedRegion>,
}

/// A snapshot in a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePlace {
    /// The reference, with the digest if it is of a registry.
    pub reference: String,
    /// Digest of the OCI manifest.
    pub digest: Digest,
    /// Hash of the snapshot's manifest.
    pub manifest: Hash,
    /// The owner of the snapshot.
    pub tenant: Option<Tenant>,
}
