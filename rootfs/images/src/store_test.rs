#[path = "store/disk_test.rs"]
mod disk;
#[path = "store/forms_test.rs"]
mod forms;
#[path = "store/known_test.rs"]
mod known;
#[path = "store/lazy_test.rs"]
mod lazy;
#[path = "store/local_test.rs"]
mod local;
#[path = "store/mirrors_test.rs"]
mod mirrors;
#[path = "store/registry_test.rs"]
mod registry;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use thaw_imagefs::blob::BlobFile;

use crate::formats::unusable_indexes;
use crate::progress::{Event, Progress};
use crate::pull::{PullOptions, PullPolicy, WhichLayer};
use crate::source::fixture::{self, Blobs, Layer, TAR, TAR_GZIP, TAR_ZSTD};
use crate::source::{Credentials, Platform, Retry};

use super::*;

impl Image {
    /// A layer of which only the directory exists.
    pub(crate) fn bare(directory: &Path) -> Self {
        Self {
            digest: Digest::of(b"image"),
            reference: "oci:/x".into(),
            config: serde_json::from_slice(&Blobs::config("amd64", &[])).unwrap(),
            metadata: directory.join(record::METADATA),
            blobs: Vec::new(),
            directory: directory.into(),
            leases: lease::Leases::default(),
        }
    }
}

/// Records its events.
#[derive(Default)]
struct Log(Mutex<Vec<Event>>);

impl Progress for Log {
    fn event(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Log {
    fn count(&self, wanted: impl Fn(&Event) -> bool) -> usize {
        self.0
            .lock()
            .unwrap()
            .iter()
            .filter(|event| wanted(event))
            .count()
    }

    fn started(&self) -> usize {
        self.count(|event| matches!(event, Event::Started { .. }))
    }

    fn cached(&self) -> usize {
        self.count(|event| matches!(event, Event::Cached { .. }))
    }
}

/// A store, and a directory for images.
struct Bench {
    directory: tempfile::TempDir,
    store: Store,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        Self { directory, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a layout and returns its reference.
    fn layout(&self, blobs: &Blobs, descriptors: &[Value]) -> String {
        blobs.write_layout(&self.path("layout"), descriptors);
        format!("oci:{}", self.path("layout").display())
    }

    async fn pull(&self, reference: &str) -> Result<Image, Error> {
        self.pull_logged(reference, &Arc::new(Log::default())).await
    }

    async fn pull_logged(&self, reference: &str, log: &Arc<Log>) -> Result<Image, Error> {
        let reference = reference.parse()?;
        self.store
            .pull(&reference, &Platform::linux_amd64(), &options(), log.clone())
            .await
    }

    async fn pull_with(&self, reference: &str, options: &PullOptions) -> Result<Image, Error> {
        let reference = reference.parse()?;
        self.store
            .pull(
                &reference,
                &Platform::linux_amd64(),
                options,
                Arc::new(Log::default()),
            )
            .await
    }

    /// Names of all existing layers, images and references, complete or not.
    fn leftovers(&self) -> Vec<String> {
        ["layers", "images", "refs"]
            .iter()
            .flat_map(|kind| self.store.entries(kind).unwrap())
            .collect()
    }
}

fn options() -> PullOptions {
    PullOptions {
        credentials: Credentials::Anonymous,
        retry: Retry {
            attempts: 3,
            first: Duration::from_millis(5),
            longest: Duration::from_secs(2),
        },
        ..PullOptions::default()
    }
}

fn digest_of(descriptor: &Value) -> Digest {
    descriptor["digest"].as_str().unwrap().parse().unwrap()
}

fn big_layer(seed: u64, media_type: &str) -> Layer {
    Layer::new(
        media_type,
        &fixture::tar(&[("etc/file", &fixture::noise(seed, 400_000)), ("small", b"hello")]),
    )
}

/// The cache file of an image's blob as a VMM opens it.
fn open_blob(blob: &ImageBlob) -> BlobFile {
    let open = |path: &Path| std::fs::File::open(path).unwrap();
    BlobFile::open(open(&blob.data), open(&blob.ready)).unwrap()
}
