use super::*;
use crate::snapshot::store::tests::{lies_on, open, put, store_over, tenant, unused};
use crate::snapshot::store::{NewSnapshot, User, object};

/// Stores a snapshot that was last used so many days ago.
fn put_used(store: &SnapshotStore, owner: Option<Tenant>, days: u64) -> String {
    let stored = put(store, None, owner);
    used(store, &stored, days);
    stored.object.id.clone()
}

fn used(store: &SnapshotStore, stored: &Stored, days: u64) {
    let object = object::Object {
        last_used: object::now() - days * DAY - 60,
        ..stored.object.clone()
    };
    object::write(stored.directory.parent().unwrap(), &object).unwrap();
    store.list();
}

fn ids(store: &SnapshotStore) -> Vec<String> {
    let mut ids: Vec<(u64, String)> = store
        .list()
        .iter()
        .map(|stored| (stored.object.last_used, stored.object.id.clone()))
        .collect();
    ids.sort();
    ids.into_iter().map(|(_, id)| id).collect()
}

#[test]
fn retention_removes_what_was_unused_for_longest() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let all: Vec<String> = [9, 5, 3, 1].map(|days| put_used(&store, None, days)).into();
    assert_eq!(store.retire(&Retention::default(), &unused), 0);
    let days = |days: u64| Retention {
        age: Some(days * DAY),
        ..Retention::default()
    };
    assert_eq!(store.retire(&days(6), &unused), 1);
    assert_eq!(ids(&store), all[1..]);
    let count = Retention {
        count: Some(2),
        ..Retention::default()
    };
    assert_eq!(store.retire(&count, &unused), 1);
    assert_eq!(ids(&store), all[2..]);
    let bytes = Retention {
        bytes: Some(1),
        ..Retention::default()
    };
    assert_eq!(store.retire(&bytes, &unused), 1);
    // The last one stays, whatever it takes and however old it is.
    assert_eq!(store.retire(&bytes, &unused) + store.retire(&days(0), &unused), 0);
    assert_eq!(ids(&store), all[3..]);
}

#[test]
fn retention_leaves_what_is_in_use_or_under_a_delta() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let base = put(&store, None, None);
    used(&store, &base, 9);
    let running = put_used(&store, None, 8);
    let delta = store_over(&store, NewSnapshot::default(), Some(lies_on(&base))).unwrap();
    used(&store, &delta, 3);
    let newest = put_used(&store, None, 1);
    let user_of = |stored: &Stored| (stored.object.id == running).then(|| User::Running("a".to_owned()));
    let days = |days: u64| Retention {
        age: Some(days * DAY),
        ..Retention::default()
    };
    assert_eq!(store.retire(&days(5), &user_of), 0);
    // With the delta its base goes too.
    assert_eq!(store.retire(&days(2), &user_of), 2);
    assert_eq!(ids(&store), [running.clone(), newest]);
}

#[test]
fn retention_counts_each_tenant_alone() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let acme = put_used(&store, tenant("acme"), 9);
    let old = put_used(&store, None, 5);
    let new = put_used(&store, None, 1);
    let count = Retention {
        count: Some(1),
        ..Retention::default()
    };
    assert_eq!(store.retire(&count, &unused), 1);
    assert_eq!(ids(&store), [acme, new]);
    assert!(store.get(&old).is_none());
}
