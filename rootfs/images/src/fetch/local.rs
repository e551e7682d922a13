//! Reading ranges from a layout directory or an archive.
//!
//! Invariant: a blob is read in place. If it is too short or its bytes are wrong, the error names the file.

use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use thaw_imagefs::digest::Digest;
use thaw_sys::lock::Lock;

use crate::error::Error;
use crate::ranges::{Check, Priority, Ranges, StoredBlob, checked_range, run_check};
use crate::registry::stats::{Count, EndpointStats};
use crate::source::archive::Archive;
use crate::source::layout::Layout;
use crate::source::section::Section;

/// Number of files that are kept open.
const MAX_OPEN: usize = 64;

/// The place that has the blobs.
pub enum Local {
    Layout {
        layout: Arc<Layout>,
        open: Arc<Mutex<HashMap<Digest, Section>>>,
    },
    /// All members that hold layers, by their digests and DiffIDs.
    Archive {
        path: PathBuf,
        members: HashMap<Digest, Section>,
    },
}

pub struct LocalRanges {
    local: Local,
    stats: Arc<EndpointStats>,
}

impl LocalRanges {
    pub fn layout(layout: Layout, stats: Arc<EndpointStats>) -> Self {
        let local = Local::Layout {
            layout: Arc::new(layout),
            open: Arc::default(),
        };
        Self { local, stats }
    }

    pub fn archive(archive: &Archive, stats: Arc<EndpointStats>) -> Result<Self, Error> {
        let local = Local::Archive {
            path: archive.path().to_owned(),
            members: archive.sections()?,
        };
        Ok(Self { local, stats })
    }

    /// The blob's place. May block.
    fn opener(&self, digest: Digest) -> impl FnOnce() -> Result<(Section, PathBuf), Error> + Send + 'static {
        let (found, layout) = match &self.local {
            Local::Archive { path, members } => {
                let found = members.get(&digest).cloned().ok_or_else(|| Error::NotFound {
                    what: format!("blob {digest}"),
                    place: path.display().to_string(),
                    advice: "the archive is not the one the image came from: save the image again".into(),
                });
                (Some(found.map(|section| (section, path.clone()))), None)
            }
            Local::Layout { layout, open } => (None, Some((layout.clone(), open.clone()))),
        };
        move || {
            if let Some(found) = found {
                return found;
            }
            let Some((layout, open)) = layout else {
                return Err(Error::Cancelled);
            };
            let path = layout.blob(&digest);
            let with = |section: Section| (section, path.clone());
            if let Some(section) = open.locked().get(&digest) {
                return Ok(with(section.clone()));
            }
            let section = layout.section(&digest)?;
            let mut open = open.locked();
            if open.len() >= MAX_OPEN {
                open.clear();
            }
            open.insert(digest, section.clone());
            Ok(with(section))
        }
    }
}

#[async_trait]
impl Ranges for LocalRanges {
    async fn read(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        check: Check,
    ) -> Result<Bytes, Error> {
        let length = checked_range(blob, &range)?;
        let opener = self.opener(blob.digest);
        let (digest, size, start) = (blob.digest, blob.size, range.start);
        let read = move || {
            let (section, path) = opener()?;
            let stored = section.end - section.at;
            if stored < size {
                return Err(Error::TruncatedLayer {
                    what: format!("blob {digest} in {}", path.display()),
                    expected: size,
                    got: stored,
                });
            }
            let mut bytes = vec![0; length as usize];
            let read = section.file.read_exact_at(&mut bytes, section.at + start);
            read.map_err(|error| Error::io(&path, error))?;
            Ok((Bytes::from(bytes), path))
        };
        let read = tokio::task::spawn_blocking(read).await;
        let (bytes, path) = read.map_err(|_| Error::Cancelled)??;
        self.stats.bytes(priority, length);
        run_check(&check, bytes).await?.map_err(|problem| {
            self.stats.count(Count::Wrong);
            let what = format!(
                "bytes {start}-{} of blob {digest} in {}",
                range.end - 1,
                path.display()
            );
            Error::malformed(what, problem)
        })
    }
}
