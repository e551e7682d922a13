//! The load-order document: JSON, beside an image in the store, in a file of its own, or part of a converted image.
//!
//! ```json
//! {
//!   "version": 1,
//!   "image": "sha256:…",
//!   "blobs": [{"digest": "sha256:…", "layer": "sha256:…", "length": 10485760}],
//!   "runs": [[0, 131072, 262144], [0, 0, 4096]],
//!   "dropped": 0
//! }
//! ```
//!
//! `image` is the digest of the manifest whose run was recorded. Each run is `[blob, offset, length]`: the place of a blob in `blobs`, and
//! bytes of its data file (docs/blob-cache.md), in the order in which they were first read. `digest` is the store's name of the data file.
//! `layer` is the DiffID of the layer whose files it holds, if they belong to one layer: then a recording of one form of an image also
//! serves another form. `dropped` counts accesses that the recording lost.
//!
//! Invariant: a document is hostile until [`LoadOrder::from_json`] has accepted it: its size is bounded and every run lies in its blob.
//!
//! Bounds: a document has at most 16 MiB ([`MAX_DOCUMENT`]), 4096 blobs ([`MAX_BLOBS`]) and 1,048,576 runs ([`MAX_RUNS`]). A run has at
//! least one byte. Runs may repeat and overlap, but their lengths add up to less than 2^64 bytes.

use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;

use crate::error::Error;

/// The version this program writes, and the only one it reads.
const VERSION: u32 = 1;
/// Most bytes of a document.
pub const MAX_DOCUMENT: usize = 16 << 20;
/// Most runs and most blobs.
const MAX_RUNS: usize = 1 << 20;
const MAX_BLOBS: usize = 4096;

/// The data that was read, in the order of first reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadOrder {
    version: u32,
    /// The recorded image's manifest.
    pub image: Digest,
    pub blobs: Vec<OrderedBlob>,
    pub runs: Vec<Run>,
    /// Accesses that were lost.
    #[serde(default)]
    pub dropped: u64,
}

/// A data file that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrderedBlob {
    /// Its name in the store.
    pub digest: Digest,
    /// The DiffID of the layer whose file data it holds, if the data belongs to one layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<Digest>,
    /// Bytes of the data file.
    pub length: u64,
}

/// Consecutively read bytes of one data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u32, u64, u64)", into = "(u32, u64, u64)")]
pub struct Run {
    /// Index in [`LoadOrder::blobs`].
    pub blob: u32,
    /// First byte in the data file.
    pub offset: u64,
    /// Bytes, at least one.
    pub length: u64,
}

impl From<(u32, u64, u64)> for Run {
    fn from((blob, offset, length): (u32, u64, u64)) -> Self {
        Self { blob, offset, length }
    }
}

impl From<Run> for (u32, u64, u64) {
    fn from(run: Run) -> Self {
        (run.blob, run.offset, run.length)
    }
}

impl LoadOrder {
    /// Creates an order of these runs.
    ///
    /// # Errors
    /// `Malformed` if a run is empty or not in its blob, or if there are too many runs.
    pub fn new(image: Digest, blobs: Vec<OrderedBlob>, runs: Vec<Run>, dropped: u64) -> Result<Self, Error> {
        let order = Self {
            version: VERSION,
            image,
            blobs,
            runs,
            dropped,
        };
        order.check().map(|()| order)
    }

    /// Reads a document.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() > MAX_DOCUMENT {
            return Err(malformed(format!("it is larger than {MAX_DOCUMENT} bytes")));
        }
        let order: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        order.check().map(|()| order)
    }

    /// The document. The same order gives the same bytes.
    ///
    /// # Errors
    /// `Malformed`: never for an order that this module has checked.
    pub fn to_json(&self) -> Result<Vec<u8>, Error> {
        self.check()?;
        serde_json::to_vec(self).map_err(malformed)
    }

    /// Bytes of all runs.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.length).sum()
    }

    /// The blob a run is of.
    pub fn blob(&self, run: &Run) -> Option<&OrderedBlob> {
        self.blobs.get(run.blob as usize)
    }

    fn check(&self) -> Result<(), Error> {
        if self.version != VERSION {
            let problem = format!("it has version {}, this program reads {VERSION}", self.version);
            return Err(malformed(problem));
        }
        if self.blobs.len() > MAX_BLOBS || self.runs.len() > MAX_RUNS {
            return Err(malformed("it has too many blobs or runs"));
        }
        for (at, run) in self.runs.iter().enumerate() {
            let end = run.offset.checked_add(run.length);
            let fits = self
                .blob(run)
                .is_some_and(|blob| run.length > 0 && end.is_some_and(|end| end <= blob.length));
            if !fits {
                return Err(malformed(format!("run {at} is not in its blob")));
            }
        }
        // Runs may repeat, but their sum is limited.
        let total = self
            .runs
            .iter()
            .try_fold(0u64, |sum, run| sum.checked_add(run.length));
        total
            .map(drop)
            .ok_or_else(|| malformed("its runs add up to too much"))
    }
}

fn malformed(problem: impl ToString) -> Error {
    Error::malformed("the load order", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(runs: &[(u32, u64, u64)]) -> Result<LoadOrder, Error> {
        let blob = OrderedBlob {
            digest: Digest::of(b"data"),
            layer: None,
            length: 8192,
        };
        let runs = runs.iter().map(|run| Run::from(*run)).collect();
        LoadOrder::new(Digest::of(b"image"), vec![blob], runs, 3)
    }

    #[test]
    fn a_document_is_read_as_it_was_written() {
        let written = order(&[(0, 4096, 4096), (0, 0, 1)]).unwrap();
        let json = written.to_json().unwrap();
        assert!(String::from_utf8_lossy(&json).contains("\"runs\":[[0,4096,4096],[0,0,1]]"));
        assert_eq!(LoadOrder::from_json(&json).unwrap(), written);
        assert_eq!(written.bytes(), 4097);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for runs in [
            &[(1, 0, 1)][..],
            &[(0, 0, 0)],
            &[(0, 8192, 1)],
            &[(0, u64::MAX, 1)],
            &[(0, 1, u64::MAX)],
        ] {
            assert!(order(runs).is_err(), "{runs:?}");
        }
        let good = String::from_utf8(order(&[]).unwrap().to_json().unwrap()).unwrap();
        for bad in [
            good.replace("\"version\":1", "\"version\":2"),
            good.replace("\"runs\":[]", "\"runs\":[[0,0]]"),
            good.replace("\"dropped\":3", "\"more\":3"),
            good.replace("\"length\":8192", "\"length\":-1"),
            "[]".into(),
        ] {
            assert_ne!(bad, good);
            assert!(LoadOrder::from_json(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(LoadOrder::from_json(&vec![b' '; MAX_DOCUMENT + 1]).is_err());
    }
}
