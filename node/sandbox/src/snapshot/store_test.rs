//! What is stored, found and removed, and what kills leave.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::*;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::manifest::{Base, Subject};
use crate::snapshot::register::Hold;
use crate::snapshot::signature::Signatures;

/// Names the failpoint to the process that is killed, and the data directory.
const KILLED_AT: &str = "THAW_TEST_STORE_KILLED_AT";
const DATA: &str = "THAW_TEST_STORE_DATA";

pub(super) fn open(data: &Path) -> SnapshotStore {
    let registry = Registry::open(data, Hold::Files, Signatures::default()).unwrap();
    SnapshotStore::open(data, registry)
}

pub(super) fn tenant(name: &str) -> Option<Tenant> {
    Some(name.parse().unwrap())
}

fn viewer(name: &str) -> Viewer {
    Viewer {
        tenant: tenant(name),
        is_node: false,
    }
}

fn new(name: Option<&str>, owner: Option<Tenant>) -> NewSnapshot {
    NewSnapshot {
        name: name.map(str::to_owned),
        tenant: owner,
        sandbox: "0123456789ab".into(),
        ..NewSnapshot::default()
    }
}

pub(super) fn store_over(
    store: &SnapshotStore,
    new: NewSnapshot,
    base: Option<Base>,
) -> Result<Arc<Stored>, Error> {
    let making = store.begin(new)?;
    let subject = Subject { base, ..subject() };
    draft(&making.snapshot()).finish(subject, None).unwrap();
    making.finish()
}

pub(super) fn put(store: &SnapshotStore, name: Option<&str>, owner: Option<Tenant>) -> Arc<Stored> {
    store_over(store, new(name, owner), None).unwrap()
}

pub(super) fn unused(_: &Stored) -> Option<User> {
    None
}

pub(super) fn lies_on(base: &Stored) -> Base {
    Base {
        manifest: base.hash().unwrap(),
        place: base.directory.clone(),
    }
}

fn left(store: &SnapshotStore) -> Vec<String> {
    let mut left: Vec<String> = ids(&store.0.root).collect();
    left.sort();
    left
}

#[test]
fn stored_snapshot_is_listed_by_every_process() {
    let data = tempfile::tempdir().unwrap();
    let (store, other) = (open(data.path()), open(data.path()));
    assert!(!SnapshotStore::exists(data.path()) && store.list().is_empty());
    let stored = put(&store, Some("web"), None);
    let id = stored.object.id.clone();
    assert_eq!(other.list()[0].object, stored.object);
    assert_eq!(store.id_of(&stored.directory).as_ref(), Some(&id));
    assert_eq!(store.id_of(data.path()), None);
    let change = Change {
        name: Some(Some("db".into())),
        labels: [("tier".into(), Some("back".into()))].into(),
        ..Change::default()
    };
    other.change(&id, &change).unwrap();
    let seen = &store.list()[0].object;
    assert_eq!(
        (seen.name.as_deref(), seen.labels["tier"].as_str()),
        (Some("db"), "back")
    );
    let shown = store.describe_one(&store.list()[0]);
    assert!(shown.manifest.unwrap().memory_data_bytes > 0 && shown.disk_bytes > 0);
    other.remove(&id, &unused, false).unwrap();
    assert!(store.list().is_empty() && left(&store).is_empty());
}

#[test]
fn snapshot_that_is_being_thawed_is_not_removed() {
    let data = tempfile::tempdir().unwrap();
    let (store, other) = (open(data.path()), open(data.path()));
    let id = put(&store, None, None).object.id.clone();
    let thawing = [store.begin_thaw(&id).unwrap(), other.begin_thaw(&id).unwrap()];
    let refused = other.remove(&id, &unused, true).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotInUse, "{refused}");
    assert_eq!(store.list().len(), 1);
    drop(thawing);
    other.remove(&id, &unused, false).unwrap();
    let gone = store.begin_thaw(&id).unwrap_err();
    assert_eq!(gone.kind, ErrorKind::SnapshotNotFound, "{gone}");
}

#[test]
fn change_sets_and_removes_name_and_labels() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let id = put(&store, Some("web"), None).object.id.clone();
    let labels = |change: &[(&str, Option<&str>)]| {
        let change = change
            .iter()
            .map(|(k, v)| ((*k).to_owned(), v.map(str::to_owned)));
        let change = Change {
            labels: change.collect(),
            ..Change::default()
        };
        store.change(&id, &change).unwrap().object.labels.clone()
    };
    assert_eq!(labels(&[("a", Some("1")), ("b", Some("2"))]).len(), 2);
    assert_eq!(labels(&[("a", None), ("c", None)]).len(), 1);
    let change = Change {
        name: Some(None),
        clear_labels: true,
        ..Change::default()
    };
    let object = store.change(&id, &change).unwrap().object.clone();
    assert_eq!((object.name, object.labels.len()), (None, 0));
}

#[test]
fn name_is_unique_within_a_tenant() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    put(&store, Some("web"), None);
    let acme = put(&store, Some("web"), tenant("acme"));
    let refused = store_over(&store, new(Some("web"), tenant("acme")), None).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::NameInUse);
    let other = put(&store, None, tenant("acme"));
    let change = Change {
        name: Some(Some("web".into())),
        ..Change::default()
    };
    let refused = store.change(&other.object.id, &change).unwrap_err();
    assert!(refused.what.contains(&acme.object.id), "{refused}");
    store.change(&acme.object.id, &change).unwrap();
    // Both were begun before either had the name.
    let (first, second) = (new(Some("db"), None), new(Some("db"), None));
    let (first, second) = (store.begin(first).unwrap(), store.begin(second).unwrap());
    for making in [&first, &second] {
        draft(&making.snapshot()).finish(subject(), None).unwrap();
    }
    first.finish().unwrap();
    assert_eq!(second.finish().unwrap_err().kind, ErrorKind::NameInUse);
    assert_eq!(left(&store).len(), 4);
}

#[test]
fn snapshot_is_found_only_by_who_reaches_it() {
    let data = tempfile::tempdir().unwrap();
    let stores = [open(data.path())];
    let stored = put(&stores[0], Some("web"), tenant("acme"));
    let id = stored.object.id.as_str();
    let found = |wanted: &str, viewer: &Viewer| find(&stores, wanted, viewer).is_ok();
    for wanted in [id, &id[..11], "web"] {
        assert!(found(wanted, &viewer("acme")), "{wanted}");
        assert!(!found(wanted, &viewer("other")), "{wanted}");
        assert!(!found(wanted, &Viewer::default()), "{wanted}");
        assert_eq!(found(wanted, &Viewer::node()), wanted != "web", "{wanted}");
    }
    assert!(!found("", &Viewer::node()));
    let unknown = find(&stores, "webb", &viewer("acme")).unwrap_err();
    assert!(unknown.what.contains("web"), "{unknown}");
}

#[test]
fn base_is_kept_while_a_delta_lies_on_it() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let base = put(&store, None, None);
    let under = lies_on(&base);
    let delta = store_over(&store, new(None, None), Some(under.clone())).unwrap();
    let shown = store.describe_one(&delta).manifest.unwrap().base.unwrap();
    assert_eq!(shown.snapshot.as_ref(), Some(&base.object.id));
    let refused = store.remove(&base.object.id, &unused, true).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotInUse);
    assert!(refused.what.contains(&delta.object.id), "{refused}");
    store.remove(&delta.object.id, &unused, false).unwrap();
    let making = store.begin(new(None, None)).unwrap();
    draft(&making.snapshot())
        .finish(
            Subject {
                base: Some(under),
                ..subject()
            },
            None,
        )
        .unwrap();
    store.remove(&base.object.id, &unused, false).unwrap();
    assert_eq!(making.finish().unwrap_err().kind, ErrorKind::SnapshotNotFound);
    assert!(left(&store).is_empty());
}

#[test]
fn base_of_a_paused_sandbox_is_not_removed_by_force() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let id = put(&store, None, None).object.id.clone();
    let paused = |_: &Stored| Some(User::Paused("bbbbbbbbbbbb".to_owned()));
    let refused = store.remove(&id, &paused, true).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotInUse);
    assert!(refused.what.contains("bbbbbbbbbbbb"), "{refused}");
    assert!(store.get(&id).is_some());
    store.remove(&id, &unused, false).unwrap();
}

#[test]
fn snapshot_of_a_running_sandbox_is_removed_by_force() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let id = put(&store, None, None).object.id.clone();
    let used = |_: &Stored| Some(User::Running("aaaaaaaaaaaa".to_owned()));
    let refused = store.remove(&id, &used, false).unwrap_err();
    assert!(refused.what.contains("aaaaaaaaaaaa"), "{refused}");
    assert_eq!(refused.kind, ErrorKind::SnapshotInUse);
    store.remove(&id, &used, true).unwrap();
    assert_eq!(
        store.remove(&id, &used, true).unwrap_err().kind,
        ErrorKind::SnapshotNotFound
    );
}

#[test]
fn verify_names_every_damaged_file_and_listings_show_it() {
    use std::os::unix::fs::{FileExt, PermissionsExt};
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let stored = put(&store, None, None);
    assert!(store.verify(&stored).unwrap().is_empty());
    for file in ["state", "disks/blk0"] {
        let path = stored.directory.join(file);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(b"X", 3)
            .unwrap();
    }
    let damaged = store.verify(&stored).unwrap();
    assert_eq!(damaged.len(), 2, "{damaged:?}");
    let shown = store.describe(&store.list()).remove(0);
    assert!(shown.manifest.is_none() && shown.error.unwrap().contains("state"));
}

#[test]
fn use_moves_the_time_and_never_back() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let stored = put(&store, None, None);
    let entry = store.0.root.join(&stored.object.id);
    let with = |last_used: u64| {
        let object = Object {
            last_used,
            ..stored.object.clone()
        };
        object::write(&entry, &object).unwrap();
        store.note_use(&object.id);
        store.get(&object.id).unwrap().object.last_used
    };
    assert!(with(7) >= stored.object.created);
    assert_eq!(with(u64::MAX / 2), u64::MAX / 2);
}

#[test]
fn unreadable_record_is_not_listed_and_keeps_its_files() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let stored = put(&store, None, None);
    let record = store.0.root.join(&stored.object.id).join(object::OBJECT);
    for text in ["{torn", r#"{"version": 99}"#, r#"{"version": 2, "id": "x"}"#] {
        fs::write(&record, text).unwrap();
        store.sweep();
        assert!(store.list().is_empty(), "{text}");
        assert!(stored.directory.join("memory").exists(), "{text}");
    }
}

/// What the killed process does: it stores a snapshot, changes it, and removes the one that was there. The sweep at its beginning removes
/// what an earlier process left.
fn killed(data: &Path, old: &str) {
    let store = open(data);
    store.sweep();
    let id = put(&store, Some("new"), None).object.id.clone();
    let change = Change {
        labels: [("a".into(), Some("b".into()))].into(),
        ..Change::default()
    };
    store.change(&id, &change).unwrap();
    store.remove(old, &unused, false).unwrap();
}

/// Runs in a process of its own, which dies at a failpoint.
#[test]
fn store_is_changed_until_it_is_killed() {
    let Ok(point) = std::env::var(KILLED_AT) else {
        return;
    };
    let data = PathBuf::from(std::env::var_os(DATA).unwrap());
    thaw_failpoint::arm(&point).unwrap();
    let stored = open(&data).list();
    killed(&data, &stored[0].object.id);
}

#[test]
fn kill_at_any_step_loses_and_leaks_nothing() {
    let steps = Failpoint::ALL
        .iter()
        .filter(|point| point.name().starts_with("object."));
    let mut kills = 0;
    for point in steps {
        for nth in 1.. {
            let data = tempfile::tempdir().unwrap();
            let store = open(data.path());
            let old = put(&store, Some("old"), None);
            // As a dead maker leaves it.
            let dead = store.0.root.join("0123456789ab");
            fs::create_dir_all(dead.join(SNAPSHOT)).unwrap();
            fs::write(dead.join(SNAPSHOT).join("memory"), b"secret").unwrap();
            let test = "snapshot::store::tests::store_is_changed_until_it_is_killed";
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([test, "--exact", "--nocapture"]);
            command
                .env(KILLED_AT, format!("{point}:{nth}"))
                .env(DATA, data.path());
            let output = command.output().unwrap();
            let what = format!("{point}:{nth}: {output:?}");
            let next = open(data.path());
            next.sweep();
            let listed = next.list();
            let ids: Vec<String> = listed.iter().map(|stored| stored.object.id.clone()).collect();
            assert_eq!(left(&next), ids, "{what}");
            for stored in &listed {
                assert!(next.verify(stored).unwrap().is_empty(), "{what}");
                let entry = next.0.root.join(&stored.object.id);
                assert_eq!(fs::read_dir(entry).unwrap().count(), 2, "{what}");
            }
            if output.status.success() {
                assert!(nth > 1, "no step reaches {point}");
                assert_eq!(ids.len(), 1, "{what}");
                break;
            }
            assert_eq!(output.status.signal(), Some(9), "{what}");
            // The old one is removed only after the new one is there.
            let has_old = ids.contains(&old.object.id);
            assert!(has_old || ids.len() == 1, "{what}");
            kills += 1;
        }
    }
    assert!(kills >= 10, "{kills}");
}

#[derive(Debug, Default)]
struct Told(Mutex<Vec<(String, Option<String>)>>);

impl Observer for Told {
    fn stored(&self, snapshot: thaw_protocol::api::Snapshot) {
        let name = snapshot.name.unwrap_or_default();
        self.0.locked().push((snapshot.id, Some(name)));
    }

    fn removed(&self, id: &str) {
        self.0.locked().push((id.to_owned(), None));
    }
}

#[test]
fn observer_is_told_of_each_change_in_order() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let told = Arc::new(Told::default());
    store.observe(told.clone());
    let below = store.below(&data.path().join("acme")).unwrap();
    let one = put(&store, Some("a"), None).object.id.clone();
    let two = put(&below, Some("b"), tenant("acme")).object.id.clone();
    let unnamed = Change {
        name: Some(None),
        ..Change::default()
    };
    store.change(&one, &unnamed).unwrap();
    store.change(&one, &unnamed).unwrap();
    below.remove(&two, &unused, false).unwrap();
    store.remove(&one, &unused, false).unwrap();
    let stored = |id: &str, name: &str| (id.to_owned(), Some(name.to_owned()));
    let all = [
        stored(&one, "a"),
        stored(&two, "b"),
        stored(&one, ""),
        (two, None),
        (one, None),
    ];
    assert_eq!(*told.0.locked(), all);
}
