//! Fills from indexes write only right bytes, once, whatever fails meanwhile.

#[path = "faults_test.rs"]
mod faults;
#[path = "property_test.rs"]
mod property;
#[path = "sharing_test.rs"]
mod sharing;

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use flate2::write::GzEncoder;
use thaw_imagefs::blob::{BlobFile, CHUNK_SIZE};

use crate::pull::PullOptions;
use crate::ranges::{Check, Ranges, StoredBlob};
use crate::registry::{Client, Config};
use crate::source::fixture::{self, Blobs, Layer, TAR_GZIP};
use crate::source::{Platform, SourceOptions};
use crate::store::{Image, ImageBlob};

use super::*;
use thaw_sys::lock::Lock;

/// A store, an image in a layout, and the contents of its blobs.
struct Bench {
    directory: tempfile::TempDir,
    store: Store,
    image: Image,
    whole: Vec<Vec<u8>>,
}

/// A layer of some files: one large, many small, one of zeros.
fn layer(seed: u64, media_type: &str, length: usize) -> Layer {
    let large = fixture::noise(seed, length);
    let small: Vec<(String, Vec<u8>)> = (0..60)
        .map(|at| {
            (
                format!("small/{at}"),
                fixture::noise(seed + at, 700 * at as usize),
            )
        })
        .collect();
    let zeros = vec![0; 300_000];
    let mut files: Vec<(&str, &[u8])> = vec![("large", &large), ("zeros", &zeros)];
    files.extend(small.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])));
    let tar = fixture::tar(&files);
    let mut layer = Layer::new(media_type, &tar);
    if media_type == TAR_GZIP {
        // The fastest level may write a single deflate block, at which decompression cannot start in the middle.
        let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::new(6));
        encoder.write_all(&tar).unwrap();
        layer.stored = encoder.finish().unwrap();
    }
    layer
}

fn options() -> PullOptions {
    PullOptions::default()
}

fn fetch_options() -> FetchOptions {
    FetchOptions {
        source: SourceOptions::default(),
        client: Client::new(Config::default()).unwrap(),
    }
}

fn open(blob: &ImageBlob) -> BlobFile {
    let open = |path: &Path| std::fs::File::open(path).unwrap();
    BlobFile::open(open(&blob.data), open(&blob.ready)).unwrap()
}

impl Bench {
    /// Pulls an image of these layers completely and empties it, so that everything has to be filled and the content is known.
    async fn new(layers: &[Layer]) -> Self {
        let bench = Self::full(layers).await;
        bench.store.evict(&bench.image.digest).unwrap();
        for blob in &bench.image.blobs {
            assert_eq!(open(blob).missing(0, blob.length).next(), Some(0..blob.length));
        }
        bench
    }

    async fn full(layers: &[Layer]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        let mut blobs = Blobs::default();
        let image = blobs.image("amd64", layers);
        let layout = directory.path().join("layout");
        blobs.write_layout(&layout, &[image]);
        let reference = format!("oci:{}", layout.display()).parse().unwrap();
        let image = store
            .pull(&reference, &Platform::linux_amd64(), &options(), Arc::new(Silent))
            .await
            .unwrap();
        let whole = image.blobs.iter().map(|blob| std::fs::read(&blob.data).unwrap());
        Self {
            whole: whole.collect(),
            directory,
            store,
            image,
        }
    }

    async fn one() -> Self {
        Self::new(&[layer(1, TAR_GZIP, 3 << 20)]).await
    }

    fn blob(&self) -> &ImageBlob {
        &self.image.blobs[0]
    }

    fn filler(&self) -> Filler {
        Filler::new(self.store.clone(), fetch_options())
    }

    /// Fills the first blob.
    async fn fill_all(&self, filler: &Filler) {
        filler
            .fill(&self.blob().id, 0, u64::MAX, Priority::Demand)
            .await
            .unwrap();
    }

    /// Without a usable index, a fill unpacks the layer again.
    async fn assert_filled_by_repair(&self) {
        let filler = self.filler();
        filler
            .fill(&self.blob().id, 0, 4096, Priority::Demand)
            .await
            .unwrap();
        assert_eq!(seen(&filler.stats().repairs), 1);
        self.check();
    }

    fn assert_has_image_when_reopened(&self) {
        let found = self.store.reopened().image(&self.image.digest).unwrap();
        assert!(found.is_some());
    }

    /// The stored form of a layer, in the layout.
    fn stored(&self, layer: &Layer) -> PathBuf {
        let hex = Digest::of(&layer.stored).hex();
        self.directory.path().join("layout/blobs/sha256").join(hex)
    }

    /// Checks the content of every ready chunk of every blob. Returns the number of ready chunks.
    fn check(&self) -> u64 {
        let mut ready = 0;
        for (blob, whole) in self.image.blobs.iter().zip(&self.whole) {
            let file = open(blob);
            let mut buffer = vec![0; CHUNK_SIZE as usize];
            for start in (0..blob.length).step_by(CHUNK_SIZE as usize) {
                let end = (start + CHUNK_SIZE).min(blob.length);
                if file.is_ready(start, end - start) {
                    let buffer = &mut buffer[..(end - start) as usize];
                    file.data().read_exact_at(buffer, start).unwrap();
                    assert!(*buffer == whole[start as usize..end as usize], "at {start}");
                    ready += 1;
                }
            }
        }
        ready
    }
}

/// How often something happened.
fn seen(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// A source that answers when the test permits it, and may lie first.
struct Scripted {
    stored: Vec<u8>,
    /// A read takes one.
    permits: Semaphore,
    reads: Mutex<Vec<(Range<u64>, Priority)>>,
    /// Wrong answers before the next right one.
    lies: AtomicU64,
    /// Failing reads before the next successful one.
    failures: AtomicU64,
}

/// Decrements the counter if it is above zero.
fn take(counter: &AtomicU64) -> bool {
    counter
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| it.checked_sub(1))
        .is_ok()
}

impl Scripted {
    fn of(layer: &Layer, permits: usize) -> Arc<Self> {
        Arc::new(Self {
            stored: layer.stored.clone(),
            permits: Semaphore::new(permits),
            reads: Mutex::default(),
            lies: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// Makes a filler read from here instead of the image's layout.
    fn serve(self: &Arc<Self>, bench: &Bench, filler: &Filler) {
        let reader: Arc<dyn Ranges> = self.clone();
        let cell = Arc::new(tokio::sync::OnceCell::new_with(Some(reader)));
        filler
            .inner
            .origins
            .readers
            .locked()
            .insert((bench.image.reference.clone(), false), cell);
    }

    fn reads(&self, priority: Priority) -> usize {
        self.reads
            .locked()
            .iter()
            .filter(|(_, it)| *it == priority)
            .count()
    }
}

#[async_trait]
impl Ranges for Scripted {
    async fn read(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        check: Check,
    ) -> Result<Bytes, Error> {
        self.reads.locked().push((range.clone(), priority));
        self.permits.acquire().await.unwrap().forget();
        if take(&self.failures) {
            return Err(Error::malformed(format!("blob {}", blob.digest), "scripted"));
        }
        let bytes = Bytes::copy_from_slice(&self.stored[range.start as usize..range.end as usize]);
        while take(&self.lies) {
            let mut wrong = bytes.to_vec();
            let middle = wrong.len() / 2;
            wrong[middle] ^= 0x40;
            let check = check.clone();
            let refused = tokio::task::spawn_blocking(move || check(&wrong)).await.unwrap();
            refused.unwrap_err();
        }
        let checked = bytes.clone();
        tokio::task::spawn_blocking(move || check(&checked))
            .await
            .unwrap()
            .map_err(|problem| Error::malformed(format!("blob {}", blob.digest), problem))?;
        Ok(bytes)
    }
}

#[tokio::test]
async fn an_emptied_layer_is_read_in_pieces_as_it_is_wanted() {
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob());
    // One page: the span that contains it, and everything that the span yields.
    filler
        .fill(&blob.id, 1 << 20, 4096, Priority::Demand)
        .await
        .unwrap();
    assert!(open(blob).is_ready(1 << 20, 4096));
    let some = bench.check();
    assert!((1..blob.length / CHUNK_SIZE).contains(&some), "{some}");
    let (reads, bytes) = (seen(&filler.stats().reads), seen(&filler.stats().stored_bytes));
    assert!(
        reads == 1 && bytes < blob.length / 2,
        "{reads} reads, {bytes} bytes"
    );

    // The same again costs nothing.
    filler
        .fill(&blob.id, 1 << 20, 4096, Priority::Demand)
        .await
        .unwrap();
    assert_eq!((seen(&filler.stats().reads), seen(&filler.stats().ready)), (1, 1));

    // All of it; a range beyond the end is cut.
    filler
        .fill(&blob.id, 0, u64::MAX, Priority::Demand)
        .await
        .unwrap();
    assert_eq!(bench.check(), blob.length.div_ceil(CHUNK_SIZE));
    assert!(open(blob).is_ready(0, blob.length));
    assert_eq!(seen(&filler.stats().repairs), 0);
    filler
        .fill(&blob.id, u64::MAX, 1, Priority::Demand)
        .await
        .unwrap();
    filler
        .fill(&blob.id, blob.length, 1, Priority::Demand)
        .await
        .unwrap();

    let unknown = filler.fill(&Digest::of(b"?"), 0, 1, Priority::Demand).await;
    assert_eq!(unknown.unwrap_err().code(), "not_found");
}

#[tokio::test]
async fn chunks_in_order_read_every_span_once() {
    let bench = Bench::one().await;
    let layer = layer(1, TAR_GZIP, 3 << 20);
    let (filler, blob) = (bench.filler(), bench.blob());
    let scripted = Scripted::of(&layer, 1000);
    scripted.serve(&bench, &filler);
    for start in (0..blob.length).step_by(4096) {
        filler
            .fill(&blob.id, start, 4096, Priority::Demand)
            .await
            .unwrap();
    }
    bench.check();
    assert!(open(blob).is_ready(0, blob.length));
    let spans = seen(&filler.stats().spans);
    let files = bench.store.blob_files(&blob.id).unwrap();
    let all = files.kept.unwrap().content.spans.spans().len() as u64;
    assert!(spans <= all && seen(&filler.stats().kept) > 0, "{spans} of {all}");
}

#[tokio::test]
async fn zeros_stay_holes() {
    use std::os::unix::fs::MetadataExt;
    let zeros = vec![0; 4 << 20];
    let tar = fixture::tar(&[("zeros", &zeros), ("some", b"thing")]);
    let bench = Bench::new(&[Layer::new(TAR_GZIP, &tar)]).await;
    let (filler, blob) = (bench.filler(), bench.blob());
    filler
        .fill(&blob.id, 0, u64::MAX, Priority::Demand)
        .await
        .unwrap();
    assert!(open(blob).is_ready(0, blob.length));
    bench.check();
    assert!(std::fs::metadata(&blob.data).unwrap().blocks() * 512 <= 2 * CHUNK_SIZE);
}
