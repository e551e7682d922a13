//! The images that references named lately, in memory: a start whose image is in the store reads no record and waits for no thread.
//!
//! Invariant: an entry is used only while everything that a lookup would read is as it was before the lookup that made the entry: the
//! store's directories, the local source, and the image's data files. A change in the same instant as a lookup cannot be told from none, so
//! a lookup that finds something that young is not kept.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use thaw_sys::lock::Lock;

use crate::reference::ImageRef;
use crate::source::Platform;

use super::{Image, Store};

/// Most entries. One more empties the memory: it is filled again by lookups.
const MOST: usize = 1024;
/// Longer than the steps in which file systems count time.
const YOUNG: Duration = Duration::from_millis(50);
/// The store's directories whose entries a lookup reads.
const LOOKED_AT: [&str; 3] = ["refs", "images", "layers"];

/// The images in memory, by reference and platform. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Known(Arc<Mutex<HashMap<(String, String), Entry>>>);

#[derive(Clone, Debug)]
struct Entry {
    image: Image,
    before: Stamp,
    /// Of each blob's data.
    data: Vec<Option<FileStamp>>,
}

/// The state of what a lookup reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(Vec<Option<FileStamp>>);

/// Identifies a state of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    /// Nanoseconds. 0 for the data of an image, which is written while it is used.
    modified: i128,
    changed: i128,
}

impl FileStamp {
    fn of(path: &Path) -> Option<FileStamp> {
        let it = std::fs::metadata(path).ok()?;
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Some(FileStamp {
            device: it.dev(),
            inode: it.ino(),
            size: it.size(),
            modified: ns(it.mtime(), it.mtime_nsec()),
            changed: ns(it.ctime(), it.ctime_nsec()),
        })
    }

    fn of_data(path: &Path) -> Option<FileStamp> {
        FileStamp::of(path).map(|stamp| FileStamp {
            modified: 0,
            changed: 0,
            ..stamp
        })
    }

    fn is_old(&self, now: SystemTime) -> bool {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let limit = since.saturating_sub(YOUNG).as_nanos() as i128;
        self.modified < limit && self.changed < limit
    }
}

impl Store {
    /// The image that a lookup of this reference would find, if this process has looked and nothing has changed since.
    pub(crate) fn known(&self, reference: &ImageRef, platform: &Platform) -> Option<Image> {
        let key = key(reference, platform);
        let entry = self.known.0.locked().get(&key).cloned()?;
        let is_same = self.stamp(reference) == entry.before && data(&entry.image) == entry.data;
        if !is_same {
            self.known.0.locked().remove(&key);
        }
        is_same.then_some(entry.image)
    }

    /// The state of what a lookup of this reference reads; taken before the lookup.
    pub(crate) fn stamp(&self, reference: &ImageRef) -> Stamp {
        let directories = LOOKED_AT.iter().map(|name| FileStamp::of(&self.root.join(name)));
        let source = local_source(reference).map(|file| FileStamp::of(&file));
        Stamp(directories.chain(source).collect())
    }

    /// Keeps the result of a lookup.
    pub(crate) fn keep_known(&self, reference: &ImageRef, platform: &Platform, before: Stamp, image: &Image) {
        let now = SystemTime::now();
        if !before.0.iter().all(|stamp| stamp.is_some_and(|s| s.is_old(now))) {
            return;
        }
        let entry = Entry {
            data: data(image),
            image: image.clone(),
            before,
        };
        let mut known = self.known.0.locked();
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(key(reference, platform), entry);
    }
}

fn key(reference: &ImageRef, platform: &Platform) -> (String, String) {
    (reference.to_string(), format!("{platform:?}"))
}

/// The file that says what a local reference names.
fn local_source(reference: &ImageRef) -> Option<PathBuf> {
    match reference {
        ImageRef::Layout { directory, .. } => Some(directory.join("index.json")),
        ImageRef::Archive { file, .. } => Some(file.clone()),
        ImageRef::Registry(_) => None,
    }
}

fn data(image: &Image) -> Vec<Option<FileStamp>> {
    let blobs = image.blobs.iter();
    blobs.map(|blob| FileStamp::of_data(&blob.data)).collect()
}
