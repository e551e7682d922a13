//! Snapshots on disk: directories, what is promised of their bytes, and handing them to a VMM (DESIGN §6).
//!
//! | module | noun |
//! |---|---|
//! | [`manifest`] | `manifest.json`: what was frozen, and the hash of every byte beside it |
//! | [`directory`] | a snapshot's directory: made whole or not at all, verified, removed |
//! | [`contents`] | reading sparse files chunk by chunk, on all cores |
//! | [`stamp`] | what was verified since this boot and has not been touched since |
//! | [`signature`] | Ed25519 over the manifest's bytes |
//! | [`register`] | verified files as the descriptors a VMM restores from |
//!
//! Invariant: what a VMM is handed has been compared with the manifest, every byte, since this boot; and the manifest is
//! signed by a trusted key wherever any key is trusted. Formats: `docs/snapshot-format.md`.

pub mod contents;
pub mod directory;
pub mod error;
pub mod hash;
pub mod manifest;
pub mod register;
pub mod signature;
pub mod stamp;

pub use directory::{Draft, SnapshotDir};
pub use error::SnapshotError;
pub use hash::Hash;
pub use manifest::{Base, Cpu, ImageRecord, Kind, Machine, Manifest, Subject, inventory};
pub use register::{Hold, Registered, Registry};
pub use signature::{SigningKey, TrustedKeys};
pub use stamp::Stamps;
