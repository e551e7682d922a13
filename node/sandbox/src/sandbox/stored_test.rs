use super::*;
use crate::error::ErrorKind;
use crate::paths::Paths;
use crate::snapshot::Hold;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::store::NewSnapshot;

const COW: MemoryMode = MemoryMode::Cow;

/// The tenants of a node, as thawd opens them.
fn tenants(root: &Path) -> Tenants {
    let paths = Paths {
        data: root.join("d"),
        run: root.join("r"),
        kernel: root.join("k"),
        guest_image: root.join("g"),
    };
    Tenants::open(Node::open_as(paths, Hold::Sealed, false).unwrap())
}

fn put(store: &SnapshotStore, owner: &str) -> Arc<Stored> {
    let new = NewSnapshot {
        name: Some("web".into()),
        tenant: Some(owner.parse().unwrap()),
        ..NewSnapshot::default()
    };
    let making = store.begin(new).unwrap();
    draft(&making.snapshot()).finish(subject(), None).unwrap();
    making.finish().unwrap()
}

#[tokio::test]
async fn snapshot_is_thawed_with_the_stock_it_lies_in() {
    let root = tempfile::tempdir().unwrap();
    let opened = tenants(root.path());
    let acme: Tenant = "acme".parse().unwrap();
    let separate = opened.with_stock(Some(&acme)).await.unwrap();
    let stored = put(&separate.stored, "acme");
    let shared = put(&opened.shared().stored, "other");
    // As after a restart: no stock is open.
    drop((separate, opened));
    let tenants = tenants(root.path());
    let viewer = |tenant: &str| Viewer {
        tenant: Some(tenant.parse().unwrap()),
        is_node: false,
    };
    let id = stored.object.id.as_str();
    for (wanted, viewer) in [
        ("web", viewer("acme")),
        (id, Viewer::node()),
        (&id[..10], Viewer::node()),
    ] {
        let (node, found, _) = tenants.to_thaw(wanted, &viewer, COW).await.unwrap();
        let (directory, _) = found.into_parts();
        assert_eq!(
            (node.stock.as_ref(), directory),
            (Some(&acme), stored.directory.clone())
        );
    }
    let (node, found, _) = tenants.to_thaw("web", &viewer("other"), COW).await.unwrap();
    assert_eq!(
        (node.stock, found.into_parts().0),
        (None, shared.directory.clone())
    );
    let refused = tenants.to_thaw(id, &viewer("other"), COW).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotNotFound);
    assert_eq!(tenants.snapshot_stores(&Viewer::node()).len(), 2);
}

#[tokio::test]
async fn memory_of_a_registry_is_not_loaded_in_advance() {
    let root = tempfile::tempdir().unwrap();
    let (tenants, wanted) = (tenants(root.path()), "registry.example/web:1");
    let refused = tenants
        .to_thaw(wanted, &Viewer::node(), MemoryMode::Populate)
        .await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Runtime);
    assert!(
        refused.what.contains("populate") && refused.what.contains(wanted),
        "{refused}"
    );
}

#[tokio::test]
async fn snapshot_that_is_removed_before_its_thaw_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let tenants = tenants(root.path());
    let node = tenants.shared();
    let [gone, kept] = ["acme", "other"].map(|owner| put(&node.stored, owner));
    let remove = |stored: &Stored| node.stored.remove(&stored.object.id, &|_| None, false);
    // Between the find by its reference and the thaw.
    remove(&gone).unwrap();
    let refused = keep(node, &gone.directory).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotNotFound);
    let thawing = keep(node, &kept.directory).await.unwrap();
    assert_eq!(remove(&kept).unwrap_err().kind, ErrorKind::SnapshotInUse);
    drop(thawing);
    remove(&kept).unwrap();
}
