use std::sync::Arc;

use super::*;
use crate::paths::Paths;
use crate::snapshot::Hold;

/// The tenants of a node, as thawd opens them.
fn tenants(root: &Path, separate: bool) -> Tenants {
    let paths = Paths {
        data: root.join("d"),
        run: root.join("r"),
        kernel: root.join("k"),
        guest_image: root.join("g"),
    };
    let node = Node::open_as(paths, Hold::Sealed, false).unwrap();
    Tenants {
        separate,
        ..Tenants::open(node)
    }
}

fn tenant(name: &str) -> Tenant {
    name.parse().unwrap()
}

fn store(node: &Node) -> &Path {
    node.images.store().root()
}

#[tokio::test]
async fn two_tenants_share_neither_images_nor_templates() {
    let root = tempfile::tempdir().unwrap();
    let tenants = tenants(root.path(), true);
    let (a, b) = (tenant("a"), tenant("b"));
    let nodes = [
        tenants.for_new(None).await.unwrap(),
        tenants.for_new(Some(&a)).await.unwrap(),
        tenants.for_new(Some(&b)).await.unwrap(),
    ];
    for (node, data) in nodes.iter().zip(["d", "d/tenants/a", "d/tenants/b"]) {
        let data = root.path().join(data);
        assert_eq!((store(node), &node.paths.data), (&*data.join("images"), &data));
        assert!(data.join("images").is_dir());
        for other in nodes.iter().filter(|other| other.stock != node.stock) {
            assert!(!Arc::ptr_eq(&node.parked, &other.parked));
        }
        // Shared by all nodes, or part of one sandbox only.
        assert!(Arc::ptr_eq(&node.pools, &nodes[0].pools));
        assert!(Arc::ptr_eq(&node.shells, &nodes[0].shells));
        assert!(Arc::ptr_eq(&node.budget, &nodes[0].budget));
        assert_eq!(node.paths.guest_image, nodes[0].paths.guest_image);
    }
    assert_eq!(nodes[1].stock, Some(a));
    let listed = tenants.all().into_iter().map(|node| node.stock);
    assert_eq!(
        listed.collect::<Vec<_>>(),
        nodes.map(|node| node.stock),
        "the node is the first"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn node_of_a_tenant_is_one_however_many_ask_at_once() {
    let root = tempfile::tempdir().unwrap();
    let tenants = tenants(root.path(), true);
    let asked = (0..16).map(|_| {
        let tenants = tenants.clone();
        tokio::spawn(async move { tenants.for_new(Some(&tenant("a"))).await.unwrap() })
    });
    let mut nodes = Vec::new();
    for asked in asked.collect::<Vec<_>>() {
        nodes.push(asked.await.unwrap());
    }
    assert!(
        nodes
            .iter()
            .all(|node| Arc::ptr_eq(&node.parked, &nodes[0].parked))
    );
    assert_eq!(tenants.all().len(), 2);
}

#[tokio::test]
async fn stock_that_cannot_be_opened_is_tried_again() {
    let root = tempfile::tempdir().unwrap();
    let tenants = tenants(root.path(), true);
    let place = root.path().join("d/tenants");
    fs::write(&place, "in the way").unwrap();
    assert!(tenants.for_new(Some(&tenant("a"))).await.is_err());
    assert_eq!(tenants.all().len(), 1);
    fs::remove_file(&place).unwrap();
    assert!(tenants.for_new(Some(&tenant("a"))).await.is_ok());
}

#[tokio::test]
async fn stock_of_a_record_holds_whatever_the_setting_says_now() {
    let root = tempfile::tempdir().unwrap();
    let a = tenant("a");
    for separate in [true, false] {
        let tenants = tenants(root.path(), separate);
        let stock_of_new = tenants.for_new(Some(&a)).await.unwrap().stock;
        assert_eq!(stock_of_new.is_some(), separate);
        let own = tenants.with_stock(Some(&a)).await.unwrap();
        assert_eq!(store(&own), root.path().join("d/tenants/a/images"));
        let shared = tenants.with_stock(None).await.unwrap();
        assert_eq!(store(&shared), root.path().join("d/images"));
    }
}

#[tokio::test]
async fn stocks_are_separate_only_where_the_configuration_says_so() {
    let root = tempfile::tempdir().unwrap();
    let node = tenants(root.path(), false).shared;
    assert!(!Tenants::open(node).separate);
}

#[test]
fn no_name_of_a_tenant_leads_out_of_its_directory() {
    let shared = Path::new("/d");
    for good in ["a", "a.b", "a..b", "0", "A-_.z"] {
        let place = data(shared, &tenant(good));
        assert_eq!(place.parent(), Some(Path::new("/d/tenants")), "{good}");
        assert_eq!(place.file_name().unwrap(), good);
    }
    for bad in ["..", ".", "", "a/..", "../a", "/a", ".a", "a.", "a/b"] {
        assert!(bad.parse::<Tenant>().is_err(), "{bad:?}");
    }
}

#[test]
fn forks_that_dead_owners_left_are_removed_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let place = |name: &str| root.path().join("tenants").join(name);
    // Not locked, as after a kill.
    for left in [
        "a/forks/.thaw-partial-1/snapshot",
        "b/forks/.thaw-partial-2",
        "a/images",
        ".c/forks/.thaw-partial-3",
    ] {
        fs::create_dir_all(place(left)).unwrap();
    }
    fs::write(place("file"), "").unwrap();
    sweep(root.path());
    let there = |name: &str| place(name).exists();
    assert!(!there("a/forks/.thaw-partial-1") && !there("b/forks/.thaw-partial-2"));
    assert!(there("a/images") && there("file"));
    assert!(there(".c/forks/.thaw-partial-3"), "it is no tenant's");
}
