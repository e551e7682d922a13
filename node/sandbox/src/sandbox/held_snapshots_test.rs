//! Snapshots without use are held within the budget.

use super::*;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::{Hold, Registry, Signatures};

struct Place {
    root: tempfile::TempDir,
    registry: Registry,
}

impl Place {
    fn new() -> Place {
        let root = tempfile::tempdir().unwrap();
        let registry =
            Registry::open(&root.path().join("data"), Hold::Sealed, Signatures::AsKeysSay).unwrap();
        Place { root, registry }
    }

    fn snapshot(&self, name: &str) -> Arc<Registered> {
        let target = self.root.path().join(name);
        drop(draft(&target).finish(subject(), None).unwrap());
        Arc::new(self.registry.register(&target).unwrap())
    }
}

fn names(list: &[Arc<Registered>]) -> Vec<String> {
    let name = |r: &Arc<Registered>| r.directory.file_name().unwrap().to_string_lossy().into_owned();
    list.iter().map(name).collect()
}

#[test]
fn least_recently_thawed_are_let_go_beyond_the_budget() {
    let place = Place::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| place.snapshot(name));
    assert!(a.held_bytes > 0);
    let (mut table, two) = (Table::default(), a.held_bytes * 2);
    assert!(table.keep(&a, two).is_empty());
    assert!(table.keep(&b, two).is_empty());
    assert!(table.keep(&a, two).is_empty(), "it is held once");
    assert_eq!(names(&table.keep(&c, two)), ["b"]);
    assert_eq!(names(&table.keep(&b, 0)), ["b", "c", "a"], "no budget holds none");
}

#[test]
fn removed_snapshots_are_let_go() {
    let place = Place::new();
    let [a, b] = ["a", "b"].map(|name| place.snapshot(name));
    let mut table = Table::default();
    table.keep(&a, u64::MAX);
    std::fs::remove_dir_all(&a.directory).unwrap();
    assert_eq!(names(&table.keep(&b, u64::MAX)), ["a"]);
    assert_eq!(table.kept.len(), 1);
}

#[test]
fn held_snapshot_is_found_by_directory_and_hash() {
    let place = Place::new();
    let a = place.snapshot("a");
    let mut table = Table::default();
    table.known.entry(a.directory.clone()).or_default().held = Arc::downgrade(&a);
    assert!(table.get(&a.directory, a.hash).is_some());
    assert!(table.get(&a.directory, Hash::of(b"another")).is_none());
    let reading = table.reading(&a.directory);
    let directory = a.directory.clone();
    drop(a);
    assert!(
        Arc::ptr_eq(&reading, &table.reading(&directory)),
        "while it is read"
    );
    drop(reading);
    table.reading(Path::new("/other"));
    assert!(!table.known.contains_key(&directory));
}
