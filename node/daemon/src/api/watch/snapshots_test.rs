use proptest::prelude::*;
use thaw_protocol::api::SnapshotEvent;

use super::super::Watcher;
use super::*;

fn snapshot(id: usize, last_used: u64) -> Snapshot {
    Snapshot {
        id: format!("{id:012x}"),
        tenant: Some(["acme", "other"][id % 2].into()),
        last_used,
        ..Snapshot::default()
    }
}

fn acme() -> Scope {
    Scope::tenant("acme".parse().unwrap())
}

fn of(scope: Scope) -> Selector {
    Selector::parse(scope, "", "").unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    /// By this process.
    Store(usize, u64),
    Remove(usize),
    /// By another one: `None` removes.
    Elsewhere(usize, Option<u64>),
    /// A caller's list reads the disk: all of it, or one tenant's part.
    Read(bool),
    /// What was last read arrives.
    Arrive,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..6usize, 0..3u64).prop_map(|(id, used)| Step::Store(id, used)),
        (0..6usize).prop_map(Step::Remove),
        (0..6usize, proptest::option::of(0..3u64)).prop_map(|(id, used)| Step::Elsewhere(id, used)),
        any::<bool>().prop_map(Step::Read),
        Just(Step::Arrive),
    ]
}

/// A cache, the disk that it follows, and what a caller has read of that.
struct Model {
    cache: SnapshotCache,
    disk: BTreeMap<String, Snapshot>,
    read: Option<(u64, Scope, Vec<Snapshot>)>,
}

impl Model {
    fn new() -> Model {
        Model {
            cache: SnapshotCache::new(Versions::of_clock()),
            disk: BTreeMap::new(),
            read: None,
        }
    }

    fn read(&mut self, scope: Scope) {
        let found = self.disk.values();
        let found = found.filter(|it| scope.reaches_tenant(it.tenant.as_deref()));
        let found = found.cloned().collect();
        self.read = Some((self.cache.version(), scope, found));
    }

    fn arrive(&mut self) {
        if let Some((before, scope, found)) = self.read.take() {
            self.cache.reconcile(before, &scope, found);
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Store(id, used) => {
                let stored = snapshot(id, used);
                self.disk.insert(stored.id.clone(), stored.clone());
                self.cache.stored(stored);
            }
            Step::Remove(id) => {
                let id = snapshot(id, 0).id;
                self.disk.remove(&id);
                self.cache.removed(&id);
            }
            Step::Elsewhere(id, Some(used)) => {
                let stored = snapshot(id, used);
                self.disk.insert(stored.id.clone(), stored);
            }
            Step::Elsewhere(id, None) => drop(self.disk.remove(&snapshot(id, 0).id)),
            Step::Read(true) => self.read(Scope::node()),
            Step::Read(false) => self.read(acme()),
            Step::Arrive => self.arrive(),
        }
    }

    /// A list, after which the cache is as the disk.
    fn list(&mut self, selector: &Selector) -> SnapshotPage {
        self.read(Scope::node());
        self.arrive();
        self.cache.list(selector, None, usize::MAX)
    }

    /// The snapshots that a caller has which follows the changes after a list.
    fn replay(&self, from: &SnapshotPage, selector: &Selector) -> Vec<Snapshot> {
        let items = from.items.iter().cloned().map(|it| (it.id.clone(), it));
        let mut have: BTreeMap<String, Snapshot> = items.collect();
        for change in self.cache.changes(from.version, usize::MAX).unwrap() {
            let Some(line) = change.line(selector) else {
                continue;
            };
            match serde_json::from_slice::<SnapshotEvent>(&line).unwrap() {
                SnapshotEvent::Added(it) => assert!(have.insert(it.id.clone(), it).is_none(), "added twice"),
                SnapshotEvent::Modified(it) => assert!(have.insert(it.id.clone(), it).is_some(), "not there"),
                SnapshotEvent::Deleted(it) => assert!(have.remove(&it.id).is_some(), "not there"),
                other => panic!("{other:?}"),
            }
        }
        have.into_values().collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_list_and_its_changes_are_what_the_disk_has(
        before in proptest::collection::vec(step(), 0..20),
        after in proptest::collection::vec(step(), 0..40),
        is_node in any::<bool>(),
    ) {
        let mut model = Model::new();
        before.iter().for_each(|step| model.apply(step));
        let selector = of(if is_node { Scope::node() } else { acme() });
        let from = model.list(&selector);
        after.iter().for_each(|step| model.apply(step));
        let now = model.list(&selector);
        prop_assert_eq!(model.replay(&from, &selector), now.items.clone());
        let unversioned = |it: Snapshot| Snapshot { resource_version: None, ..it };
        let listed: Vec<Snapshot> = now.items.into_iter().map(unversioned).collect();
        let disk = model.disk.into_values().filter(|it| selector.wants_snapshot(it));
        prop_assert_eq!(listed, disk.collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn what_was_stored_before_the_first_list_is_no_change() {
    let cache = Arc::new(SnapshotCache::new(Versions::of_clock()));
    cache.stored(snapshot(0, 1));
    assert!(!cache.is_complete());
    let found = vec![snapshot(0, 1), snapshot(1, 1)];
    cache.reconcile(cache.version(), &Scope::node(), found);
    assert!(cache.is_complete());
    let begun = cache.version_before(Duration::from_secs(3600));
    assert_eq!(begun, cache.version());
    let mut watcher = Watcher::start(cache.clone(), Some(begun), of(Scope::node())).unwrap();
    assert_eq!(cache.watchers(), 1);
    cache.stored(snapshot(0, 1));
    assert_eq!(cache.version(), begun, "it is as it was");
    cache.stored(snapshot(0, 2));
    let line = watcher.next().await.unwrap().unwrap();
    let event: SnapshotEvent = serde_json::from_slice(&line).unwrap();
    let now = Snapshot {
        resource_version: Some(begun + 1),
        ..snapshot(0, 2)
    };
    assert_eq!(event, SnapshotEvent::Modified(now));
    assert!(cache.changes(begun - 1, 1).is_err() && cache.changes(begun + 2, 1).is_err());
    cache.close();
    assert_eq!(watcher.next().await.unwrap(), None);
}
