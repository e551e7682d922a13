//! Sources that lie or are gone, full disks, files changed without the store's knowledge, hosts that crash.

use std::time::Duration;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use thaw_imagefs::blob::BootId;

use crate::source::fixture::{TAR_ZSTD, gzip};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_are_refused_and_another_place_is_asked() {
    let layer = layer(1, TAR_GZIP, 2 << 20);
    let bench = Bench::new(std::slice::from_ref(&layer)).await;
    let (filler, blob) = (bench.filler(), bench.blob());
    let scripted = Scripted::of(&layer, 1000);
    scripted.lies.store(2, Ordering::Relaxed);
    scripted.serve(&bench, &filler);
    filler.fill(&blob.id, 0, 4096, Priority::Demand).await.unwrap();
    assert!(seen(&filler.stats().mismatches) > 0);
    bench.check();

    // No place has the right bytes: an error, and nothing is served.
    let bench = Bench::new(std::slice::from_ref(&layer)).await;
    let (filler, blob) = (bench.filler(), bench.blob());
    let path = bench.stored(&layer);
    let right = std::fs::read(&path).unwrap();
    let mut wrong = right.clone();
    wrong
        .iter_mut()
        .skip(1000)
        .step_by(5000)
        .for_each(|byte| *byte ^= 1);
    std::fs::write(&path, &wrong).unwrap();
    let error = filler
        .fill(&blob.id, 0, u64::MAX, Priority::Demand)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("digest"), "{error}");
    assert_eq!(bench.check(), 0);
    std::fs::write(&path, &right).unwrap();
    filler
        .fill(&blob.id, 0, u64::MAX, Priority::Demand)
        .await
        .unwrap();
    assert_eq!(bench.check(), blob.length.div_ceil(CHUNK_SIZE));
}

#[tokio::test]
async fn a_source_that_comes_back_is_read_again() {
    let layer = layer(1, TAR_GZIP, 1 << 20);
    let bench = Bench::new(std::slice::from_ref(&layer)).await;
    let (filler, blob) = (bench.filler(), bench.blob());
    let path = bench.stored(&layer);
    let away = path.with_extension("away");
    std::fs::rename(&path, &away).unwrap();
    filler
        .fill(&blob.id, 0, 4096, Priority::Demand)
        .await
        .unwrap_err();
    assert_eq!(bench.check(), 0);
    std::fs::rename(&away, &path).unwrap();
    filler.fill(&blob.id, 0, 4096, Priority::Demand).await.unwrap();
    assert!(bench.check() > 0);
}

#[tokio::test]
async fn layers_without_a_fitting_index_are_unpacked_again() {
    // Decompression of a single zstd frame cannot start in the middle.
    let bench = Bench::new(&[layer(1, TAR_ZSTD, 1 << 20)]).await;
    let (filler, blob) = (bench.filler(), bench.blob());
    std::fs::remove_file(blob.data.with_file_name("index")).ok();
    filler.fill(&blob.id, 0, 4096, Priority::Demand).await.unwrap();
    assert_eq!(bench.check(), blob.length.div_ceil(CHUNK_SIZE));
    assert_eq!(seen(&filler.stats().repairs), 1);

    // A torn index counts as missing.
    let bench = Bench::one().await;
    let index = bench.blob().data.with_file_name("index");
    let mut bytes = std::fs::read(&index).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    // The emptied layer links to the same file, so the file is removed and the torn one is a new file.
    std::fs::remove_file(&index).unwrap();
    std::fs::write(&index, &bytes).unwrap();
    bench.assert_filled_by_repair().await;
}

#[tokio::test]
async fn index_of_another_stored_form_is_not_used() {
    let one = layer(1, TAR_GZIP, 1 << 20);
    let bench = Bench::full(std::slice::from_ref(&one)).await;
    // The same tar with another compression, in an image of its own; the first image is removed.
    let tar = {
        let mut tar = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&one.stored[..]), &mut tar).unwrap();
        tar
    };
    let (head, tail) = tar.split_at(tar.len() / 3);
    let two = Layer {
        stored: [gzip(head), gzip(tail)].concat(),
        ..one.clone()
    };
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", std::slice::from_ref(&two));
    let layout = bench.directory.path().join("other");
    blobs.write_layout(&layout, &[image]);
    let reference = format!("oci:{}", layout.display()).parse().unwrap();
    let platform = Platform::linux_amd64();
    let second = bench
        .store
        .pull(&reference, &platform, &options(), Arc::new(Silent))
        .await
        .unwrap();
    assert_eq!(second.blobs[0].id, bench.blob().id);
    bench.store.remove(&bench.image.digest).unwrap();
    bench.store.evict(&second.digest).unwrap();
    bench.assert_filled_by_repair().await;
}

#[tokio::test]
async fn a_cut_file_is_noticed_and_what_is_gone_is_fetched_again() {
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob());
    bench.fill_all(&filler).await;
    let view = open(blob);
    let data = std::fs::File::options().write(true).open(&blob.data).unwrap();
    data.set_len(CHUNK_SIZE + 1).unwrap();
    // The bits are still set, but the reader notices and requests a fill.
    assert!(view.is_ready(0, 4096) && !view.is_ready(2 * CHUNK_SIZE, 4096));
    filler
        .fill(&blob.id, 2 * CHUNK_SIZE, 4096, Priority::Demand)
        .await
        .unwrap();
    assert!(view.is_ready(2 * CHUNK_SIZE, 4096) && !view.is_ready(blob.length - 1, 1));
    assert_eq!(seen(&filler.stats().cut), 1);
    bench.check();
    filler
        .fill(&blob.id, 0, u64::MAX, Priority::Demand)
        .await
        .unwrap();
    assert_eq!(bench.check(), blob.length.div_ceil(CHUNK_SIZE));

    // Truncated between two starts: noticed when the image is looked up.
    data.set_len(3 * CHUNK_SIZE).unwrap();
    let report = bench.store.verify(&bench.image.digest).unwrap();
    assert_eq!(report.damaged, [blob.id]);
    assert!(bench.store.image(&bench.image.digest).unwrap().is_some());
    // The remaining data is compared, and only the lost data is fetched.
    assert_eq!(bench.check(), 0);
    let before = seen(&filler.stats().chunks);
    filler
        .fill(&blob.id, 0, 3 * CHUNK_SIZE, Priority::Demand)
        .await
        .unwrap();
    assert_eq!((bench.check(), seen(&filler.stats().chunks) - before), (3, 0));
}

#[tokio::test]
async fn layer_overwritten_between_starts_is_fetched_again() {
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob());
    let fill = || filler.fill(&blob.id, 0, u64::MAX, Priority::Demand);
    fill().await.unwrap();
    let chunks = blob.length.div_ceil(CHUNK_SIZE);
    assert_eq!(bench.check(), chunks);
    // No data of a warm image is compared again, whichever process opens it.
    bench.assert_has_image_when_reopened();
    assert_eq!(bench.check(), chunks);
    let data = std::fs::File::options().write(true).open(&blob.data).unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    data.write_all_at(b"?", 2 * CHUNK_SIZE + 77).unwrap();
    // The next sandbox of the image gets no byte of the damaged layer.
    bench.assert_has_image_when_reopened();
    assert_eq!(bench.check(), 0);
    let before = seen(&filler.stats().chunks);
    fill().await.unwrap();
    assert_eq!(
        (bench.check(), seen(&filler.stats().chunks) - before),
        (chunks, 1)
    );
    assert!(bench.store.verify(&bench.image.digest).unwrap().is_sound());
    // The same while a sandbox runs, at its next miss.
    tokio::time::sleep(Duration::from_millis(30)).await;
    data.write_all_at(b"?", 3 * CHUNK_SIZE + 77).unwrap();
    filler.fill(&blob.id, 0, 1, Priority::Demand).await.unwrap();
    assert_eq!(bench.check(), 1);
}

#[tokio::test]
async fn flipped_bits_are_found_and_replaced() {
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob());
    bench.fill_all(&filler).await;
    let data = std::fs::File::options().write(true).open(&blob.data).unwrap();
    let flip = |offset| data.write_all_at(b"?", offset).unwrap();
    let verify = || bench.store.verify(&bench.image.digest).unwrap();
    assert!(verify().is_sound());

    flip(5 * CHUNK_SIZE + 77);
    let report = verify();
    assert_eq!((report.bad, report.cleared), (vec![(blob.id, 5)], 1));
    assert!(!open(blob).is_ready(5 * CHUNK_SIZE, 1));
    filler
        .fill(&blob.id, 0, u64::MAX, Priority::Demand)
        .await
        .unwrap();
    assert!(verify().is_sound());

    // In use: the bits stay, and the right bytes replace the wrong ones.
    let lease = bench.image.lease().unwrap();
    flip(5 * CHUNK_SIZE + 77);
    let report = verify();
    assert_eq!((report.bad.len(), report.cleared), (1, 0));
    assert!(open(blob).is_ready(5 * CHUNK_SIZE, 1));
    filler.refetch(&blob.id, &[5]).await.unwrap();
    assert!(verify().is_sound());
    drop(lease);
    bench.check();
}

#[tokio::test]
async fn after_a_reboot_only_what_was_torn_is_fetched() {
    let layer = layer(1, TAR_GZIP, 3 << 20);
    let bench = Bench::new(std::slice::from_ref(&layer)).await;
    let blob = bench.blob();
    bench
        .filler()
        .fill(&blob.id, 0, 2 << 20, Priority::Demand)
        .await
        .unwrap();
    let ready = bench.check();
    let data = std::fs::File::options().write(true).open(&blob.data).unwrap();
    data.write_all_at(&[0; 4096], 3 * CHUNK_SIZE + 8192).unwrap();

    let rebooted = bench.store.after_boot(BootId([9; 16]));
    let filler = Filler::new(rebooted, fetch_options());
    let scripted = Scripted::of(&layer, 1000);
    scripted.serve(&bench, &filler);
    filler.fill(&blob.id, 0, 4096, Priority::Demand).await.unwrap();
    assert_eq!(bench.check(), 1);
    filler
        .fill(&blob.id, 0, ready * CHUNK_SIZE, Priority::Demand)
        .await
        .unwrap();
    assert!(bench.check() >= ready);
    assert_eq!(scripted.reads(Priority::Demand), 1);
}

#[test]
fn a_full_disk_is_an_error_and_no_damage() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().to_owned();
    let done = std::thread::spawn(move || {
        // SAFETY: a mount namespace of its own does not affect the memory safety of other threads.
        if unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.is_err() {
            return false;
        }
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        let disk = root.join("disk");
        std::fs::create_dir(&disk).unwrap();
        mount("thaw-test", &disk, "tmpfs", MountFlags::empty(), c"size=32m").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let store = Store::open(&disk.join("store")).unwrap();
            let mut blobs = Blobs::default();
            let image = blobs.image("amd64", &[layer(1, TAR_GZIP, 5 << 20)]);
            blobs.write_layout(&root.join("layout"), &[image]);
            let reference = format!("oci:{}", root.join("layout").display()).parse().unwrap();
            let platform = Platform::linux_amd64();
            let image = store
                .pull(&reference, &platform, &options(), Arc::new(Silent))
                .await
                .unwrap();
            let whole = vec![std::fs::read(&image.blobs[0].data).unwrap()];
            store.evict(&image.digest).unwrap();
            let bench = Bench {
                directory: tempfile::tempdir().unwrap(),
                store,
                image,
                whole,
            };
            let (filler, blob) = (bench.filler(), bench.blob());
            let ballast = disk.join("ballast");
            let full = std::fs::write(&ballast, vec![1; 32 << 20]).unwrap_err();
            assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
            let error = filler
                .fill(&blob.id, 0, u64::MAX, Priority::Demand)
                .await
                .unwrap_err();
            assert_eq!(error.code(), "disk_full", "{error}");
            assert!(error.to_string().contains(&*disk.to_string_lossy()), "{error}");
            assert!(bench.check() < blob.length.div_ceil(CHUNK_SIZE));
            std::fs::remove_file(&ballast).unwrap();
            filler
                .fill(&blob.id, 0, u64::MAX, Priority::Demand)
                .await
                .unwrap();
            assert_eq!(bench.check(), blob.length.div_ceil(CHUNK_SIZE));
        });
        true
    })
    .join()
    .unwrap();
    if !done {
        thaw_test_skip::skip("no mount namespace here");
    }
}
