//! Chooses the load order for a start.

use crate::store::Image;

use super::{journal, saved};
use crate::load_order::LoadOrder;

/// The origin of a load order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Provenance {
    /// Recorded on this node.
    Recorded,
    /// Part of the image.
    Shipped,
}

/// The load order for a start of an image: the one recorded on this node, or else the one that the image came with. First saves the journal
/// of a killed recording.
pub fn find(image: &Image) -> Option<(LoadOrder, Provenance)> {
    journal::recover(image);
    let recorded = saved::recorded(image).map(|order| (order, Provenance::Recorded));
    recorded.or_else(|| {
        let shipped = image.load_order().ok().flatten()?;
        Some((shipped, Provenance::Shipped))
    })
}
