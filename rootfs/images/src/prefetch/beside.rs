//! Load orders beside an image in the store: the one recorded here, and the one the image came with.

use std::io::Write;
use std::path::{Path, PathBuf};

use thaw_failpoint::{Failpoint, reach};

use crate::error::Error;
use crate::store::Image;

use super::journal;
use super::order::{LoadOrder, MAX_DOCUMENT};

/// Of a run on this node; the other is written with the image.
const RECORDED: &str = "load-order-recorded.json";

/// Whose load order it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Provenance {
    /// Recorded on this node.
    Recorded,
    /// Part of the image.
    Shipped,
}

fn path(image: &Image) -> PathBuf {
    image.metadata.with_file_name(RECORDED)
}

/// Whether one was recorded on this node.
pub(super) fn is_recorded(image: &Image) -> bool {
    read(&path(image)).is_some()
}

/// The load order to start an image with: the one recorded on this node, else the one it came with. One that is damaged
/// counts as absent. What a recording that was killed has left is made use of first.
pub fn find(image: &Image) -> Option<(LoadOrder, Provenance)> {
    journal::recover(image);
    let recorded = read(&path(image)).map(|order| (order, Provenance::Recorded));
    recorded.or_else(|| {
        let shipped = image.load_order().ok().flatten()?;
        Some((shipped, Provenance::Shipped))
    })
}

fn read(path: &Path) -> Option<LoadOrder> {
    let length = std::fs::metadata(path).ok()?.len();
    if length > MAX_DOCUMENT as u64 {
        return None;
    }
    let order = std::fs::read(path)
        .ok()
        .map(|bytes| LoadOrder::from_json(&bytes))?;
    order
        .inspect_err(|error| tracing::warn!("{} is not used: {error}", path.display()))
        .ok()
}

/// Keeps a recorded load order beside its image, in the place of an earlier one. It goes when the image goes.
///
/// # Errors
/// `DiskFull`, `Io`: the image may have been removed meanwhile.
pub fn keep(image: &Image, order: &LoadOrder) -> Result<PathBuf, Error> {
    let path = path(image);
    write(&path, order)?;
    Ok(path)
}

/// Writes a load order, whole or not at all.
///
/// # Errors
/// `DiskFull`, `Io`.
pub fn write(path: &Path, order: &LoadOrder) -> Result<(), Error> {
    let io = |error| Error::io(path, error);
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(io)?;
    reach(Failpoint::OrderBegun);
    file.write_all(&order.to_json()?)
        .and_then(|()| file.as_file().sync_all())
        .map_err(io)?;
    reach(Failpoint::OrderWritten);
    file.persist(path).map_err(|error| io(error.error))?;
    reach(Failpoint::OrderPlaced);
    Ok(())
}
