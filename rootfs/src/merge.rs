//! Layers into one tree.

use crate::tree::{LayerTree, Tree};

/// Why layers do not make a tree.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    #[error("layer {layer}: {path:?} is a hard link to {target:?}, which no layer up to it has")]
    MissingLinkTarget {
        layer: usize,
        path: String,
        target: String,
    },
}

/// Applies layers, bottom first.
///
/// # Errors
/// See [`MergeError`].
pub fn flatten(_layers: &[LayerTree]) -> Result<Tree, MergeError> {
    unimplemented!()
}
