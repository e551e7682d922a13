//! Snapshots pushed to a registry and pulled from it: by honest ones, and by ones that lie.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use serde_json::{Value, json};
use thaw_hypervisor::CpuId;
use thaw_images::progress::Silent;
use thaw_test_registry::memory::{Registry, digest};

use super::*;
use crate::paths::Paths;
use crate::sandbox::snapshot_push::push;
use crate::snapshot::artifact::CHUNK;
use crate::snapshot::artifact::state::tests::made as state_of;
use crate::snapshot::directory::tests::subject;
use crate::snapshot::manifest::{Base, ImageRecord, Kind, Subject};
use crate::snapshot::signature::tests::key_pair;
use crate::snapshot::{Hold, SigningKey};

#[path = "snapshot_lies_test.rs"]
mod lies;
#[path = "paused_copy_test.rs"]
mod paused_copy;
#[path = "remote_snapshot_test.rs"]
mod remote;

const GUEST_IMAGE: &[u8] = b"guest image";

/// A node over a directory. Its guest image is the one that [`subject`] names.
fn node(root: &Path) -> Node {
    let paths = Paths {
        data: root.join("d"),
        run: root.join("r"),
        kernel: root.join("k"),
        guest_image: root.join("g"),
    };
    std::fs::create_dir_all(root).unwrap();
    std::fs::write(&paths.guest_image, GUEST_IMAGE).unwrap();
    Node::open_as(paths, Hold::Sealed, false).unwrap()
}

fn has_all(_: &CpuId, _: u8) -> Result<Vec<String>, Error> {
    Ok(Vec::new())
}

fn noise(seed: u8, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new()
        .update(&[seed])
        .finalize_xof()
        .fill(&mut bytes);
    bytes
}

/// Stores a snapshot of a sandbox. `seed` decides a chunk of its memory beyond the first pack.
fn store(node: &Node, seed: u8, change: impl FnOnce(&mut Subject), key: Option<&SigningKey>) -> Arc<Stored> {
    let new = NewSnapshot {
        name: Some("web".into()),
        sandbox: "0123456789ab".into(),
        ..NewSnapshot::default()
    };
    let making = node.stored.begin(new).unwrap();
    let mut draft = Draft::begin(&making.snapshot()).unwrap();
    let cpuid = state_of(&[(1, 0, b"machine"), (0x101, 0, &[0; 40])]);
    draft.state().write_all_at(&cpuid, 0).unwrap();
    draft.memory().set_len(128 << 20).unwrap();
    draft.memory().write_all_at(&noise(1, 700_000), 4096).unwrap();
    draft
        .memory()
        .write_all_at(&noise(seed, 5000), 100 << 20)
        .unwrap();
    let disk = draft.add_disk("blk0").unwrap();
    disk.set_len(u64::from(CHUNK) * 9 + 4096).unwrap();
    disk.write_all_at(&noise(1, CHUNK as usize), u64::from(CHUNK))
        .unwrap();
    disk.write_all_at(b"the end", u64::from(CHUNK) * 9 + 4000)
        .unwrap();
    let mut subject = Subject {
        kind: Kind::Sandbox,
        guest_image: Some(Hash::of(GUEST_IMAGE)),
        ..subject()
    };
    change(&mut subject);
    draft.finish(subject, key).unwrap();
    making.finish().unwrap()
}

fn asked(reference: &str) -> Asked {
    Asked {
        from: reference.parse().unwrap(),
        plain_http: false,
        new: NewSnapshot {
            name: Some("pulled".into()),
            labels: [("tier".into(), "front".into())].into(),
            tenant: Some("acme".parse().unwrap()),
            ..NewSnapshot::default()
        },
        may_loopback: true,
        is_adopted: false,
    }
}

async fn pulled(node: &Node, reference: &str) -> Result<Arc<Stored>, Error> {
    pull(node, asked(reference), has_all, Arc::new(Silent)).await
}

async fn pushed(
    node: &Node,
    stored: &Arc<Stored>,
    reference: &str,
) -> Result<thaw_protocol::api::PushedSnapshot, Error> {
    push(node, stored, &reference.parse().unwrap(), false, Arc::new(Silent)).await
}

/// What is in the node's store, complete or not.
fn entries(node: &Node) -> usize {
    std::fs::read_dir(node.paths.data.join("frozen")).map_or(0, Iterator::count)
}

/// A registry with a snapshot, a node to pull it to, and the snapshot's OCI manifest.
struct Scene {
    root: tempfile::TempDir,
    registry: Registry,
    reference: String,
    listing: Value,
}

impl Scene {
    async fn new() -> Scene {
        let root = tempfile::tempdir().unwrap();
        let registry = Registry::start().unwrap();
        let reference = format!("{}/web:ready", registry.host());
        let from = node(&root.path().join("from"));
        let stored = store(&from, 2, |_| {}, None);
        pushed(&from, &stored, &reference).await.unwrap();
        let listing = serde_json::from_slice(&registry.manifest("ready").unwrap()).unwrap();
        registry.take_asked();
        Scene {
            root,
            registry,
            reference,
            listing,
        }
    }

    fn blob(&self, at: &Value) -> Vec<u8> {
        self.registry.blob(at["digest"].as_str().unwrap()).unwrap()
    }

    /// The layer of this kind.
    fn layer(&self, kind: &str) -> usize {
        let layers = self.listing["layers"].as_array().unwrap();
        let media_type = format!("application/vnd.thaw.snapshot.{kind}");
        layers
            .iter()
            .position(|it| it["mediaType"] == media_type.as_str())
            .unwrap()
    }

    /// Replaces a blob by another, with its right digest and size.
    fn exchange(&self, listing: &mut Value, pointer: &str, bytes: &[u8]) {
        let descriptor = listing.pointer_mut(pointer).unwrap();
        descriptor["digest"] = self.registry.put_blob(bytes).into();
        descriptor["size"] = bytes.len().into();
    }

    /// Pulls with this OCI manifest. The pull must fail and leave nothing. Also returns the blobs that it fetched.
    async fn refused(&self, listing: &Value) -> (Error, Vec<String>) {
        self.registry.put_manifest("lie", listing.to_string().as_bytes());
        self.registry.take_asked();
        let node = node(&self.root.path().join("to"));
        let reference = self.reference.replace(":ready", ":lie");
        let error = pulled(&node, &reference).await.unwrap_err();
        assert_eq!(entries(&node), 0, "{error}");
        assert!(node.stored.list().is_empty());
        let asked = self.registry.take_asked().into_iter();
        (error, asked.filter(|it| it.contains("/blobs/")).collect())
    }
}

#[tokio::test]
async fn pushed_snapshot_is_pulled_to_another_node() {
    let root = tempfile::tempdir().unwrap();
    let registry = Registry::start().unwrap();
    let layout = format!("oci:{}:ready", root.path().join("layout").display());
    let (from, to) = (node(&root.path().join("from")), node(&root.path().join("to")));
    let stored = store(&from, 2, |_| {}, None);
    for reference in [format!("{}/web:ready", registry.host()), layout] {
        let sent = pushed(&from, &stored, &reference).await.unwrap();
        assert!(sent.sent_bytes > 700_000 && sent.present_bytes == 0, "{sent:?}");
        let again = pushed(&from, &stored, &reference).await.unwrap();
        assert_eq!((again.sent_bytes, &again.digest), (0, &sent.digest));
        let copy = pulled(&to, &reference).await.unwrap();
        let object = &copy.object;
        assert_eq!(object.name.as_deref(), Some("pulled"));
        assert_eq!(
            (object.sandbox.as_str(), object.parent.as_ref()),
            ("0123456789ab", None)
        );
        assert_eq!(object.labels["tier"], "front");
        assert_eq!(object.tenant, Some("acme".parse().unwrap()));
        assert!(to.stored.verify(&copy).unwrap().is_empty());
        let file = |of: &Stored, name: &str| std::fs::File::open(of.directory.join(name)).unwrap();
        for name in ["manifest.json", "state", "memory", "disks/blk0"] {
            let whole = |of: &Stored| std::fs::read(of.directory.join(name)).unwrap();
            assert!(whole(&copy) == whole(&stored), "{name}");
        }
        let occupied = file(&copy, "memory").metadata().unwrap().blocks() * 512;
        assert!(occupied < 2 << 20, "{occupied}: zeros are holes");
        to.stored.remove(&object.id, &|_| None, false).unwrap();
    }
}

#[tokio::test]
async fn next_version_sends_only_what_changed() {
    let root = tempfile::tempdir().unwrap();
    let registry = Registry::start().unwrap();
    let from = node(&root.path().join("from"));
    let first = store(&from, 2, |_| {}, None);
    from.stored
        .change(
            &first.object.id,
            &crate::snapshot::store::Change {
                name: Some(None),
                ..Default::default()
            },
        )
        .unwrap();
    let second = store(&from, 3, |_| {}, None);
    let reference = |tag: &str| format!("{}/web:{tag}", registry.host());
    pushed(&from, &first, &reference("1")).await.unwrap();
    let sent = pushed(&from, &second, &reference("2")).await.unwrap();
    assert!(
        sent.present_bytes > 700_000 && sent.sent_bytes < 100_000,
        "{sent:?}"
    );
}

#[tokio::test]
async fn delta_and_template_are_not_pushed() {
    let root = tempfile::tempdir().unwrap();
    let from = node(root.path());
    let base = Base {
        manifest: Hash::of(b"base"),
        place: "/nowhere".into(),
    };
    let delta = store(&from, 2, |subject| subject.base = Some(base), None);
    let refused = pushed(&from, &delta, "registry.invalid/web:1").await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotDelta);
    from.stored.remove(&delta.object.id, &|_| None, false).unwrap();
    let template = store(&from, 2, |subject| subject.kind = Kind::Template, None);
    let refused = pushed(&from, &template, "registry.invalid/web:1")
        .await
        .unwrap_err();
    assert_eq!(refused.kind, ErrorKind::PushRefused);
}

#[tokio::test]
async fn host_that_cannot_thaw_it_fetches_no_layer() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    let lacks: Lacks = |_, _| Ok(vec!["avx512f".into()]);
    let error = pull(&to, asked(&scene.reference), lacks, Arc::new(Silent)).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind, ErrorKind::SnapshotIncompatible);
    assert!(error.what.contains("avx512f"), "{error}");
    std::fs::write(&to.paths.guest_image, b"of another release").unwrap();
    let error = pulled(&to, &scene.reference).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::SnapshotIncompatible);
    let fetched = scene.registry.take_asked();
    let config = scene.listing["config"]["digest"].as_str().unwrap();
    let blobs: Vec<_> = fetched.iter().filter(|it| it.contains("/blobs/")).collect();
    assert!(
        !blobs.is_empty() && blobs.iter().all(|it| it.contains(config)),
        "{fetched:?}"
    );
    assert_eq!(entries(&to), 0);
}

#[tokio::test]
async fn full_budget_fetches_no_layer() {
    let scene = Scene::new().await;
    let mut to = node(&scene.root.path().join("to"));
    let config = crate::config::DiskConfig {
        limit: Some(crate::config::DiskLimit::Bytes(crate::config::Size(100_000))),
    };
    to.budget = Arc::new(crate::sandbox::Budget::open(&config, &to.paths.data).unwrap());
    let error = pulled(&to, &scene.reference).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::DiskBudget);
    assert_eq!(entries(&to), 0);
    let layers = scene.listing["layers"].to_string();
    let fetched = scene.registry.take_asked();
    let is_layer = |it: &String| layers.contains(it.rsplit('/').next().unwrap());
    assert!(!fetched.iter().any(is_layer), "{fetched:?}");
}

#[tokio::test]
async fn used_name_is_refused_before_layers() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    let first = pulled(&to, &scene.reference).await.unwrap();
    let error = pulled(&to, &scene.reference).await.unwrap_err();
    assert_eq!((error.kind, entries(&to)), (ErrorKind::NameInUse, 1));
    assert_eq!(to.stored.list()[0].object.id, first.object.id);
}

#[tokio::test]
async fn required_signature_travels_with_the_snapshot() {
    let root = tempfile::tempdir().unwrap();
    let registry = Registry::start().unwrap();
    let (from, place) = (node(&root.path().join("from")), root.path().join("to"));
    let keys = place.join("d/keys");
    std::fs::create_dir_all(&keys).unwrap();
    let key = SigningKey::load(&key_pair(root.path(), "key")).unwrap();
    std::fs::copy(root.path().join("key.pub"), keys.join("key.pub")).unwrap();
    let to = node(&place);
    let signed = format!("{}/web:signed", registry.host());
    let stored = store(&from, 2, |_| {}, Some(&key));
    pushed(&from, &stored, &signed).await.unwrap();
    from.stored.remove(&stored.object.id, &|_| None, false).unwrap();
    let unsigned = format!("{}/web:unsigned", registry.host());
    pushed(&from, &store(&from, 2, |_| {}, None), &unsigned)
        .await
        .unwrap();
    let error = pulled(&to, &unsigned).await.unwrap_err();
    assert_eq!((error.kind, entries(&to)), (ErrorKind::SnapshotSignature, 0));
    let copy = pulled(&to, &signed).await.unwrap();
    assert_eq!(
        std::fs::read(copy.directory.join("manifest.sig")).unwrap().len(),
        64
    );
    assert!(to.stored.verify(&copy).unwrap().is_empty());
}

#[tokio::test]
async fn missing_image_of_no_registry_is_named() {
    let root = tempfile::tempdir().unwrap();
    let registry = Registry::start().unwrap();
    let reference = format!("{}/web:1", registry.host());
    let (from, to) = (node(&root.path().join("from")), node(&root.path().join("to")));
    let image = ImageRecord {
        slot: 0,
        name: "image".into(),
        digest: digest(b"an image"),
        metadata: Hash::of(b"metadata"),
    };
    let wanted = image.digest.clone();
    let stored = store(&from, 2, |subject| subject.images.push(image), None);
    pushed(&from, &stored, &reference).await.unwrap();
    let error = pulled(&to, &reference).await.unwrap_err();
    assert_eq!((error.kind, entries(&to)), (ErrorKind::ImageNotStored, 0));
    assert!(error.what.contains(&wanted) && error.remedy.is_some(), "{error}");
}

#[tokio::test]
async fn image_on_the_loopback_is_an_administrators() {
    let scene = Scene::new().await;
    let image = ImageSource {
        reference: Some(format!("{}/secret:1", scene.registry.host())),
        digest: digest(b"an image"),
        metadata: Hash::of(b"metadata"),
    };
    let mut config = Config::decode(&scene.blob(&scene.listing["config"])).unwrap();
    config.images.push(image);
    let (from, options) = (scene.reference.parse().unwrap(), Default::default());
    let source = ArtifactSource::open(&from, &options, Arc::new(Silent));
    let source = source.await.unwrap();
    let to = node(&scene.root.path().join("to"));
    let silent: Arc<dyn Progress> = Arc::new(Silent);
    for (may_loopback, kind) in [
        (false, ErrorKind::ImageNotStored),
        (true, ErrorKind::ImageNotFound),
    ] {
        let asked = Asked {
            may_loopback,
            ..asked(&scene.reference)
        };
        scene.registry.take_asked();
        let error = images(&to, &asked, &source, &config, &silent).await.unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert_eq!(scene.registry.take_asked().is_empty(), !may_loopback);
    }
}

#[tokio::test]
async fn push_replaces_no_image() {
    let scene = Scene::new().await;
    let image =
        json!({"schemaVersion": 2, "config": {"mediaType": "application/vnd.oci.image.config.v1+json"}});
    scene.registry.put_manifest("app", image.to_string().as_bytes());
    let from = node(&scene.root.path().join("other"));
    let stored = store(&from, 3, |_| {}, None);
    let refused = pushed(&from, &stored, &scene.reference.replace("ready", "app")).await;
    assert_eq!(refused.unwrap_err().kind, ErrorKind::PushRefused);
    assert_eq!(
        scene.registry.manifest("app").unwrap(),
        image.to_string().as_bytes()
    );
    pushed(&from, &stored, &scene.reference).await.unwrap();
}

#[tokio::test]
async fn dropped_pull_leaves_nothing() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    for steps in 0..60 {
        let mut work = Box::pin(pulled(&to, &scene.reference));
        let mut polls = 0;
        let ended = std::future::poll_fn(|context| {
            polls += 1;
            match work.as_mut().poll(context) {
                std::task::Poll::Ready(done) => std::task::Poll::Ready(Some(done)),
                std::task::Poll::Pending if polls > steps => std::task::Poll::Ready(None),
                std::task::Poll::Pending => std::task::Poll::Pending,
            }
        })
        .await;
        drop(work);
        if let Some(done) = ended {
            done.unwrap();
            break;
        }
        // A thread may still be making the place: it removes it when it finds its caller gone, unless the snapshot was complete.
        while entries(&to) > 0 {
            if !to.stored.list().is_empty() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
}
