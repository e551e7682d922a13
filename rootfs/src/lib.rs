//! Images: sources, layers, EROFS metadata, the blob cache and the read-only filesystem.

pub mod accelerated;
pub mod blob;
pub mod compression;
pub mod digest;
pub mod erofs;
pub mod error;
pub mod fetch;
pub mod fill;
pub mod fs;
pub mod guarded;
pub mod guest_image;
pub mod index;
pub mod layer;
pub mod merge;
pub mod nydus;
pub mod prefetch;
pub mod progress;
pub mod reference;
pub mod source;
pub mod span;
pub mod store;
pub mod tree;

pub use digest::Digest;
pub use error::Error;
