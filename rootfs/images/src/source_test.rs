//! Resolving: which image a reference and a platform select, and which references are refused.

use serde_json::{Value, json};

use crate::progress::Silent;

use super::fixture::{self, Blobs, Layer, TAR, TAR_GZIP, tagged};
use super::*;

fn layer(seed: u64) -> Layer {
    Layer::new(TAR_GZIP, &fixture::tar(&[("file", &fixture::noise(seed, 5000))]))
}

async fn resolve_text(reference: &str) -> Result<Resolved, Error> {
    let options = SourceOptions {
        credentials: Credentials::Anonymous,
        ..SourceOptions::default()
    };
    let source = open(&reference.parse()?, &options, Arc::new(Silent)).await?;
    resolve(&*source, &Platform::linux_amd64()).await
}

async fn resolve_layout(blobs: &Blobs, descriptors: &[Value], tag: &str) -> Result<Resolved, Error> {
    let directory = tempfile::tempdir().unwrap();
    blobs.write_layout(directory.path(), descriptors);
    resolve_text(&format!("oci:{}{tag}", directory.path().display())).await
}

fn digest_of(descriptor: &Value) -> Digest {
    descriptor["digest"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_platform_is_found_through_nested_indexes() {
    let mut blobs = Blobs::default();
    let (arm, amd) = (
        blobs.image("arm64", &[layer(1)]),
        blobs.image("amd64", &[layer(2), layer(3)]),
    );
    let mut attestation = amd.clone();
    attestation["platform"] = json!({"os": "unknown", "architecture": "unknown"});
    let inner = blobs.index(&[attestation, arm.clone(), amd.clone()]);
    let outer = blobs.index(&[inner]);
    let resolved = resolve_layout(&blobs, &[outer], "").await.unwrap();
    assert_eq!(resolved.digest, digest_of(&amd));
    assert_eq!(resolved.layers.len(), 2);
    assert_eq!(
        resolved.config.config().as_ref().unwrap().cmd().clone().unwrap(),
        ["/bin/true"]
    );

    // The same without a platform in the descriptors: the config contains it.
    let bare: Vec<_> = [arm, amd]
        .into_iter()
        .map(|mut it| {
            it.as_object_mut().unwrap().remove("platform");
            it
        })
        .collect();
    assert_eq!(
        resolve_layout(&blobs, &bare, "").await.unwrap().digest,
        resolved.digest
    );
}

#[tokio::test]
async fn another_architecture_is_named() {
    let mut blobs = Blobs::default();
    let (arm, ppc) = (
        blobs.image("arm64", &[layer(1)]),
        blobs.image("ppc64le", &[layer(2)]),
    );
    let error = resolve_layout(&blobs, &[arm, ppc], "").await.unwrap_err();
    assert_eq!(error.code(), "wrong_architecture");
    let text = error.to_string();
    assert!(
        text.contains("linux/amd64") && text.contains("linux/arm64, linux/ppc64le"),
        "{text}"
    );
}

#[tokio::test]
async fn tags_choose_within_a_layout() {
    let mut blobs = Blobs::default();
    let (one, two) = (
        blobs.image("amd64", &[layer(1)]),
        blobs.image("amd64", &[layer(2)]),
    );
    let index = [
        tagged(one.clone(), "v1"),
        tagged(two.clone(), "example.org/x:latest"),
    ];
    assert_eq!(
        resolve_layout(&blobs, &index, ":v1").await.unwrap().digest,
        digest_of(&one)
    );
    assert_eq!(
        resolve_layout(&blobs, &index, ":latest").await.unwrap().digest,
        digest_of(&two)
    );
    assert_eq!(
        resolve_layout(&blobs, &index, "").await.unwrap().digest,
        digest_of(&two)
    );
    let error = resolve_layout(&blobs, &index, ":v3").await.unwrap_err();
    assert!(
        matches!(&error, Error::NotFound { advice, .. } if advice.contains("v1")),
        "{error}"
    );
}

#[tokio::test]
async fn damaged_documents_are_refused() {
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &[layer(1)]);
    let manifest: Value = serde_json::from_slice(&blobs.0[&digest_of(&image)]).unwrap();
    for digest in [digest_of(&image), digest_of(&manifest["config"])] {
        let mut damaged = blobs.clone();
        *damaged.0.get_mut(&digest).unwrap().last_mut().unwrap() = b' ';
        assert_eq!(
            resolve_layout(&damaged, std::slice::from_ref(&image), "")
                .await
                .unwrap_err()
                .code(),
            "digest_mismatch"
        );
        damaged.0.get_mut(&digest).unwrap().pop();
        assert_eq!(
            resolve_layout(&damaged, std::slice::from_ref(&image), "")
                .await
                .unwrap_err()
                .code(),
            "truncated_layer"
        );
        damaged.0.remove(&digest);
        assert_eq!(
            resolve_layout(&damaged, std::slice::from_ref(&image), "")
                .await
                .unwrap_err()
                .code(),
            "not_found"
        );
    }
}

#[tokio::test]
async fn what_is_no_image_is_named() {
    let cases = [
        (
            json!({"schemaVersion": 1, "name": "x", "fsLayers": []}),
            "unknown_media_type",
            "schema 1",
        ),
        (
            json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.artifact.manifest.v1+json"}),
            "unknown_media_type",
            "artifact.manifest",
        ),
        (json!({"schemaVersion": 2}), "malformed", "neither"),
        (
            json!({"schemaVersion": 3, "layers": []}),
            "malformed",
            "schemaVersion",
        ),
        (json!([1, 2]), "malformed", "manifest"),
    ];
    for (document, code, part) in cases {
        let mut blobs = Blobs::default();
        let descriptor = blobs.descriptor("", document.to_string().into_bytes());
        let error = resolve_layout(&blobs, &[descriptor], "").await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }

    let mut blobs = Blobs::default();
    let mut odd = layer(1);
    odd.media_type = "application/vnd.oci.image.layer.v1.tar+brotli".into();
    let image = blobs.image("amd64", &[odd]);
    let error = resolve_layout(&blobs, &[image], "").await.unwrap_err();
    assert!(
        matches!(&error, Error::UnknownMediaType { media_type, .. } if media_type.ends_with("brotli")),
        "{error}"
    );
}

#[tokio::test]
async fn endless_indexes_are_refused() {
    let mut blobs = Blobs::default();
    let mut nested = blobs.image("amd64", &[layer(1)]);
    nested.as_object_mut().unwrap().remove("platform");
    for _ in 0..6 {
        nested = blobs.index(&[nested]);
    }
    assert_eq!(
        resolve_layout(&blobs, &[nested], "").await.unwrap_err().code(),
        "malformed"
    );
}

/// The same image in every form that `docker save` has written.
#[tokio::test]
async fn archives_of_every_form_are_one_image() {
    let directory = tempfile::tempdir().unwrap();
    let tar_one = fixture::tar(&[("one", b"1")]);
    let layers = [
        Layer::new(TAR, &tar_one),
        Layer::new(TAR, &fixture::tar(&[("two", b"2")])),
    ];
    let config = Blobs::config("amd64", &layers);
    let name = format!("{}.json", Digest::of(&config).hex());
    let entry = |config: &str, layers: [&str; 2]| {
        json!([{"Config": config, "RepoTags": ["example.org/x:v1"], "Layers": layers}])
            .to_string()
            .into_bytes()
    };
    let legacy = fixture::tar(&[
        ("a/layer.tar", &layers[0].stored),
        ("b/layer.tar", &layers[1].stored),
        (&name, &config),
        ("manifest.json", &entry(&name, ["a/layer.tar", "b/layer.tar"])),
    ]);
    let blob = |bytes: &[u8]| format!("blobs/sha256/{}", Digest::of(bytes).hex());
    let zipped = fixture::gzip(&layers[1].stored);
    let (config_name, one, two) = (blob(&config), blob(&layers[0].stored), blob(&zipped));
    let modern = fixture::tar(&[
        ("manifest.json", &entry(&config_name, [&one, &two])),
        (&config_name, &config),
        (&one, &layers[0].stored),
        (&two, &zipped),
    ]);
    let mut digests = std::collections::BTreeSet::new();
    for (number, bytes) in [
        legacy.clone(),
        modern,
        fixture::gzip(&legacy),
        fixture::zstd(&legacy),
    ]
    .iter()
    .enumerate()
    {
        let path = directory.path().join(format!("{number}.tar"));
        std::fs::write(&path, bytes).unwrap();
        for tag in ["", ":v1", ":example.org/x:v1"] {
            let resolved = resolve_text(&format!("docker-archive:{}{tag}", path.display()))
                .await
                .unwrap();
            assert_eq!(
                resolved.layers.iter().map(|it| it.diff_id).collect::<Vec<_>>(),
                layers.clone().map(|it| it.diff_id)
            );
            digests.insert(resolved.digest);
        }
        let error = resolve_text(&format!("docker-archive:{}:v2", path.display()))
            .await
            .unwrap_err();
        assert!(error.to_string().contains("example.org/x:v1"), "{error}");
    }
    assert_eq!(digests.len(), 1);

    // Within a header, after one, and within a member.
    for (length, code) in [
        (100, "malformed"),
        (512, "truncated_layer"),
        (1636, "truncated_layer"),
    ] {
        let path = directory.path().join("cut.tar");
        std::fs::write(&path, &legacy[..length]).unwrap();
        let error = resolve_text(&format!("docker-archive:{}", path.display()))
            .await
            .unwrap_err();
        assert_eq!(error.code(), code, "{length}: {error}");
    }
}

#[tokio::test]
async fn a_layer_saved_as_a_link_is_followed_and_circles_are_not() {
    let mut builder = tar::Builder::new(Vec::new());
    let layer = Layer::new(TAR, &fixture::tar(&[("one", b"1")]));
    let config = Blobs::config("amd64", &[layer.clone(), layer.clone()]);
    let mut add = |name: &str, kind: tar::EntryType, target: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(bytes.len() as u64);
        if kind == tar::EntryType::Symlink {
            builder.append_link(&mut header, name, target).unwrap();
        } else {
            builder.append_data(&mut header, name, bytes).unwrap();
        }
    };
    add("a/layer.tar", tar::EntryType::Regular, "", &layer.stored);
    add("b/layer.tar", tar::EntryType::Symlink, "../a/layer.tar", &[]);
    add("c/layer.tar", tar::EntryType::Symlink, "../c/layer.tar", &[]);
    add("config", tar::EntryType::Regular, "", &config);
    let entry = |second: &str| json!([{"Config": "config", "Layers": ["a/layer.tar", second]}]).to_string();
    add(
        "manifest.json",
        tar::EntryType::Regular,
        "",
        entry("b/layer.tar").as_bytes(),
    );
    let bytes = builder.into_inner().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.tar");
    std::fs::write(&path, &bytes).unwrap();
    let reference = format!("docker-archive:{}", path.display()).parse().unwrap();
    let source = open(&reference, &SourceOptions::default(), Arc::new(Silent))
        .await
        .unwrap();
    let resolved = resolve(&*source, &Platform::linux_amd64()).await.unwrap();
    let mut read = Vec::new();
    source
        .open(&resolved.layers[1], 0)
        .await
        .unwrap()
        .reader
        .read_to_end(&mut read)
        .unwrap();
    assert_eq!(read, layer.stored);
    let circle = LayerSource {
        member: Some("c/layer.tar".into()),
        ..resolved.layers[1].clone()
    };
    assert!(source.open(&circle, 0).await.is_err());
}

#[tokio::test]
async fn missing_places_are_named() {
    for (reference, part) in [
        ("oci:/nowhere/at/all", "/nowhere/at/all"),
        ("docker-archive:/nowhere.tar", "/nowhere.tar"),
        ("oci:/etc/passwd", "docker-archive:"),
        ("oci:/etc", "index.json"),
        ("docker-archive:/etc", "oci:DIR"),
    ] {
        let error = resolve_text(reference).await.unwrap_err();
        assert_eq!(error.code(), "not_found");
        assert!(error.to_string().contains(part), "{error}");
    }
}
