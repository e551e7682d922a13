//! Images: sources, layers, EROFS metadata, the blob cache and the read-only filesystem.

pub mod blob;
pub mod erofs;
pub mod layer;
pub mod merge;
pub mod tree;
