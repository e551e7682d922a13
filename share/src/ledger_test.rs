use proptest::prelude::*;

use super::*;

fn place(parent: u64, name: &str) -> Place {
    Place::new(
        parent,
        &CString::new(name).unwrap(),
        parent * 10,
        libc::S_IFREG | 0o644,
    )
}

fn opened(file: &File) -> (Ledger, Past) {
    Ledger::open(file.try_clone().unwrap()).unwrap()
}

#[test]
fn recorded_nodes_are_read_by_the_next_process() {
    let file = tempfile::tempfile().unwrap();
    let (mut ledger, past) = opened(&file);
    assert_eq!((past.generation, past.places.len()), (0, 0));
    ledger.put(2, &place(1, "a"), None);
    ledger.put(3, &place(2, "b"), None);
    ledger.put(4, &place(2, "c"), None);
    ledger.put(3, &place(1, "moved"), Some(1));
    ledger.forget(4, 1);
    let (mut ledger, past) = opened(&file);
    assert_eq!(past.generation, 1);
    assert_eq!(
        past.places,
        HashMap::from([(2, place(1, "a")), (3, place(1, "moved"))])
    );
    ledger.clear();
    ledger.put(9, &place(1, "new"), None);
    let (_, past) = opened(&file);
    assert_eq!((past.generation, past.places.len()), (2, 1));
}

#[test]
fn forgotten_nodes_are_compacted() {
    let file = tempfile::tempfile().unwrap();
    let (mut ledger, _) = opened(&file);
    ledger.put(2, &place(1, "stays"), None);
    let name = "x".repeat(200);
    for node in 3..60_000 {
        ledger.put(node, &place(1, &name), None);
        ledger.forget(node, name.len());
    }
    assert!(
        ledger.end - ledger.start < 2 * SLACK,
        "{}",
        ledger.end - ledger.start
    );
    let (_, past) = opened(&file);
    assert_eq!(past.places, HashMap::from([(2, place(1, "stays"))]));
}

#[test]
fn full_ledger_keeps_its_nodes() {
    let file = tempfile::tempfile().unwrap();
    let (mut ledger, _) = opened(&file);
    let name = "x".repeat(255);
    let most = MAX_SIZE / bytes_of(255);
    for node in 2..most + 10 {
        ledger.put(node, &place(1, &name), None);
    }
    assert!(ledger.full && ledger.end - ledger.start <= MAX_SIZE);
    assert_eq!(opened(&file).1.places.len() as u64, most);
}

#[test]
fn names_of_no_direct_child_are_not_read() {
    for bad in ["..", ".", "a/b"] {
        let file = tempfile::tempfile().unwrap();
        let (mut ledger, _) = opened(&file);
        ledger.put(2, &place(1, "good"), None);
        ledger.put(3, &place(1, bad), None);
        assert_eq!(opened(&file).1.places.len(), 1, "{bad}");
    }
}

proptest! {
    /// Any file can be opened, and opened again; truncation loses only the records after it.
    #[test]
    fn cut_or_hostile_files_are_opened(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in 0u64..400) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        opened(&file);
        let (_, past) = opened(&file);
        prop_assert!(past.generation >= 1);

        let file = tempfile::tempfile().unwrap();
        let (mut ledger, _) = opened(&file);
        (2..10).for_each(|node| ledger.put(node, &place(1, "name"), None));
        let whole = ledger.end;
        file.set_len((HEADER + cut).min(whole)).unwrap();
        let (mut ledger, past) = opened(&file);
        prop_assert_eq!(past.places.len() as u64, (cut / bytes_of(4)).min(8));
        ledger.put(50, &place(1, "after"), None);
        let (_, past) = opened(&file);
        prop_assert_eq!(past.places.get(&50), Some(&place(1, "after")));
    }
}
