use super::*;
use crate::error::ErrorKind;
use crate::paths::Paths;
use crate::snapshot::Hold;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::store::NewSnapshot;

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
        let (node, found, _) = tenants.to_thaw(wanted, &viewer).await.unwrap();
        let (directory, _) = found.into_parts();
        assert_eq!(
            (node.stock.as_ref(), directory),
            (Some(&acme), stored.directory.clone())
        );
    }
    let (node, found, _) = tenants.to_thaw("web", &viewer("other")).await.unwrap();
    assert_eq!(
        (node.stock, found.into_parts().0),
        (None, shared.directory.clone())
    );
    let refused = tenants.to_thaw(id, &viewer("other")).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotNotFound);
    assert_eq!(tenants.snapshot_stores(&Viewer::node()).len(), 2);
}
