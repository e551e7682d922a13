//! From a layout to a layout, like the command; then pulled lazily by another store.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use thaw_imagefs::erofs::{BlobPlacement, Reader};
use thaw_imagefs::tree::{Kind, Tree};

use crate::fetch::FetchOptions;
use crate::fill::Filler;
use crate::load_order::LoadOrder;
use crate::manifest::ARTIFACT_TYPE;
use crate::progress::Silent;
use crate::pull::PullOptions;
use crate::ranges::Priority;
use crate::reference::ImageRef;
use crate::registry::{Client, Config};
use crate::source::fixture::{Blobs, Layer, noise, tagged, tar};
use crate::source::{Platform, SourceOptions};
use crate::store::{Image, Store};

use super::*;

const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

fn layout(directory: &Path, layers: &[Layer]) -> ImageRef {
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", layers);
    blobs.write_layout(directory, &[tagged(image, "original")]);
    reference(directory, "original")
}

fn reference(directory: &Path, tag: &str) -> ImageRef {
    format!("oci:{}:{tag}", directory.display()).parse().unwrap()
}

async fn job(
    store: &Store,
    source: &ImageRef,
    destination: &ImageRef,
    dictionaries: &[ImageRef],
    load_order: Option<LoadOrder>,
) -> Outcome {
    let job = Job {
        store,
        source,
        destination,
        platform: &Platform::linux_amd64(),
        dictionaries,
        options: Options {
            chunking: Some("fixed:16K".parse().unwrap()),
            level: 3,
        },
        load_order,
        pull: PullOptions::default(),
    };
    job.run(Arc::new(Silent)).await.unwrap()
}

/// Every file of a complete image, by path.
fn contents(image: &Image) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let metadata = std::fs::read(&image.metadata).unwrap();
    let reader = Reader::new(&metadata[..]).unwrap();
    let placements: Vec<BlobPlacement> = image
        .blobs
        .iter()
        .map(|blob| BlobPlacement {
            address: blob.address,
            length: blob.length,
        })
        .collect();
    let tree = thaw_imagefs::erofs::read_tree(&reader, &placements).unwrap();
    let data: Vec<_> = image
        .blobs
        .iter()
        .map(|blob| std::fs::File::open(&blob.data).unwrap())
        .collect();
    let mut found = BTreeMap::new();
    let mut pending = vec![(Vec::new(), Tree::ROOT)];
    while let Some((path, index)) = pending.pop() {
        for (name, child) in tree.entries(index).into_iter().flatten() {
            pending.push(([&path[..], b"/", name].concat(), *child));
        }
        if let Kind::File { size, extents } = &tree.inode(index).kind {
            let mut bytes = vec![0; size.next_multiple_of(4096) as usize];
            for extent in extents {
                let place = extent.file_offset as usize..(extent.file_offset + extent.length) as usize;
                FileExt::read_exact_at(&data[extent.blob as usize], &mut bytes[place], extent.data_offset)
                    .unwrap();
            }
            bytes.truncate(*size as usize);
            found.insert(path, bytes);
        }
    }
    found
}

/// Pulls lazily and then makes every byte ready.
async fn pull(store: &Store, reference: &ImageRef) -> Image {
    let pull = |options: PullOptions| async move {
        let platform = Platform::linux_amd64();
        store
            .pull(reference, &platform, &options, Arc::new(Silent))
            .await
            .unwrap()
    };
    let image = pull(PullOptions::default()).await;
    let options = FetchOptions {
        source: SourceOptions::default(),
        client: Client::new(Config::default()).unwrap(),
    };
    let filler = Filler::new(store.clone(), options);
    for blob in &image.blobs {
        filler
            .fill(&blob.id, 0, blob.length, Priority::Demand)
            .await
            .unwrap();
    }
    image
}

/// Checks what another tool reads from a converted image.
fn assert_skopeo_reads(converted: &ImageRef, outcome: &Outcome, copy: &Path) {
    let raw = Command::new("skopeo")
        .args(["inspect", "--raw"])
        .arg(converted.to_string())
        .output();
    let Ok(raw) = raw else {
        thaw_test_skip::skip("the copy by skopeo, which is not installed");
        return;
    };
    assert!(raw.status.success(), "{}", String::from_utf8_lossy(&raw.stderr));
    assert_eq!(Digest::of(&raw.stdout), outcome.digest);
    let manifest: serde_json::Value = serde_json::from_slice(&raw.stdout).unwrap();
    assert_eq!(manifest["artifactType"], ARTIFACT_TYPE);
    assert_eq!(manifest["subject"]["digest"], outcome.source.to_string());
    let copied = Command::new("skopeo")
        .args(["copy", "--insecure-policy"])
        .arg(converted.to_string())
        .arg(format!("oci:{}:copy", copy.display()))
        .output()
        .unwrap();
    assert!(
        copied.status.success(),
        "{}",
        String::from_utf8_lossy(&copied.stderr)
    );
}

#[tokio::test]
async fn an_image_is_converted_pushed_and_pulled_lazily() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (text, big) = ("a line of text\n".repeat(3000), noise(1, 700_000));
    let base = [
        Layer::new(TAR, &tar(&[("etc/text", text.as_bytes()), ("usr/bin/big", &big)])),
        Layer::new(TAR, &tar(&[("app/one", &noise(2, 50_000)), ("app/copy", &big)])),
    ];
    let original = layout(&path("base"), &base);
    let store = Store::open(&path("store")).unwrap();
    let converted = reference(&path("converted"), "base");
    let outcome = job(&store, &original, &converted, &[], None).await;
    assert_eq!(outcome.facts.files, 4);
    assert!(outcome.facts.unique_bytes < 850_000 && outcome.facts.logical_bytes > 1_400_000);
    assert_eq!(outcome.pushed.bytes, outcome.facts.push_bytes);
    let again = reference(&path("again"), "base");
    assert_eq!(
        job(&store, &original, &again, &[], None).await.digest,
        outcome.digest
    );

    assert_skopeo_reads(&converted, &outcome, &path("copied"));

    // The same files in a store that never saw the original.
    let other = Store::open(&path("other")).unwrap();
    let image = pull(&other, &converted).await;
    assert_eq!(image.digest, outcome.digest);
    let expected = contents(&store.find(&original).unwrap().unwrap());
    assert_eq!(contents(&image), expected);

    // One more file, against the existing images.
    let changed = [
        base[0].clone(),
        base[1].clone(),
        Layer::new(TAR, &tar(&[("app/two", &noise(3, 20_000))])),
    ];
    let changed = layout(&path("changed"), &changed);
    let small = reference(&path("converted"), "changed");
    let outcome = job(&store, &changed, &small, std::slice::from_ref(&converted), None).await;
    assert_eq!(outcome.facts.new_bytes, 5 * 4096);
    assert!(outcome.pushed.bytes < 40_000, "{outcome:?}");
    assert_eq!(outcome.pushed.present, 2);
    let image = pull(&other, &small).await;
    let expected = contents(&store.find(&changed).unwrap().unwrap());
    assert_eq!(contents(&image), expected);
    // Both images share one file on the disk for the base's chunks.
    let stored = std::fs::read_dir(path("other").join("layers")).unwrap().count();
    assert_eq!(stored, 2);

    // To a destination without the base, which is then copied.
    let alone = reference(&path("alone"), "changed");
    let outcome = job(&store, &changed, &alone, std::slice::from_ref(&converted), None).await;
    assert!(outcome.pushed.bytes > 700_000 && outcome.pushed.present == 0);
    let third = Store::open(&path("third")).unwrap();
    assert_eq!(contents(&pull(&third, &alone).await), expected);
    // A converted image can be a source too.
    let twice = reference(&path("twice"), "changed");
    let outcome = job(&store, &alone, &twice, &[], None).await;
    assert_eq!(outcome.facts.files, 5);
    assert_eq!(contents(&pull(&third, &twice).await), expected);
}
