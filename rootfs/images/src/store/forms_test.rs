//! Images of forms others make, from their pull to their last byte: eStargz and Nydus.

use serde_json::json;

use crate::form::Form;
use crate::index::estargz::tests::estargz;
use crate::index::testing::tar;
use crate::layer::testing::header;
use crate::manifest::{BOOTSTRAP_ANNOTATION, NYDUS_BLOB_TYPE};
use crate::manifest::{OCI_CONFIG, OCI_MANIFEST};
use crate::nydus::tests::{image as nydus_image, layer_of};
use crate::ranges::Priority;

use super::*;

impl Bench {
    /// Pulls an image of which no file data may be transferred.
    async fn pull_lazily(&self, blobs: &Blobs, image: &Value, form: Form) -> Image {
        let log = Arc::new(Log::default());
        let reference = self.layout(blobs, std::slice::from_ref(image));
        let pulled = self.pull_logged(&reference, &log).await.unwrap();
        let lazy = log.count(|it| matches!(it, Event::Lazy { form: had, .. } if *had == form));
        assert_eq!((log.started(), lazy), (0, pulled.blobs.len()));
        assert!(self.is_untouched(&pulled));
        pulled
    }

    /// Everything that is true of an image that is read in pieces, whatever its form; its data.
    async fn filled(&self, image: &Image) -> Vec<Vec<u8>> {
        let data = self.bytes(image).await;
        assert!(self.store.verify(&image.digest).unwrap().is_sound());
        self.store.evict(&image.digest).unwrap();
        assert!(self.is_untouched(image));
        assert!(self.bytes(image).await == data);
        data
    }

    /// Damages a blob at its source: no byte of it may be served.
    async fn refused(&self, image: &Image, stored: &[u8], at: usize) {
        self.store.evict(&image.digest).unwrap();
        let mut damaged = stored.to_vec();
        damaged[at] ^= 1;
        let place = self.path("layout/blobs/sha256").join(Digest::of(stored).hex());
        std::fs::write(&place, damaged).unwrap();
        let (filler, blob) = (self.filler(), &image.blobs[0]);
        let filled = filler.fill(&blob.id, 0, u64::MAX, Priority::Demand).await;
        assert!(filled.is_err());
        assert!(!open_blob(blob).is_ready(0, blob.length));
        // With the right bytes restored, reads continue.
        std::fs::write(&place, stored).unwrap();
        self.bytes(image).await;
    }
}

#[tokio::test]
async fn an_estargz_layer_is_read_by_its_own_table() {
    let noise = [fixture::noise(1, 300_000), fixture::noise(2, 5000)];
    let parts: Vec<_> = ["etc/large", "small"]
        .iter()
        .zip(&noise)
        .map(|(name, bytes)| (header(name, b'0', bytes.len() as u64, "").to_vec(), bytes.clone()))
        .collect();
    let plain = Layer::new(TAR_GZIP, &tar(&parts));
    let whole = Bench::new();
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &[plain]);
    let unpacked = whole.pull(&whole.layout(&blobs, &[image])).await.unwrap();
    let expected = whole.bytes(&unpacked).await;

    let made = estargz(&parts, 64 << 10);
    let mut uncompressed = Vec::new();
    let mut decoder = flate2::read::MultiGzDecoder::new(&made.stored[..]);
    std::io::Read::read_to_end(&mut decoder, &mut uncompressed).unwrap();
    let layer = Layer {
        media_type: TAR_GZIP.into(),
        stored: made.stored.clone(),
        diff_id: Digest::of(&uncompressed),
    };
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &[layer]);
    let mut manifest: Value = serde_json::from_slice(&blobs.0[&digest_of(&image)]).unwrap();
    let table = Digest::of(&made.toc).to_string();
    manifest["layers"][0]["annotations"] = json!({"containerd.io/snapshot/stargz/toc.digest": table});
    let image = blobs.descriptor(OCI_MANIFEST, manifest.to_string().into_bytes());

    let bench = Bench::new();
    let pulled = bench.pull_lazily(&blobs, &image, Form::Estargz).await;
    // Its table is not one of its files: metadata and data equal those of the layer without a table.
    let metadata = |image: &Image| std::fs::read(&image.metadata).unwrap();
    assert!(metadata(&pulled) == metadata(&unpacked));
    assert!(bench.filled(&pulled).await == expected);
    bench.refused(&pulled, &made.stored, 100_000).await;
}

#[tokio::test]
async fn a_nydus_image_is_opened_and_filled() {
    let (bootstrap, stored, content) = nydus_image();
    let mut blobs = Blobs::default();
    let config = blobs.descriptor(OCI_CONFIG, Blobs::config("amd64", &[]));
    let data = blobs.descriptor(NYDUS_BLOB_TYPE, stored.clone());
    let packed = fixture::gzip(&layer_of("image/image.boot", &bootstrap));
    let mut boot = blobs.descriptor(TAR_GZIP, packed);
    boot["annotations"] = json!({BOOTSTRAP_ANNOTATION: "true"});
    let manifest =
        json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": [data, boot]});
    let image = blobs.descriptor(OCI_MANIFEST, manifest.to_string().into_bytes());

    let bench = Bench::new();
    let pulled = bench.pull_lazily(&blobs, &image, Form::Nydus).await;
    let data = bench.filled(&pulled).await;
    // The second of the file's two chunks comes first in the blob; the data file has both at the places in the bootstrap.
    assert!(
        content
            .chunks(4096)
            .all(|chunk| data[0].windows(chunk.len()).any(|it| it == chunk))
    );
    bench.refused(&pulled, &stored, stored.len() - 20).await;
}
