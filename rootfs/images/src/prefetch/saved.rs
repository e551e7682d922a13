//! The load order that was recorded for an image on this host, in a file of the image's directory in the store.

use std::io::Write;
use std::path::{Path, PathBuf};

use thaw_failpoint::{Failpoint, reach};

use crate::error::Error;
use crate::store::Image;

use crate::load_order::{LoadOrder, MAX_DOCUMENT};

/// The file's name. The load order that comes with an image has another one.
const RECORDED: &str = "load-order-recorded.json";

fn path(image: &Image) -> PathBuf {
    image.metadata.with_file_name(RECORDED)
}

/// The recorded load order. One that is damaged counts as absent.
pub(super) fn recorded(image: &Image) -> Option<LoadOrder> {
    read(&path(image))
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

/// Keeps a recorded load order beside its image and replaces an earlier one. It is removed with the image.
///
/// # Errors
/// `DiskFull`, `Io`: the image may have been removed meanwhile.
pub fn keep(image: &Image, order: &LoadOrder) -> Result<PathBuf, Error> {
    let path = path(image);
    write(&path, order)?;
    Ok(path)
}

/// Writes a load order atomically.
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
