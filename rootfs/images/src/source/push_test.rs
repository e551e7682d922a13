//! Pushing to a registry that follows the distribution specification, and to one that lacks parts of it.

use std::io::Cursor;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::{OCI_CONFIG, OCI_MANIFEST, Platform};
use crate::progress::Silent;
use crate::reference::ImageRef;
use crate::source::fixture::{Server, noise};
use crate::source::{Credentials, Retry, SourceOptions, referrers, resolve};

use super::fake_registry::State;
use super::*;

const EMPTY: &str = "application/vnd.oci.empty.v1+json";

struct Registry {
    state: Arc<Mutex<State>>,
    server: Server,
}

impl Registry {
    fn start(state: State) -> Self {
        let state = Arc::new(Mutex::new(state));
        let answers = state.clone();
        let server = Server::keeping(move |asked| answers.lock().unwrap().answer(asked));
        Self { state, server }
    }

    fn reference(&self) -> ImageRef {
        format!("{}/app:1", self.server.address).parse().unwrap()
    }

    async fn push(&self) -> Push {
        Push::open(&self.reference(), &options(), Arc::new(Silent))
            .await
            .unwrap()
    }

    fn count(&self, method: &str) -> usize {
        let asked = self.server.asked.lock().unwrap();
        asked.iter().filter(|it| it.method == method).count()
    }
}

fn options() -> SourceOptions {
    SourceOptions {
        credentials: Credentials::Basic {
            user: "u".into(),
            password: "p".into(),
        },
        retry: Retry {
            attempts: 5,
            first: Duration::from_millis(1),
            longest: Duration::from_millis(10),
        },
        ..SourceOptions::default()
    }
}

fn artifact(subject: Option<&Digest>, name: &str) -> Vec<u8> {
    let mut document = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": "application/vnd.x",
        "config": {"mediaType": EMPTY, "digest": Digest::of(b"{}"), "size": 2}, "layers": [],
        "annotations": {"name": name}});
    if let Some(subject) = subject {
        document["subject"] = json!({"mediaType": OCI_MANIFEST, "digest": subject, "size": 3});
    }
    document.to_string().into_bytes()
}

/// Pushes a manifest that others can refer to.
async fn push_subject(push: &Push) -> Digest {
    let subject = artifact(None, "subject");
    push.manifest(Some("1"), OCI_MANIFEST, &subject).await.unwrap()
}

#[tokio::test]
async fn blobs_and_manifests_arrive_whole() {
    for absolute in [false, true] {
        let registry = Registry::start(State {
            absolute,
            password: true,
            ..State::default()
        });
        let push = registry.push().await;
        for bytes in [Vec::new(), b"x".to_vec(), noise(1, 300_000)] {
            let digest = Digest::of(&bytes);
            assert_eq!(push.blob_exists(&digest).await.unwrap(), None);
            push.upload(&digest, bytes.len() as u64, Cursor::new(bytes.clone()))
                .await
                .unwrap();
            assert_eq!(push.blob_exists(&digest).await.unwrap(), Some(bytes.len() as u64));
            assert_eq!(registry.state.lock().unwrap().blobs[&digest], bytes);
        }
        let manifest = artifact(None, "x");
        let digest = push.manifest(Some("1"), OCI_MANIFEST, &manifest).await.unwrap();
        assert_eq!(digest, Digest::of(&manifest));
        let kept = registry.state.lock().unwrap().manifests["1"].clone();
        assert_eq!(kept, (OCI_MANIFEST.to_owned(), manifest));
        assert_eq!(registry.count("PATCH"), 0);
    }
}

#[tokio::test]
async fn a_blob_is_mounted_where_that_is_possible() {
    let bytes = noise(2, 1000);
    let digest = Digest::of(&bytes);
    let registry = Registry::start(State {
        others: [(digest, bytes)].into(),
        ..State::default()
    });
    let push = registry.push().await;
    assert!(push.mount(&digest, "library/base").await.unwrap());
    assert!(push.blob_exists(&digest).await.unwrap().is_some());
    assert!(!push.mount(&Digest::of(b"else"), "library/base").await.unwrap());
    assert!(
        registry.state.lock().unwrap().uploads.is_empty(),
        "an upload nobody uses is cancelled"
    );
}

#[tokio::test]
async fn an_upload_that_breaks_off_goes_on_in_chunks_where_it_stopped() {
    let bytes = noise(3, 40 << 12);
    let digest = Digest::of(&bytes);
    let registry = Registry::start(State {
        faults: vec![("PUT", 500), ("PATCH", 502)],
        kept: 1 << 12,
        ..State::default()
    });
    let push = registry.push().await;
    push.upload(&digest, bytes.len() as u64, Cursor::new(bytes.clone()))
        .await
        .unwrap();
    assert_eq!(registry.state.lock().unwrap().blobs[&digest], bytes);
    let asked = registry.server.asked.lock().unwrap();
    let ranges: Vec<_> = asked
        .iter()
        .filter_map(|it| it.headers.get("content-range"))
        .collect();
    let page = 1 << 12;
    let range = |from: u64, until: u64| format!("{}-{}", from * page, until * page - 1);
    assert_eq!(
        ranges,
        [&range(0, 16), &range(1, 17), &range(17, 33), &range(33, 40)]
    );
}

#[tokio::test]
async fn a_registry_that_wants_large_chunks_gets_them() {
    let bytes = noise(4, 20 << 12);
    let digest = Digest::of(&bytes);
    let registry = Registry::start(State {
        faults: vec![("PUT", 413)],
        chunk: Some(30 << 12),
        ..State::default()
    });
    let push = registry.push().await;
    push.upload(&digest, bytes.len() as u64, Cursor::new(bytes))
        .await
        .unwrap();
    assert_eq!(registry.count("PATCH"), 1);
}

#[tokio::test]
async fn a_registry_that_keeps_failing_is_given_up() {
    let faults = [[("PUT", 503); 20], [("PATCH", 503); 20]].concat();
    let registry = Registry::start(State {
        faults,
        ..State::default()
    });
    let push = registry.push().await;
    let error = push
        .upload(&Digest::of(b"x"), 1, Cursor::new(b"x"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), "registry_failed");
    assert!(registry.count("PATCH") <= 10);
}

#[tokio::test]
async fn what_is_not_what_its_digest_says_never_arrives() {
    let directory = tempfile::tempdir().unwrap();
    let layout: ImageRef = format!("oci:{}", directory.path().display()).parse().unwrap();
    let registry = Registry::start(State::default());
    for reference in [registry.reference(), layout] {
        let push = Push::open(&reference, &options(), Arc::new(Silent))
            .await
            .unwrap();
        let bytes = noise(5, 200_000);
        let digest = Digest::of(&bytes);
        let mut wrong = bytes.clone();
        wrong[199_999] ^= 1;
        let error = push
            .upload(&digest, 200_000, Cursor::new(wrong))
            .await
            .unwrap_err();
        assert!(matches!(error, Error::DigestMismatch { .. }), "{error}");
        let error = push
            .upload(&digest, 200_000, Cursor::new(bytes[..100_000].to_vec()))
            .await
            .unwrap_err();
        assert!(
            matches!(error, Error::TruncatedLayer { got: 100_000, .. }),
            "{error}"
        );
        assert_eq!(push.blob_exists(&digest).await.unwrap(), None);
    }
    assert!(registry.state.lock().unwrap().blobs.is_empty());
}

#[tokio::test]
async fn referrers_are_found_whether_or_not_the_registry_knows_them() {
    let directory = tempfile::tempdir().unwrap();
    let layout: ImageRef = format!("oci:{}", directory.path().display()).parse().unwrap();
    let knows = Registry::start(State {
        knows_referrers: true,
        ..State::default()
    });
    let does_not = Registry::start(State::default());
    for reference in [knows.reference(), does_not.reference(), layout] {
        let push = Push::open(&reference, &options(), Arc::new(Silent))
            .await
            .unwrap();
        let subject = push_subject(&push).await;
        let none = referrers(&reference, &subject, &options(), Arc::new(Silent))
            .await
            .unwrap();
        assert_eq!(none, []);
        let mut expected = Vec::new();
        for name in ["a", "b"] {
            let bytes = artifact(Some(&subject), name);
            // Twice: it is listed once.
            push.manifest(None, OCI_MANIFEST, &bytes).await.unwrap();
            expected.push(push.manifest(None, OCI_MANIFEST, &bytes).await.unwrap());
        }
        let found = referrers(&reference, &subject, &options(), Arc::new(Silent))
            .await
            .unwrap();
        assert!(
            found
                .iter()
                .all(|it| it.artifact_type.as_deref() == Some("application/vnd.x")),
            "{found:?}"
        );
        let mut found: Vec<_> = found.into_iter().map(|it| it.descriptor.digest).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{reference}");
    }
    let state = does_not.state.lock().unwrap();
    assert!(state.manifests.keys().any(|it| it.starts_with("sha256-")));
    assert!(
        !knows
            .state
            .lock()
            .unwrap()
            .manifests
            .keys()
            .any(|it| it.starts_with("sha256-"))
    );
}

#[tokio::test]
async fn a_layout_that_was_pushed_to_can_be_read_and_its_tags_move() {
    let directory = tempfile::tempdir().unwrap();
    let name = format!("oci:{}", directory.path().join("new").display());
    let reference: ImageRef = name.parse().unwrap();
    let push = Push::open(&reference, &options(), Arc::new(Silent))
        .await
        .unwrap();
    let mut images = Vec::new();
    for user in ["one", "two"] {
        let config = json!({"architecture": "amd64", "os": "linux", "config": {"User": user},
            "rootfs": {"type": "layers", "diff_ids": []}})
        .to_string();
        let digest = Digest::of(config.as_bytes());
        push.upload(
            &digest,
            config.len() as u64,
            Cursor::new(config.clone().into_bytes()),
        )
        .await
        .unwrap();
        let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": [],
            "config": {"mediaType": OCI_CONFIG, "digest": digest, "size": config.len()}});
        let manifest = manifest.to_string().into_bytes();
        images.push(
            push.manifest(Some("latest"), OCI_MANIFEST, &manifest)
                .await
                .unwrap(),
        );
    }
    push.manifest(None, OCI_MANIFEST, &artifact(Some(&images[1]), "beside"))
        .await
        .unwrap();
    for name in [name.clone(), format!("{name}:latest")] {
        let reference: ImageRef = name.parse().unwrap();
        let source = crate::source::open(&reference, &options(), Arc::new(Silent))
            .await
            .unwrap();
        let resolved = resolve(&*source, &Platform::linux_amd64()).await.unwrap();
        assert_eq!(resolved.digest, images[1]);
    }
}

#[tokio::test]
async fn an_archive_cannot_be_written_to() {
    let reference: ImageRef = "docker-archive:/nowhere.tar".parse().unwrap();
    let opened = Push::open(&reference, &options(), Arc::new(Silent)).await;
    assert_eq!(opened.err().unwrap().code(), "malformed");
}

/// `THAW_TEST_REGISTRY=host:port`: an empty registry on loopback that accepts pushes (tests/images/registry).
#[tokio::test]
#[ignore = "wants a registry, in THAW_TEST_REGISTRY"]
async fn a_real_registry_takes_it_and_gives_it_back() {
    let host = std::env::var("THAW_TEST_REGISTRY").unwrap();
    let reference: ImageRef = format!("{host}/push:1").parse().unwrap();
    let push = Push::open(&reference, &options(), Arc::new(Silent))
        .await
        .unwrap();
    let bytes = noise(7, 300_000);
    let digest = Digest::of(&bytes);
    push.upload(&digest, 300_000, Cursor::new(bytes.clone()))
        .await
        .unwrap();
    assert_eq!(push.blob_exists(&digest).await.unwrap(), Some(300_000));

    // In chunks, as if the single request had failed.
    let Target::Registry(remote) = &push.0 else {
        panic!("no registry")
    };
    let chunked = noise(8, 300_000);
    let content = Content::new(Digest::of(&chunked), 300_000, Cursor::new(chunked.clone()));
    assert!(
        remote
            .chunks(&content, "a blob", &mut Retry::default().begin())
            .await
            .is_ok()
    );
    assert_eq!(
        push.blob_exists(&Digest::of(&chunked)).await.unwrap(),
        Some(300_000)
    );

    let other: ImageRef = format!("{host}/other:1").parse().unwrap();
    let other = Push::open(&other, &options(), Arc::new(Silent)).await.unwrap();
    assert!(other.mount(&digest, "push").await.unwrap());
    assert!(!other.mount(&Digest::of(b"none"), "push").await.unwrap());

    let config = b"{}";
    push.upload(&Digest::of(config), 2, Cursor::new(config))
        .await
        .unwrap();
    let subject = push_subject(&push).await;
    let referrer = push
        .manifest(None, OCI_MANIFEST, &artifact(Some(&subject), "a"))
        .await
        .unwrap();
    let found = referrers(&reference, &subject, &options(), Arc::new(Silent))
        .await
        .unwrap();
    assert_eq!(
        found.iter().map(|it| it.descriptor.digest).collect::<Vec<_>>(),
        [referrer]
    );

    // And its ranges.
    let client = crate::registry::Client::new(Default::default()).unwrap();
    let source = options();
    let options = crate::fetch::FetchOptions { source, client };
    let reader = crate::fetch::open(&reference, &options, Arc::new(Silent))
        .await
        .unwrap();
    let blob = crate::ranges::StoredBlob {
        digest,
        size: 300_000,
        urls: Vec::new(),
    };
    let check: crate::ranges::Check = Arc::new(|_| Ok(()));
    let read = reader
        .read(&blob, 1000..5000, crate::ranges::Priority::Demand, check)
        .await
        .unwrap();
    assert_eq!(read, bytes[1000..5000]);
}
