use std::collections::BTreeMap;
use std::sync::Barrier;

use proptest::prelude::*;
use thaw_pools::cgroup::Hierarchy;

use super::super::tests::{abandoned, record};
use super::*;
use crate::error::ErrorKind;
use crate::state::{RunDirectory, SandboxDirectory, Terms};

/// A run directory.
struct Place {
    root: tempfile::TempDir,
    run: RunDirectory,
}

impl Place {
    fn new() -> Place {
        let root = tempfile::tempdir().unwrap();
        let run = RunDirectory::open(root.path()).unwrap();
        Place { root, run }
    }

    fn directory(&self) -> PathBuf {
        self.root.path().join("names")
    }

    fn is_free(&self, record: &Record) -> bool {
        match self.run.hold_name(record) {
            Ok(_) => true,
            Err(e) => {
                assert_eq!(e.kind, ErrorKind::NameInUse);
                false
            }
        }
    }

    /// Leaves what a process leaves that is killed after so many steps of a creation.
    fn killed_after(&self, steps: usize, record: &Record) {
        let names = self.run.names();
        let entry = names.entry(record).unwrap();
        let Claimed::Free(claim) = names.claim(entry, |_| false).unwrap() else {
            panic!("{record:?}")
        };
        if steps > 0 {
            claim.write(&record.id).unwrap();
        }
        if steps > 1 {
            fs::create_dir_all(self.run.directory(&record.id)).unwrap();
        }
        // The lock is released, and the entry stays.
        drop(claim.settle());
    }
}

fn named(id: &str, tenant: Option<&str>, name: &str) -> Record {
    Record {
        name: Some(name.into()),
        terms: Terms {
            tenant: tenant.map(|tenant| tenant.parse().unwrap()),
            ..Terms::default()
        },
        ..record(id, None, true)
    }
}

fn web(id: &str) -> Record {
    named(id, None, "web")
}

#[test]
fn entry_is_named_by_a_hash_and_holds_the_id() {
    let place = Place::new();
    let made = place.run.create(&named("0123456789ab", Some("acme"), "web"));
    let entry = place
        .directory()
        .join("41df0c0dc15950c34ef1d0d814875c23e13bf3f413dfac34f289048bff6b7894");
    assert_eq!(fs::read(&entry).unwrap(), b"0123456789ab");
    let modes = [&entry, &place.directory()].map(|path| fs::metadata(path).unwrap().mode() & 0o777);
    assert_eq!(modes, [0o600, 0o700]);
    drop(made.unwrap());
    assert!(!place.directory().exists(), "it goes with its last entry");
}

#[test]
fn damaged_entry_leaves_its_name_free() {
    let place = Place::new();
    let entry = place.run.names().entry(&web("a")).unwrap();
    for text in [&b""[..], b"..", b"a/b", b"\xff", &[b'a'; 100]] {
        fs::create_dir_all(place.directory()).unwrap();
        fs::write(&entry, text).unwrap();
        assert!(place.is_free(&web("a")), "{text:?}");
    }
}

#[test]
fn empty_directory_of_names_is_removed_at_the_next_start() {
    let place = Place::new();
    fs::create_dir(place.directory()).unwrap();
    place.run.clean(&Hierarchy::None);
    assert!(!place.directory().exists());
}

#[test]
fn sandbox_of_an_earlier_release_keeps_its_name() {
    let place = Place::new();
    let old = place.run.create(&web("old")).unwrap();
    fs::remove_dir_all(place.directory()).unwrap();
    place.run.index_names();
    assert!(!place.is_free(&web("new")));
    drop(old);
    assert!(place.is_free(&web("new")) && !place.directory().exists());
}

#[test]
fn one_of_several_creations_of_a_name_wins() {
    let place = Place::new();
    for round in 0..50 {
        let start = Barrier::new(4);
        let made: Vec<_> = std::thread::scope(|scope| {
            let create = |n: usize| {
                let (run, start) = (&place.run, &start);
                scope.spawn(move || {
                    let record = web(&format!("{round}-{n}"));
                    start.wait();
                    run.create(&record)
                })
            };
            let threads: Vec<_> = (0..4).map(create).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
        let refused = made.iter().filter_map(|made| made.as_ref().err());
        refused.for_each(|e| assert_eq!(e.kind, ErrorKind::NameInUse));
    }
    assert!(!place.directory().exists());
}

#[test]
fn name_is_free_after_deletions_beside_creations() {
    let place = Place::new();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let run = &place.run;
            scope.spawn(move || {
                for n in 0..100 {
                    drop(run.create(&web(&format!("{thread}-{n}"))));
                }
            });
        }
    });
    assert!(place.is_free(&web("last")));
    assert!(!place.directory().exists() && place.run.list().is_empty());
}

/// What happens to the sandbox of a name.
#[derive(Clone, Copy, Debug)]
enum Event {
    Create,
    Delete,
    /// A process is killed after so many steps of the creation.
    Killed(usize),
    /// It is killed after all of them.
    Abandoned,
    Clean,
}

const TENANTS: [Option<&str>; 2] = [None, Some("acme")];
const NAMES: [&str; 2] = ["web", "db"];

fn events() -> impl Strategy<Value = Vec<(Event, usize, usize)>> {
    let event = prop_oneof![
        Just(Event::Create),
        Just(Event::Delete),
        (0..3usize).prop_map(Event::Killed),
        Just(Event::Abandoned),
        Just(Event::Clean),
    ];
    prop::collection::vec((event, 0..2usize, 0..2usize), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn name_is_in_use_exactly_while_its_sandbox_exists(events in events()) {
        let place = Place::new();
        // By tenant and name. `None`: its owner is dead.
        let mut living: BTreeMap<(usize, usize), Option<SandboxDirectory>> = BTreeMap::new();
        for (n, (event, tenant, name)) in events.into_iter().enumerate() {
            let record = named(&format!("{n:012x}"), TENANTS[tenant], NAMES[name]);
            let key = (tenant, name);
            let is_used = living.contains_key(&key);
            match event {
                Event::Create => {
                    let made = place.run.create(&record);
                    prop_assert_eq!(made.is_err(), is_used);
                    if let Ok(directory) = made {
                        living.insert(key, Some(directory));
                    }
                }
                Event::Delete if living.get(&key).is_some_and(Option::is_some) => drop(living.remove(&key)),
                Event::Killed(steps) if !is_used => place.killed_after(steps, &record),
                Event::Abandoned if !is_used => {
                    abandoned(&place.run, &record);
                    living.insert(key, None);
                }
                Event::Clean => {
                    place.run.clean(&Hierarchy::None);
                    living.retain(|_, directory| directory.is_some());
                }
                _ => {}
            }
        }
        for (tenant, name) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let is_free = place.is_free(&named("other", TENANTS[tenant], NAMES[name]));
            prop_assert_eq!(is_free, !living.contains_key(&(tenant, name)));
        }
        drop(living);
        place.run.clean(&Hierarchy::None);
        prop_assert!(!place.directory().exists());
    }
}
