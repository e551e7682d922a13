//! Pulls from directories and archives, and what the store keeps and removes.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::*;

fn three_layers() -> (Blobs, Value, [Layer; 3]) {
    let mut blobs = Blobs::default();
    let layers = [big_layer(1, TAR_GZIP), big_layer(2, TAR_ZSTD), big_layer(3, TAR)];
    let image = blobs.image("amd64", &layers);
    (blobs, image, layers)
}

#[tokio::test]
async fn a_layout_is_pulled_once() {
    let bench = Bench::new();
    let (blobs, image, layers) = three_layers();
    let reference = bench.layout(&blobs, std::slice::from_ref(&image));
    let log = Arc::new(Log::default());
    let pulled = bench.pull_logged(&reference, &log).await.unwrap();
    assert_eq!(pulled.digest, digest_of(&image));
    assert_eq!((log.started(), log.cached()), (3, 0));
    assert_eq!(pulled.blobs.len(), 3);
    for (number, blob) in pulled.blobs.iter().enumerate() {
        assert_eq!(blob.id, layers[number].diff_id);
        let file = open_blob(blob);
        assert!(file.is_ready(0, blob.length) && file.len() == blob.length);
        let mut bytes = vec![0; blob.length as usize];
        file.data().read_exact_at(&mut bytes, 0).unwrap();
        assert!(
            bytes
                .windows(100)
                .any(|it| it == &fixture::noise(number as u64 + 1, 400_000)[..100])
        );
    }
    assert!(pulled.metadata.metadata().unwrap().len() > 0);
    assert_eq!(
        pulled.config.config().as_ref().unwrap().env().clone().unwrap(),
        ["A=b"]
    );

    let log = Arc::new(Log::default());
    let again = bench.pull_logged(&reference, &log).await.unwrap();
    assert_eq!((again.digest, again.blobs), (pulled.digest, pulled.blobs));
    assert_eq!((log.started(), log.cached()), (0, 3));
    assert_eq!(bench.store.images().unwrap().len(), 1);
    assert_eq!(bench.leftovers().len(), 5);
}

#[tokio::test]
async fn a_changed_layout_is_seen_and_shared_layers_are_unpacked_once() {
    let bench = Bench::new();
    let (mut blobs, first, layers) = three_layers();
    let reference = bench.layout(&blobs, std::slice::from_ref(&first));
    bench.pull(&reference).await.unwrap();
    let second = blobs.image(
        "amd64",
        &[layers[0].clone(), big_layer(4, TAR_GZIP), layers[0].clone()],
    );
    bench.layout(&blobs, std::slice::from_ref(&second));
    let log = Arc::new(Log::default());
    let pulled = bench.pull_logged(&reference, &log).await.unwrap();
    assert_eq!(pulled.digest, digest_of(&second));
    assert_eq!((log.started(), log.cached()), (1, 1));
    assert_eq!(pulled.blobs.len(), 3);

    // Removing the second image removes only the layers that it does not share.
    bench.store.remove(&pulled.digest).unwrap();
    assert_eq!(bench.store.names("layers").unwrap().len(), 3);
    assert!(bench.store.image(&digest_of(&first)).unwrap().is_some());
    assert!(bench.store.find(&reference.parse().unwrap()).unwrap().is_none());
    bench.store.remove(&digest_of(&first)).unwrap();
    assert_eq!(bench.leftovers(), Vec::<String>::new());
    assert_eq!(bench.store.entries("locks").unwrap(), ["store"]);
    assert_eq!(
        bench.store.remove(&pulled.digest).unwrap_err().code(),
        "not_found"
    );
}

#[tokio::test]
async fn bad_layers_are_told_apart_and_leave_nothing() {
    let good = big_layer(1, TAR_GZIP);
    let flipped = |blobs: &mut Blobs, layer: &Layer| {
        let stored = blobs.0.get_mut(&Digest::of(&layer.stored)).unwrap();
        let middle = stored.len() / 2;
        stored[middle] ^= 0x55;
    };
    let cut = |blobs: &mut Blobs, layer: &Layer| {
        let stored = blobs.0.get_mut(&Digest::of(&layer.stored)).unwrap();
        stored.truncate(stored.len() * 2 / 3);
    };
    let longer = |blobs: &mut Blobs, layer: &Layer| {
        blobs.0.get_mut(&Digest::of(&layer.stored)).unwrap().push(0);
    };
    let nothing = |_: &mut Blobs, _: &Layer| {};
    type Damage = dyn Fn(&mut Blobs, &Layer);
    let tar_cut = {
        let tar = fixture::tar(&[("etc/file", &fixture::noise(1, 50_000))]);
        Layer::new(TAR_GZIP, &tar[..tar.len() - 20_000])
    };
    let other_tar = Layer {
        diff_id: Digest::of(b"other"),
        ..good.clone()
    };
    let unsafe_path = Layer::new(TAR_GZIP, &fixture::tar(&[("../../etc/cron.d/evil", b"*")]));
    let gzip_cut = Layer {
        stored: good.stored[..good.stored.len() / 2].to_vec(),
        ..good.clone()
    };
    let not_tar = Layer::new(TAR, &fixture::noise(9, 4096));
    let cases: [(&str, &Layer, &Damage); 9] = [
        ("digest_mismatch", &good, &flipped),
        ("truncated_layer", &good, &cut),
        ("malformed", &good, &longer),
        ("truncated_layer", &tar_cut, &nothing),
        ("digest_mismatch", &other_tar, &nothing),
        ("unsafe_path", &unsafe_path, &nothing),
        ("truncated_layer", &gzip_cut, &nothing),
        ("malformed", &not_tar, &nothing),
        ("not_found", &good, &|blobs, layer| {
            drop(blobs.0.remove(&Digest::of(&layer.stored)))
        }),
    ];
    for (number, (code, layer, damage)) in cases.into_iter().enumerate() {
        let bench = Bench::new();
        let mut blobs = Blobs::default();
        let image = blobs.image(
            "amd64",
            &[big_layer(7, TAR), layer.clone(), big_layer(8, TAR_ZSTD)],
        );
        damage(&mut blobs, layer);
        let reference = bench.layout(&blobs, &[image]);
        let error = bench.pull(&reference).await.unwrap_err();
        assert_eq!(error.code(), code, "case {number}: {error}");
        assert_eq!(bench.leftovers(), Vec::<String>::new(), "case {number}");
        assert!(!error.to_string().contains('\n'));
    }
}

#[tokio::test]
async fn what_killed_processes_leave_is_removed_at_the_next_open() {
    let bench = Bench::new();
    let (blobs, image, _) = three_layers();
    let pulled = bench.pull(&bench.layout(&blobs, &[image])).await.unwrap();
    let before = bench.leftovers();
    let root = bench.store.root().to_owned();
    let hex = Digest::of(b"x").hex();
    for directory in [
        format!("layers/{hex}.partial"),
        format!("layers/{hex}"),
        format!("images/{hex}.partial"),
        format!("images/{hex}.removed"),
        format!("images/{hex}"),
    ] {
        std::fs::create_dir(root.join(&directory)).unwrap();
        std::fs::write(root.join(&directory).join("data"), "x").unwrap();
    }
    std::fs::write(root.join("refs").join(&hex), "{}").unwrap();
    std::fs::write(root.join(format!("locks/layer-{hex}")), "").unwrap();

    // During a pull nothing is touched.
    let pulling = bench.store.lock_shared("store").unwrap();
    Store::open(&root).unwrap();
    assert_eq!(bench.leftovers().len(), before.len() + 6);
    drop(pulling);
    Store::open(&root).unwrap();
    assert_eq!(bench.leftovers(), before);
    assert!(!root.join(format!("locks/layer-{hex}")).exists());
    assert!(bench.store.image(&pulled.digest).unwrap().is_some());
}

#[tokio::test]
async fn a_leased_image_stays() {
    let bench = Bench::new();
    let (blobs, image, _) = three_layers();
    let pulled = bench.pull(&bench.layout(&blobs, &[image])).await.unwrap();
    let (one, two) = (pulled.lease().unwrap(), pulled.lease().unwrap());
    // A duplicate descriptor, like a VMM's, keeps the lease by itself.
    let duplicate = one.descriptor().try_clone_to_owned().unwrap();
    drop((one, two));
    assert_eq!(bench.store.remove(&pulled.digest).unwrap_err().code(), "in_use");
    drop(duplicate);
    bench.store.remove(&pulled.digest).unwrap();
    assert_eq!(pulled.lease().unwrap_err().code(), "not_found");
}

#[tokio::test]
async fn leases_of_an_image_share_one_descriptor() {
    let bench = Bench::new();
    let (blobs, image, _) = three_layers();
    let pulled = bench.pull(&bench.layout(&blobs, &[image])).await.unwrap();
    let again = bench.store.image(&pulled.digest).unwrap().unwrap();
    let (one, two) = (pulled.lease().unwrap(), again.lease().unwrap());
    assert_eq!(one.descriptor().as_raw_fd(), two.descriptor().as_raw_fd());
    drop(one);
    assert_eq!(bench.store.remove(&pulled.digest).unwrap_err().code(), "in_use");
    drop(two);
    let third = again.lease().unwrap();
    assert_eq!(bench.store.remove(&pulled.digest).unwrap_err().code(), "in_use");
    drop(third);
    bench.store.remove(&pulled.digest).unwrap();
}

#[tokio::test]
async fn lease_of_an_image_that_was_made_again_is_a_new_one() {
    let bench = Bench::new();
    let (blobs, image, _) = three_layers();
    let reference = bench.layout(&blobs, &[image]);
    let pulled = bench.pull(&reference).await.unwrap();
    let old = pulled.lease().unwrap();
    // As if the image had been found damaged, which no lease prevents.
    std::fs::remove_dir_all(&pulled.directory).unwrap();
    assert_eq!(pulled.lease().unwrap_err().code(), "not_found");
    let again = bench.pull(&reference).await.unwrap();
    let new = again.lease().unwrap();
    drop(old);
    assert_eq!(bench.store.remove(&again.digest).unwrap_err().code(), "in_use");
    drop(new);
    bench.store.remove(&again.digest).unwrap();
}

#[tokio::test]
async fn a_torn_cache_is_repaired_from_the_source_and_never_served() {
    let bench = Bench::new();
    let (blobs, image, _) = three_layers();
    let reference = bench.layout(&blobs, &[image]);
    let pulled = bench.pull(&reference).await.unwrap();
    let blob = pulled.blobs[0].clone();
    let mut whole = Vec::new();
    std::fs::File::open(&blob.data)
        .unwrap()
        .read_to_end(&mut whole)
        .unwrap();
    // The host rebooted, and a page of the second chunk never reached the disk.
    let data = std::fs::File::options().write(true).open(&blob.data).unwrap();
    data.write_all_at(&[0; 4096], 200_000).unwrap();
    let rebooted = Store {
        boot: BootId([9; 16]),
        ..bench.store.clone()
    };
    assert!(rebooted.image(&pulled.digest).unwrap().is_some());
    let view = open_blob(&blob);
    assert!(!view.is_ready(0, 1));

    let fill = |offset, length, log: &Arc<Log>| {
        let (store, blob, log) = (rebooted.clone(), blob.clone(), log.clone());
        async move {
            store
                .repair(&blob.id, offset, length, &store.source_options(&options()), log)
                .await
        }
    };
    let repairs = |log: &Log| log.count(|event| matches!(event, Event::Repairing { .. }));
    let log = Arc::new(Log::default());
    fill(0, 4096, &log).await.unwrap();
    assert!(view.is_ready(0, 4096) && !view.is_ready(0, blob.length) && repairs(&log) == 0);
    let (one, two) = tokio::join!(fill(150_000, 300_000, &log), fill(190_000, 10_000, &log));
    one.unwrap();
    two.unwrap();
    assert!(view.is_ready(0, blob.length));
    let mut now = Vec::new();
    std::fs::File::open(&blob.data)
        .unwrap()
        .read_to_end(&mut now)
        .unwrap();
    assert!(now == whole);

    // Without the source, the torn bytes stay unserved and the error names what is missing.
    let third = Store {
        boot: BootId([10; 16]),
        ..bench.store.clone()
    };
    third.image(&pulled.digest).unwrap().unwrap();
    data.write_all_at(&[0; 4096], 200_000).unwrap();
    std::fs::remove_dir_all(bench.path("layout")).unwrap();
    let error = third
        .repair(&blob.id, 200_000, 1, &third.source_options(&options()), log)
        .await
        .unwrap_err();
    assert_eq!(error.code(), "not_found");
    assert!(
        !view.is_ready(200_000, 1) && error.to_string().contains("layout"),
        "{error}"
    );
}

#[tokio::test]
async fn a_layer_whose_ready_file_is_torn_is_made_again() {
    let bench = Bench::new();
    let (blobs, image, _) = three_layers();
    let reference = bench.layout(&blobs, &[image]);
    let pulled = bench.pull(&reference).await.unwrap();
    for damage in [0, 100, 5000] {
        let ready = std::fs::File::options()
            .write(true)
            .open(&pulled.blobs[1].ready)
            .unwrap();
        ready.set_len(damage).unwrap();
        assert!(bench.store.find(&reference.parse().unwrap()).unwrap().is_none());
        let log = Arc::new(Log::default());
        let again = bench.pull_logged(&reference, &log).await.unwrap();
        assert_eq!((log.started(), log.cached()), (1, 2));
        assert!(open_blob(&again.blobs[1]).is_ready(0, again.blobs[1].length));
    }
    std::fs::write(pulled.metadata.with_file_name("record.json"), "{").unwrap();
    assert_eq!(bench.pull(&reference).await.unwrap().digest, pulled.digest);
}

#[tokio::test]
async fn never_means_never() {
    let bench = Bench::new();
    let (blobs, image, _) = three_layers();
    let reference: ImageRef = bench.layout(&blobs, &[image]).parse().unwrap();
    let never = PullOptions {
        policy: PullPolicy::Never,
        ..options()
    };
    let log = Arc::new(Log::default());
    let platform = Platform::linux_amd64();
    let pull = || bench.store.pull(&reference, &platform, &never, log.clone());
    assert_eq!(pull().await.unwrap_err().code(), "not_found");
    bench
        .store
        .pull(&reference, &Platform::linux_amd64(), &options(), log.clone())
        .await
        .unwrap();
    std::fs::remove_dir_all(bench.path("layout")).unwrap();
    pull().await.unwrap();
}

/// A pull runs on any runtime of its caller.
#[test]
fn pulls_are_send() {
    fn is_send(_: &impl Send) {}
    let bench = Bench::new();
    let reference = "oci:x".parse().unwrap();
    let (platform, options) = (Platform::linux_amd64(), options());
    is_send(
        &bench
            .store
            .pull(&reference, &platform, &options, Arc::new(Log::default())),
    );
}
