//! Images: registries, layers, formats, conversion, the store, and the filler of the blob cache.
//!
//! `thaw-imagefs` serves images to guests. The serving process contains no code of this crate.

pub mod accelerated;
mod blocking;
pub mod compression;
pub mod convert;
pub mod error;
pub mod fetch;
pub mod fill;
pub mod form;
pub mod formats;
pub mod guest_image;
pub mod index;
pub mod layer;
pub mod lazy;
pub mod load_order;
pub mod manifest;
pub mod merge;
pub mod nydus;
pub mod prefetch;
pub mod progress;
pub mod pull;
pub mod ranges;
pub mod reference;
pub mod registry;
pub mod source;
pub mod span;
pub mod store;

pub use error::Error;

#[cfg(test)]
mod erofs_test;
