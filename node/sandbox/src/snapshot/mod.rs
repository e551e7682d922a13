//! Snapshots on disk: directories, what is promised of their bytes, and handing them to a VMM.
//!
//! | module | noun |
//! |---|---|
//! | [`manifest`] | `manifest.json`: what was frozen, and the hash of every byte beside it |
//! | [`draft`] | a directory being made: complete in the end, or removed |
//! | `partial` | directories that are being made or removed, and what killed processes left of them |
//! | [`directory`] | a snapshot's directory: opened, verified, removed |
//! | `check` | a file compared with what the manifest says of it |
//! | [`contents`] | reading sparse files chunk by chunk, on all cores |
//! | [`stamp`] | what was verified since this boot and has not been touched since |
//! | [`signature`] | Ed25519 over the manifest's bytes |
//! | [`scratch`] | where a fork's snapshot is, for as long as it forks |
//! | [`register`] | verified files as the descriptors a VMM restores from |
//!
//! Invariant: what a VMM is handed has been compared with the manifest, every byte, since this boot; and the manifest is
//! signed by a trusted key wherever any key is trusted. Formats: `docs/snapshot-format.md`.

mod check;
pub mod components;
pub mod contents;
pub mod directory;
pub mod draft;
pub mod error;
pub mod hash;
pub mod manifest;
mod partial;
pub mod register;
pub mod scratch;
pub mod signature;
pub mod stamp;

pub use components::Components;
pub use directory::SnapshotDir;
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
