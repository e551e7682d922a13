use std::fs;

use super::*;
use crate::paths::Paths;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::store::NewSnapshot;
use crate::snapshot::{Hold, Subject};

/// A node that has made nothing yet.
fn node(root: &Path) -> Node {
    node_as(root, Hold::Files)
}

fn node_as(root: &Path, hold: Hold) -> Node {
    let [data, run, kernel, guest_image] = ["data", "run", "kernel", "guest"].map(|name| root.join(name));
    let paths = Paths {
        data,
        run,
        kernel,
        guest_image,
    };
    Node::open_as(paths, hold, false).unwrap()
}

/// What is over this base.
fn over(base: Base) -> Subject {
    Subject {
        base: Some(base),
        ..subject()
    }
}

/// The base that is the snapshot in this directory.
fn at(node: &Node, directory: &Path) -> Base {
    Base {
        manifest: node.templates.registry().find(directory).unwrap().hash(),
        place: directory.to_owned(),
    }
}

fn put(node: &Node, subject: Subject) -> Arc<Stored> {
    let making = node.stored.begin(NewSnapshot::default()).unwrap();
    draft(&making.snapshot()).finish(subject, None).unwrap();
    making.finish().unwrap()
}

/// Makes a template, whose key is what it says.
fn template(node: &Node) -> PathBuf {
    let directory = node.paths.data.join("templates").join("ab".repeat(32));
    drop(draft(&directory).finish(subject(), None).unwrap());
    directory
}

fn remove(node: &Node, stored: &Stored) -> Result<(), Error> {
    node.stored
        .remove(&stored.object.id, &|stored| node.user_of(stored), true)
}

#[tokio::test]
async fn highest_snapshot_that_the_node_keeps_is_the_base() {
    let root = tempfile::tempdir().unwrap();
    let node = node(root.path());
    let template = template(&node);
    let stored = put(&node, over(at(&node, &template)));
    let own = root.path().join("own");
    drop(
        draft(&own)
            .finish(over(at(&node, &stored.directory)), None)
            .unwrap(),
    );
    let found = |top: &Path| {
        let found = kept_base(&node, None, &at(&node, top));
        found.map(|(base, layers, _)| (base.manifest, layers))
    };
    let hash = |top: &Path| at(&node, top).manifest;
    assert_eq!(found(&template), Some((hash(&template), 1)));
    assert_eq!(found(&stored.directory), Some((hash(&stored.directory), 2)));
    // A directory of a user is its owner's business.
    assert_eq!(found(&own), Some((hash(&stored.directory), 2)));
    let alone = root.path().join("alone");
    drop(draft(&alone).finish(subject(), None).unwrap());
    assert_eq!(found(&alone), None);
    // Another snapshot is in its place, or none.
    let other = Base {
        manifest: Hash::of(b""),
        place: template.clone(),
    };
    assert!(kept_base(&node, None, &other).is_none());
    fs::remove_dir_all(&template).unwrap();
    assert_eq!(found(&stored.directory), None);
}

#[tokio::test]
async fn snapshot_of_another_tenant_is_no_base() {
    let root = tempfile::tempdir().unwrap();
    let node = node(root.path());
    let [acme, other]: [Tenant; 2] = ["acme", "other"].map(|name| name.parse().unwrap());
    let new = NewSnapshot {
        tenant: Some(acme.clone()),
        ..NewSnapshot::default()
    };
    let making = node.stored.begin(new).unwrap();
    drop(draft(&making.snapshot()).finish(subject(), None).unwrap());
    let base = at(&node, &making.finish().unwrap().directory);
    assert!(kept_base(&node, Some(&acme), &base).is_some());
    assert!(kept_base(&node, Some(&other), &base).is_none());
    assert!(kept_base(&node, None, &base).is_none());
}

#[tokio::test]
async fn base_that_may_have_no_layer_above_it_is_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let node = node(root.path());
    let mut top = template(&node);
    for layers in 2..=MAX_LAYERS {
        top = put(&node, over(at(&node, &top))).directory.clone();
        let (_, found, _) = kept_base(&node, None, &at(&node, &top)).unwrap();
        assert_eq!(usize::from(found), layers.min(MAX_LAYERS - 1));
    }
}

#[tokio::test]
async fn base_stays_while_something_is_made_over_it_or_lies_on_it() {
    let root = tempfile::tempdir().unwrap();
    let node = node(root.path());
    let stored = put(&node, subject());
    let id = "0123456789ab";
    let paused = node.paused.begin(id).unwrap();
    let (base, _, kept) = kept_base(&node, None, &at(&node, &stored.directory)).unwrap();
    let refused = remove(&node, &stored).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotInUse, "{refused}");
    drop(draft(&paused.snapshot()).finish(over(base), None).unwrap());
    drop(kept);
    let refused = remove(&node, &stored).unwrap_err();
    assert!(refused.what.contains(id), "{refused}");
    let user = node.base_users().find(stored.hash().unwrap());
    assert!(user.unwrap().contains(id));
    drop(paused);
    remove(&node, &stored).unwrap();
}

#[tokio::test]
async fn snapshots_over_one_base_share_its_memory() {
    let root = tempfile::tempdir().unwrap();
    let node = node_as(root.path(), Hold::Sealed);
    let under = at(&node, &put(&node, subject()).directory);
    let registered = [(); 2].map(|()| {
        let stored = put(&node, over(under.clone()));
        node.snapshots.register(&node, &stored.directory).unwrap()
    });
    let inodes = registered.each_ref().map(|delta| {
        let memory = delta.files.memory.iter();
        let inodes = memory.map(|file| rustix::fs::fstat(file).unwrap().st_ino);
        inodes.collect::<Vec<_>>()
    });
    assert_eq!((inodes[0].len(), inodes[1].len()), (2, 2));
    assert_eq!(inodes[0][0], inodes[1][0]);
    assert_ne!(inodes[0][1], inodes[1][1]);
}

#[tokio::test]
async fn snapshots_that_name_themselves_as_bases_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let node = node_as(root.path(), Hold::Sealed);
    let [own, one, other] = ["own", "one", "other"].map(|name| root.path().join(name));
    for (directory, place) in [(&own, &own), (&one, &other), (&other, &one)] {
        let base = Base {
            manifest: Hash::of(b"no snapshot"),
            place: place.clone(),
        };
        drop(draft(directory).finish(over(base), None).unwrap());
    }
    for directory in [&own, &one] {
        let refused = node.snapshots.register(&node, directory).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::SnapshotIncompatible, "{refused}");
    }
}

#[test]
fn place_is_plain_though_its_directories_are_gone() {
    let place = Path::new("/data/paused/a/snapshot/../../../templates/k");
    assert_eq!(plain(place), Path::new("/data/templates/k"));
    assert_eq!(
        plain(Path::new("/data/templates/k")),
        Path::new("/data/templates/k")
    );
}
