//! Serves images to guests: the blob cache, EROFS metadata, and the FUSE file system over both.
//!
//! A VMM's process contains this code, so it depends on as little as possible: no network, no compression, no runtime.
//! `thaw-images` obtains images and fills the blob cache.

pub mod blob;
pub mod digest;
pub mod erofs;
pub mod fs;
pub mod guarded;
pub mod tree;

pub use digest::Digest;
