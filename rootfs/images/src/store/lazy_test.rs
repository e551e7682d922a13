//! Images that can be read in pieces, and giving space back.

use std::os::unix::fs::FileExt;

use serde_json::json;

use crate::convert::{self, Body, Input, Original};
use crate::fetch::FetchOptions;
use crate::fill::Filler;
use crate::form::Form;
use crate::index::soci;
use crate::layer::LayerLimits;
use crate::manifest::OCI_MANIFEST;
use crate::progress::Silent;
use crate::ranges::Priority;
use crate::registry::{Client, Config};
use crate::source::SourceOptions;

use super::*;

impl Bench {
    pub(super) fn filler(&self) -> Filler {
        let fetch = FetchOptions {
            source: SourceOptions::default(),
            client: Client::new(Config::default()).unwrap(),
        };
        Filler::new(self.store.clone(), fetch)
    }

    /// All bytes of an image's data files, after everything was filled.
    pub(super) async fn bytes(&self, image: &Image) -> Vec<Vec<u8>> {
        let filler = self.filler();
        for blob in &image.blobs {
            filler
                .fill(&blob.id, 0, u64::MAX, Priority::Demand)
                .await
                .unwrap();
            assert!(open_blob(blob).is_ready(0, blob.length));
        }
        assert_eq!(filler.stats().repairs.load(Ordering::Relaxed), 0);
        image
            .blobs
            .iter()
            .map(|blob| std::fs::read(&blob.data).unwrap())
            .collect()
    }

    pub(super) fn is_untouched(&self, image: &Image) -> bool {
        image
            .blobs
            .iter()
            .all(|blob| open_blob(blob).missing(0, blob.length).next() == Some(0..blob.length))
    }
}

/// An image bound to a SOCI index, in a layout. `change` may alter the annotation.
fn soci_image(bench: &Bench, layers: &[Layer], change: impl Fn(&mut Blobs, Digest)) -> (Blobs, Value) {
    let mut blobs = Blobs::default();
    let plain = blobs.image("amd64", layers);
    let mut ztocs = Vec::new();
    for layer in layers {
        let mut tar = Vec::new();
        std::io::Read::read_to_end(
            &mut flate2::read::MultiGzDecoder::new(&layer.stored[..]),
            &mut tar,
        )
        .unwrap();
        let toc = soci::scan(&tar[..], &LayerLimits::default()).unwrap();
        // The spans of a first unpacking equal those of a ztoc.
        let kept = bench.store.blob_files(&layer.diff_id).unwrap().kept.unwrap();
        let size = layer.stored.len() as u64;
        let ztoc = soci::write_ztoc(&toc, &kept.content.spans, 1 << 20, size, "test").unwrap();
        ztocs.push(soci::Ztoc {
            layer: Digest::of(&layer.stored),
            layer_media_type: TAR_GZIP.into(),
            digest: Digest::of(&ztoc),
            size: ztoc.len() as u64,
        });
        blobs.add(ztoc);
    }
    let index = blobs.add(soci::index_manifest(&ztocs, "test").unwrap());
    let mut manifest: Value = serde_json::from_slice(&blobs.0[&digest_of(&plain)]).unwrap();
    manifest["annotations"] = json!({"com.amazon.soci.index-digest": index.to_string()});
    let mut descriptor = blobs.descriptor(OCI_MANIFEST, manifest.to_string().into_bytes());
    descriptor["platform"] = plain["platform"].clone();
    change(&mut blobs, index);
    (blobs, descriptor)
}

fn two_layers() -> [Layer; 2] {
    [big_layer(1, TAR_GZIP), big_layer(2, TAR_GZIP)]
}

#[tokio::test]
async fn an_image_bound_to_a_soci_index_is_not_transferred() {
    let layers = two_layers();
    let whole = Bench::new();
    let mut plain = Blobs::default();
    let image = plain.image("amd64", &layers);
    let unpacked = whole.pull(&whole.layout(&plain, &[image])).await.unwrap();
    let expected = whole.bytes(&unpacked).await;

    let (blobs, image) = soci_image(&whole, &layers, |_, _| {});
    let bench = Bench::new();
    let log = Arc::new(Log::default());
    let reference = bench.layout(&blobs, &[image]);
    let pulled = bench.pull_logged(&reference, &log).await.unwrap();
    assert_eq!(
        (log.started(), log.count(|it| matches!(it, Event::Lazy { .. }))),
        (0, 2)
    );
    assert!(bench.is_untouched(&pulled));
    for blob in &pulled.blobs {
        assert!(layers.iter().all(|layer| layer.diff_id != blob.id));
    }
    // The metadata is the same, byte for byte, and so is the data.
    let metadata = |image: &Image| std::fs::read(&image.metadata).unwrap();
    assert!(metadata(&pulled) == metadata(&unpacked));
    assert!(bench.bytes(&pulled).await == expected);
    let inspection = bench.store.inspect(&pulled.digest).unwrap();
    assert!(
        inspection
            .layers
            .iter()
            .all(|layer| layer.form == Form::Soci && layer.ready_chunks == layer.chunks)
    );
    assert!(bench.store.verify(&pulled.digest).unwrap().is_sound());

    // A second pull requests nothing. After a full pull everything is in the store.
    bench.pull(&reference).await.unwrap();
    let full = Bench::new();
    let options = PullOptions {
        lazy: false,
        ..options()
    };
    let reference = full
        .layout(&blobs, &[soci_image(&whole, &layers, |_, _| {}).1])
        .parse()
        .unwrap();
    let platform = Platform::linux_amd64();
    let pulled = full
        .store
        .pull(&reference, &platform, &options, Arc::new(Silent))
        .await
        .unwrap();
    assert!(
        pulled
            .blobs
            .iter()
            .all(|blob| open_blob(blob).is_ready(0, blob.length))
    );
}

#[tokio::test]
async fn an_index_that_cannot_be_used_costs_a_warning() {
    let layers = two_layers();
    let whole = Bench::new();
    let mut plain = Blobs::default();
    let image = plain.image("amd64", &layers);
    whole.pull(&whole.layout(&plain, &[image])).await.unwrap();
    let missing: &dyn Fn(&mut Blobs, Digest) = &|blobs, index| drop(blobs.0.remove(&index));
    let exchanged: &dyn Fn(&mut Blobs, Digest) = &|blobs, index| {
        blobs.0.insert(index, b"{}".to_vec());
    };
    let torn: &dyn Fn(&mut Blobs, Digest) = &|blobs, index| {
        let manifest: Value = serde_json::from_slice(&blobs.0[&index]).unwrap();
        let ztoc = digest_of(&manifest["layers"][0]);
        let bytes = blobs.0.get_mut(&ztoc).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    };
    for (number, change) in [missing, exchanged, torn].into_iter().enumerate() {
        let (blobs, image) = soci_image(&whole, &layers, change);
        let bench = Bench::new();
        let log = Arc::new(Log::default());
        let before = unusable_indexes();
        let pulled = bench
            .pull_logged(&bench.layout(&blobs, &[image]), &log)
            .await
            .unwrap();
        assert!(log.started() >= 1, "case {number}");
        assert!(unusable_indexes() > before);
        bench.bytes(&pulled).await;
    }
}

#[tokio::test]
async fn a_converted_image_is_opened_and_filled() {
    let layers = two_layers();
    let whole = Bench::new();
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &layers);
    let unpacked = whole.pull(&whole.layout(&blobs, &[image])).await.unwrap();
    let config = std::fs::read(unpacked.metadata.with_file_name("config.json")).unwrap();
    let original = Original {
        image: unpacked.digest,
        subject: None,
        config,
    };
    let converted = convert::convert(
        Input::of_image(&unpacked, None).unwrap(),
        &original,
        &convert::Options::default(),
        &[],
        whole.directory.path(),
        &Silent,
    )
    .unwrap();
    let mut blobs = Blobs::default();
    for part in converted.parts {
        let mut bytes = Vec::new();
        match part.body {
            Body::Bytes(it) => bytes = it,
            Body::File(mut file) => drop(std::io::Read::read_to_end(&mut file, &mut bytes).unwrap()),
            Body::Dictionary(_) => unreachable!(),
        }
        assert_eq!(blobs.add(bytes), part.descriptor.digest);
    }
    let manifest = blobs.descriptor(OCI_MANIFEST, converted.manifest);
    let bench = Bench::new();
    let pulled = bench.pull(&bench.layout(&blobs, &[manifest])).await.unwrap();
    assert_eq!(pulled.digest, converted.digest);
    assert!(bench.is_untouched(&pulled));
    let data = bench.bytes(&pulled).await;
    // The upper layer has the file, too.
    let noise = fixture::noise(2, 400_000);
    assert!(
        data.iter()
            .any(|data| data.windows(64).any(|it| it == &noise[..64]))
    );
    // From now on data is compared with the learned digests.
    assert!(bench.store.verify(&pulled.digest).unwrap().is_sound());
    let file = std::fs::File::options()
        .write(true)
        .open(&pulled.blobs[0].data)
        .unwrap();
    file.write_all_at(b"evil", 5000).unwrap();
    let report = bench.store.verify(&pulled.digest).unwrap();
    assert_eq!((report.bad, report.cleared), (vec![(pulled.blobs[0].id, 0)], 1));
    assert!(bench.bytes(&pulled).await == data);

    bench.store.evict(&pulled.digest).unwrap();
    assert!(bench.is_untouched(&pulled));
    assert!(bench.bytes(&pulled).await == data);
}

#[tokio::test]
async fn space_is_given_back_but_never_what_is_in_use() {
    let bench = Bench::new();
    let mut blobs = Blobs::default();
    let shared = big_layer(1, TAR_GZIP);
    let one = blobs.image("amd64", &[shared.clone(), big_layer(2, TAR_GZIP)]);
    let two = blobs.image("amd64", &[shared.clone(), big_layer(3, TAR_GZIP)]);
    let one = bench.pull(&bench.layout(&blobs, &[one])).await.unwrap();
    let two = bench.pull(&bench.layout(&blobs, &[two])).await.unwrap();

    let usage = bench.store.usage().unwrap();
    let lines = &usage.images;
    assert_eq!(lines.len(), 2);
    assert!(
        lines
            .iter()
            .all(|line| line.shared > 400_000 && line.shared < line.stored && !line.leased)
    );
    assert!(usage.stored < lines[0].stored + lines[1].stored);
    assert!(usage.logical >= 3 * 400_000 && lines[0].logical < usage.logical);

    // The other image uses the shared layer.
    let lease = two.lease().unwrap();
    let held = open_blob(&two.blobs[0]);
    let pruned = bench.store.evict(&one.digest).unwrap();
    assert_eq!(pruned.layers, 1);
    assert!(pruned.bytes > 400_000);
    assert!(held.is_ready(0, held.len()) && !open_blob(&one.blobs[1]).is_ready(0, 1));
    assert_eq!(bench.store.evict(&two.digest).unwrap_err().code(), "in_use");
    assert_eq!(bench.store.collect_to(0).unwrap().images, 1);
    assert!(bench.store.image(&one.digest).unwrap().is_none());
    assert!(open_blob(&two.blobs[0]).is_ready(0, 1) && open_blob(&two.blobs[1]).is_ready(0, 1));
    drop(lease);

    // Emptied: processes that hold the old files keep them; the tree and the index stay.
    let pruned = bench.store.prune(true).unwrap();
    assert_eq!((pruned.images, pruned.layers), (0, 2));
    assert!(held.is_ready(0, held.len()) && bench.is_untouched(&two));
    let inspection = bench.store.inspect(&two.digest).unwrap();
    assert!(
        inspection
            .layers
            .iter()
            .all(|it| it.index_bytes.is_some() && it.disk == 0 && it.ready_chunks == 0)
    );
    bench.bytes(&two).await;
    assert_eq!(bench.store.prune(false).unwrap().images, 1);
    assert_eq!(bench.leftovers(), Vec::<String>::new());
    assert_eq!(bench.store.usage().unwrap().stored, 0);
}

#[tokio::test]
async fn the_quota_takes_what_was_used_longest_ago_first() {
    let bench = Bench::new();
    let mut blobs = Blobs::default();
    let mut images = Vec::new();
    for seed in 1..4 {
        let image = blobs.image("amd64", &[big_layer(seed, TAR_GZIP)]);
        images.push(bench.pull(&bench.layout(&blobs, &[image])).await.unwrap());
    }
    let hour = |hours: u64| std::time::SystemTime::now() - Duration::from_secs(3600 * hours);
    for (image, used) in images.iter().zip([2, 3, 1]) {
        let lease = std::fs::File::options()
            .write(true)
            .open(image.metadata.with_file_name("lease"));
        lease.unwrap().set_modified(hour(used)).unwrap();
    }
    let stored = bench.store.usage().unwrap().stored;
    assert_eq!(bench.store.collect_to(stored).unwrap(), Pruned::default());
    let pruned = bench.store.collect_to(stored - 300_000).unwrap();
    assert_eq!((pruned.images, pruned.layers), (0, 1));
    assert!(bench.is_untouched(&images[1]) && !bench.is_untouched(&images[0]));
    // A lease makes it the latest.
    drop(images[0].lease().unwrap());
    bench.store.collect_to(stored - 700_000).unwrap();
    assert!(bench.is_untouched(&images[2]) && !bench.is_untouched(&images[0]));
    // During a pull nothing is removed.
    let pulling = bench.store.lock_shared("store").unwrap();
    assert_eq!(bench.store.collect_to(0).unwrap(), Pruned::default());
    drop(pulling);
    assert_eq!(bench.store.collect_to(0).unwrap().images, 3);
}

#[tokio::test]
async fn layers_alone_and_images_of_them() {
    let bench = Bench::new();
    let mut blobs = Blobs::default();
    let layers = [big_layer(1, TAR_GZIP), big_layer(2, TAR_ZSTD), big_layer(3, TAR)];
    let image = blobs.image("amd64", &layers);
    let reference: ImageRef = bench.layout(&blobs, &[image]).parse().unwrap();
    let (platform, options) = (Platform::linux_amd64(), options());
    let mut stored = Vec::new();
    for layer in &layers[..2] {
        let which = WhichLayer::Stored(Digest::of(&layer.stored));
        let one = bench
            .store
            .ensure_layer(&reference, &platform, &which, &options, Arc::new(Silent));
        stored.push(one.await.unwrap());
    }
    assert_eq!(stored[1].diff_id, layers[1].diff_id);
    // The layer is not collected before it becomes part of an image.
    Store::open(bench.store.root()).unwrap();
    assert_eq!(bench.store.names("layers").unwrap().len(), 2);
    let which = WhichLayer::Diff(Digest::of(b"none"));
    let none = bench
        .store
        .ensure_layer(&reference, &platform, &which, &options, Arc::new(Silent))
        .await;
    assert_eq!(none.unwrap_err().code(), "not_found");

    let config = serde_json::from_slice(&Blobs::config("amd64", &layers[..2])).unwrap();
    let low = bench
        .store
        .assemble(&stored, &config, &reference, false)
        .await
        .unwrap();
    assert_eq!(low.blobs.len(), 2);
    let again = bench
        .store
        .assemble(&stored, &config, &reference, false)
        .await
        .unwrap();
    assert_eq!(again.digest, low.digest);
    assert!(bench.store.inspect(&low.digest).unwrap().pinned);
    let usage = bench.store.usage().unwrap();
    let line = usage.images.iter().find(|it| it.digest == low.digest).unwrap();
    assert!(line.pinned && line.layers == 2 && line.stored > 0);
    drop(stored);
    Store::open(bench.store.root()).unwrap();
    assert!(bench.store.image(&low.digest).unwrap().is_some());
    let key = low.blobs[0].id;
    assert_eq!(
        bench.store.stored_layer(&key).unwrap().unwrap().diff_id,
        layers[0].diff_id
    );
    // The owner removes an assembled image; only its data may be removed earlier.
    assert_eq!(bench.store.prune(false).unwrap().images, 0);
    assert!(bench.store.image(&low.digest).unwrap().is_some() && bench.is_untouched(&low));
    bench.store.remove(&low.digest).unwrap();
    assert_eq!(bench.leftovers(), Vec::<String>::new());
}

#[tokio::test]
async fn an_index_beside_the_image_is_warn_unusable() {
    // Documents that an image index lists besides images.
    let bench = Bench::new();
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &[Layer::new(TAR_GZIP, &fixture::tar(&[("a", b"b")]))]);
    let config = blobs.descriptor("application/vnd.amazon.soci.index.v2+json", b"{}".to_vec());
    let artifact = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": []});
    let artifact = blobs.descriptor(OCI_MANIFEST, artifact.to_string().into_bytes());
    let index = blobs.index(&[artifact.clone(), image.clone()]);
    let pulled = bench.pull(&bench.layout(&blobs, &[index])).await.unwrap();
    assert_eq!(pulled.digest, digest_of(&image));
    let alone = blobs.index(&[artifact]);
    let error = Bench::new();
    let error = error.pull(&error.layout(&blobs, &[alone])).await.unwrap_err();
    assert_eq!(error.code(), "unknown_media_type");
}
