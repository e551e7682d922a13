//! Snapshots in an OCI registry: the format of the artifact, without transfers.
//!
//! | module | noun |
//! |---|---|
//! | [`listing`] | the OCI manifest: which documents and packs there are |
//! | [`config`] | what a node must know before it fetches anything else |
//! | [`table`] | the chunks: their hashes, where they are stored, and where they belong |
//! | [`pack`] | cuts files into chunks, and packs these into layers |
//! | [`part`] | which bytes of which packs yield a part of a file |
//! | [`unpack`] | verifies a pack's chunks and writes them to files |
//! | [`state`] | the CPUID in the `state` of a snapshot |
//!
//! Invariants: whatever a registry sends is bounded before it is read, and compared with a digest or hash before it is used. Decoders
//! accept exactly what an encoder of this version writes. The format: `docs/snapshot-artifact.md`.

use crate::error::{Error, ErrorKind};

pub mod config;
pub mod listing;
pub mod pack;
pub mod part;
pub mod state;
pub mod table;
pub mod unpack;

pub use config::Config;
pub use listing::Listing;
pub use pack::Packer;
pub use table::Table;

/// Bytes of a chunk. The last one of a file may be shorter.
///
/// A smaller chunk costs more of the table and compresses worse; of a larger one, more is fetched for one page, and fewer are equal.
pub const CHUNK: u32 = 256 << 10;
/// The smallest span, bytes: the part of a file whose chunks share a pack. If one of them changes, the next version sends the whole pack.
pub const LEAST_SPAN: u64 = 1 << 20;
/// Spans are doubled while the files have more than so many with data: each pack costs a push or a pull a few requests.
pub const ENOUGH_PACKS: usize = 2000;
/// Most packs of one snapshot.
pub const MAX_PACKS: usize = 4000;
/// Most bytes of a pack, and the largest span: its chunks may not compress.
pub const MAX_PACK: u64 = 64 << 20;
/// Most distinct chunks of one snapshot: 128 GiB of them.
pub const MAX_CHUNKS: usize = 1 << 19;

/// Why a registry's documents are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArtifactError {
    /// It is something else, an image for instance.
    #[error("it is no snapshot: its artifactType is {0:?}")]
    OtherType(String),
    #[error(
        "its format is of version {found}; this thaw reads version {}",
        config::FORMAT
    )]
    Version { found: u64 },
    #[error("its {part} has {bytes} bytes; at most {most} are read")]
    TooLarge {
        part: &'static str,
        bytes: u64,
        most: u64,
    },
    #[error("its {part} is malformed: {problem}")]
    Malformed { part: &'static str, problem: String },
}

impl ArtifactError {
    pub(crate) fn malformed(part: &'static str, problem: impl ToString) -> ArtifactError {
        ArtifactError::Malformed {
            part,
            problem: problem.to_string(),
        }
    }

    /// The error for a caller, with the reference that it named.
    pub fn of(self, reference: &str) -> Error {
        let kind = match self {
            ArtifactError::OtherType(_) => ErrorKind::NotASnapshot,
            ArtifactError::Version { .. } => ErrorKind::SnapshotIncompatible,
            ArtifactError::TooLarge { .. } | ArtifactError::Malformed { .. } => ErrorKind::SnapshotMalformed,
        };
        let error = Error::new(kind, format!("{reference}: {self}"));
        match kind {
            ErrorKind::SnapshotIncompatible => {
                error.remedy("pull it with the release of Thaw that pushed it")
            }
            _ => error,
        }
    }
}

/// Refuses a document whose size alone is wrong.
fn check_size(part: &'static str, bytes: u64, most: u64) -> Result<(), ArtifactError> {
    match bytes {
        0 => Err(ArtifactError::malformed(part, "it is empty")),
        bytes if bytes > most => Err(ArtifactError::TooLarge { part, bytes, most }),
        _ => Ok(()),
    }
}
