//! Snapshots on disk: their directories, the guarantees for their bytes, and how a VMM gets them.
//!
//! | module | noun |
//! |---|---|
//! | [`manifest`] | `manifest.json`: what was frozen, and the hash of every byte beside it |
//! | [`draft`] | a directory being made: complete in the end, or removed |
//! | `partial` | directories being made or removed, and those that killed processes left |
//! | [`directory`] | a snapshot's directory: opened, verified, removed |
//! | `disk_bases` | the whole disks below disks that are layers |
//! | `check` | compares a file with the manifest |
//! | [`contents`] | reads sparse files chunk by chunk, on all cores |
//! | [`stamp`] | remembers which files were verified since this boot and have not changed since |
//! | [`signature`] | Ed25519 over the manifest's bytes |
//! | [`scratch`] | the directory of a fork's snapshot, while the fork is in progress |
//! | `kept` | keeps a snapshot's directory while another is made over it |
//! | [`working_sets`] | the pages that thawed applications touch first, recorded by this node |
//! | [`store`] | the snapshots that the node keeps: named, listed, removed |
//! | [`register`] | verified files as the descriptors a VMM restores from |
//! | [`artifact`] | a snapshot in an OCI registry |
//!
//! Invariant: every byte of a snapshot that a VMM gets has been compared with the manifest since this boot, and if any key is trusted, a
//! trusted key has signed the manifest. Formats: `docs/snapshot-format.md`.

pub mod artifact;
mod check;
pub mod components;
pub mod contents;
pub mod directory;
mod disk_bases;
pub mod draft;
pub mod error;
pub mod hash;
pub(crate) mod kept;
pub mod manifest;
mod partial;
pub mod register;
pub mod scratch;
pub mod signature;
pub mod stamp;
pub mod store;
pub mod working_sets;

pub use components::Components;
pub use directory::SnapshotDir;
pub(crate) use directory::{MANIFEST, disk_path};
pub use draft::Draft;
pub use error::SnapshotError;
pub use hash::Hash;
pub use manifest::{Base, Cpu, ImageRecord, Kind, Machine, Manifest, Subject, inventory};
pub(crate) use partial::sweep;
pub use partial::sweep_beside;
pub use register::{Hold, Registered, Registry};
pub use scratch::Scratch;
pub use signature::{KEYS, Signatures, SigningKey, TrustedKeys};
pub use stamp::Stamps;
pub use store::{SnapshotStore, Stored};
pub use working_sets::WorkingSets;
