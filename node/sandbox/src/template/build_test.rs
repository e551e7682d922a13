//! Builds run one at a time, end complete or without a trace, and are signed if required.

use std::future::pending;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex};

use thaw_protocol::control::CpuBaseline;
use tokio::sync::Notify;

use super::*;
use crate::snapshot::Hold;
use crate::snapshot::signature::tests::key_pair;
use crate::template::store::tests::store;

pub(in crate::template) fn recipe(vcpus: u8, memory_mib: u32) -> Recipe {
    Recipe {
        shape: Shape {
            vcpus,
            memory_mib,
            cpu: CpuBaseline::Host,
        },
        command_line: "quiet".into(),
    }
}

static SILENT: LazyLock<Progress> = LazyLock::new(|| Arc::new(|_| ()));

fn freeze(into: &FrozenInto) -> Result<(), Error> {
    into.state.write_all_at(b"state", 0).unwrap();
    into.memory.set_len(1 << 20).unwrap();
    into.memory.write_all_at(b"memory", 4096).unwrap();
    into.working_set.write_all_at(b"pages", 0).unwrap();
    Ok(())
}

pub(in crate::template) async fn built(store: &Templates, recipe: Recipe) -> Template {
    let freeze = async |into: FrozenInto| freeze(&into);
    store.get_by(recipe, None, &SILENT, freeze).await.unwrap()
}

/// The names in the store's directory, of templates and of anything else.
fn names(store: &Templates) -> Vec<String> {
    let entries = fs::read_dir(store.root()).into_iter().flatten();
    let mut names: Vec<String> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn what_is_built_is_there_the_next_time() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let steps = Arc::new(Mutex::new(Vec::new()));
    let told = steps.clone();
    let progress: Progress = Arc::new(move |step| told.lock().unwrap().push(step));
    let work = async |into: FrozenInto| freeze(&into);
    let first = store.get_by(recipe(4, 128), None, &progress, work).await.unwrap();
    assert!(first.built);
    assert_eq!(*steps.lock().unwrap(), [Step::Hashing, Step::Ready]);
    assert_eq!(
        names(&store),
        [first.key.as_str()],
        "no lock and nothing half made stays"
    );
    let subject = &first.registered.manifest.subject;
    assert_eq!((subject.machine.vcpus, subject.machine.memory_mib), (4, 128));
    assert_eq!(subject.kernel, Some(crate::snapshot::Hash::of(b"kernel")));
    assert_eq!(subject.command_line.as_deref(), Some("quiet"));
    assert!(first.registered.files.working_set.is_some());
    let never = async |_: FrozenInto| -> Result<(), Error> { panic!("it is there") };
    let second = store.get_by(recipe(4, 128), None, &SILENT, never).await.unwrap();
    assert!(!second.built && second.registered.hash == first.registered.hash);
    let other = built(&store, recipe(4, 256)).await;
    assert!(other.built && other.key != first.key);
}

#[tokio::test]
async fn builders_at_once_build_one() {
    let place = tempfile::tempdir().unwrap();
    let (one, two) = (
        store(place.path(), "kernel", Hold::Files),
        store(place.path(), "kernel", Hold::Files),
    );
    let builds = AtomicU32::new(0);
    let (building, waiting) = (Notify::new(), Arc::new(Notify::new()));
    let first = one.get_by(recipe(4, 128), None, &SILENT, async |into| {
        builds.fetch_add(1, Ordering::Relaxed);
        building.notify_one();
        // Not before the other builder waits for the lock.
        waiting.notified().await;
        freeze(&into)
    });
    let second = async {
        building.notified().await;
        let met = waiting.clone();
        let progress: Progress = Arc::new(move |step| {
            assert_eq!(step, Step::Waiting);
            met.notify_one();
        });
        let never = async |_: FrozenInto| -> Result<(), Error> { panic!("built twice") };
        two.get_by(recipe(4, 128), None, &progress, never).await
    };
    let (first, second) = tokio::join!(first, second);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert!(first.built && !second.built);
    assert_eq!(first.registered.hash, second.registered.hash);
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    assert_eq!(names(&one), [first.key.as_str()]);
}

#[tokio::test]
async fn who_waited_for_a_build_that_failed_builds() {
    let place = tempfile::tempdir().unwrap();
    let (one, two) = (
        store(place.path(), "kernel", Hold::Files),
        store(place.path(), "kernel", Hold::Files),
    );
    let (building, waiting) = (Notify::new(), Arc::new(Notify::new()));
    let first = one.get_by(recipe(4, 128), None, &SILENT, async |_| {
        building.notify_one();
        waiting.notified().await;
        Err(Error::new(ErrorKind::GuestNotReady, "no"))
    });
    let second = async {
        building.notified().await;
        let met = waiting.clone();
        let progress: Progress = Arc::new(move |step| {
            if step == Step::Waiting {
                met.notify_one();
            }
        });
        two.get_by(recipe(4, 128), None, &progress, async |into| freeze(&into))
            .await
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first.unwrap_err().kind, ErrorKind::GuestNotReady);
    let second = second.unwrap();
    assert!(second.built);
    assert_eq!(names(&two), [second.key.as_str()]);
}

#[tokio::test]
async fn a_build_that_fails_or_is_given_up_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let fails = async |_: FrozenInto| Err(Error::new(ErrorKind::GuestNotReady, "no"));
    let failed = store.get_by(recipe(4, 128), None, &SILENT, fails).await;
    assert_eq!(failed.unwrap_err().kind, ErrorKind::GuestNotReady);
    assert_eq!(names(&store), [""; 0]);
    let begun = Notify::new();
    let build = store.get_by(recipe(4, 128), None, &SILENT, async |into| {
        freeze(&into)?;
        begun.notify_one();
        pending().await
    });
    tokio::select! {
        _ = build => panic!("it cannot end"),
        () = begun.notified() => {}
    }
    assert_eq!(names(&store), [""; 0]);
}

#[tokio::test]
async fn a_kernel_replaced_while_it_boots_makes_no_template() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let replaced = store.get_by(recipe(4, 128), None, &SILENT, async |into| {
        fs::write(place.path().join("kernel"), "another").unwrap();
        freeze(&into)
    });
    let failure = replaced.await.unwrap_err();
    assert!(failure.what.contains("changed while"), "{failure}");
    assert_eq!(names(&store), [""; 0]);
}

#[tokio::test]
async fn template_is_signed_or_not_built_where_keys_are_trusted() {
    let place = tempfile::tempdir().unwrap();
    let keys = place.path().join("data/keys");
    fs::create_dir_all(&keys).unwrap();
    let ours = key_pair(&keys, "ours");
    let theirs = key_pair(place.path(), "theirs");
    let store = store(place.path(), "kernel", Hold::Files);
    let with = async |key: Option<&Path>| {
        let key = key.map(|k| SigningKey::load(k).unwrap());
        let booted = AtomicU32::new(0);
        let freeze = async |into: FrozenInto| {
            booted.fetch_add(1, Ordering::Relaxed);
            freeze(&into)
        };
        let got = store.get_by(recipe(4, 128), key, &SILENT, freeze).await;
        (got, booted.into_inner())
    };
    for refused in [None, Some(theirs.as_path())] {
        let (got, booted) = with(refused).await;
        assert_eq!((got.unwrap_err().kind, booted), (ErrorKind::SnapshotSignature, 0));
    }
    let (got, _) = with(Some(&ours)).await;
    let template = got.unwrap();
    assert!(template.built);
    assert!(!with(None).await.0.unwrap().built, "it is there, and signed");
    fs::remove_file(store.directory(&template.key).join("manifest.sig")).unwrap();
    let (got, booted) = with(Some(&ours)).await;
    assert_eq!((got.unwrap_err().kind, booted), (ErrorKind::SnapshotSignature, 0));
}

#[tokio::test]
async fn template_in_the_place_of_another_is_refused_with_reason() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let small = built(&store, recipe(1, 128)).await;
    let loud = built(
        &store,
        Recipe {
            command_line: "loud".into(),
            ..recipe(1, 128)
        },
    )
    .await;
    let (wanted, other) = (store.directory(&small.key), store.directory(&loud.key));
    fs::remove_dir_all(&wanted).unwrap();
    fs::rename(other, &wanted).unwrap();
    let never = async |_: FrozenInto| -> Result<(), Error> { panic!("something is there") };
    let refused = store
        .get_by(recipe(1, 128), None, &SILENT, never)
        .await
        .unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotIncompatible);
    assert!(
        refused.what.contains("kernel command line") && refused.what.contains(wanted.to_str().unwrap()),
        "{refused}"
    );
}

/// Changes a byte of a template's memory.
fn damage(store: &Templates, key: &Key) {
    let memory = store.directory(key).join("memory");
    let file = File::options().write(true).open(memory).unwrap();
    file.write_all_at(b"M", 4096).unwrap();
}

#[tokio::test]
async fn a_damaged_template_is_built_again_once() {
    let place = tempfile::tempdir().unwrap();
    for hold in [Hold::Files, Hold::Sealed] {
        let key = built(&store(place.path(), "kernel", hold), recipe(4, 128))
            .await
            .key;
        for spoil in [damage, |store: &Templates, key: &Key| {
            fs::remove_file(store.directory(key).join("manifest.json")).unwrap();
        }] {
            let store = store(place.path(), "kernel", hold);
            spoil(&store, &key);
            let again = built(&store, recipe(4, 128)).await;
            assert!(again.built && again.key == key);
            store.verify(&key).unwrap();
            let entry = store.entry(key.clone(), "quiet");
            assert!(entry.damaged.is_none() && entry.manifest.is_ok());
            let never = async |_: FrozenInto| -> Result<(), Error> { panic!("it is whole") };
            let found = store.get_by(recipe(4, 128), None, &SILENT, never).await.unwrap();
            assert_eq!(found.registered.hash, again.registered.hash);
            assert_eq!(names(&store), [key.as_str()], "nothing of the damaged one stays");
        }
    }
}

#[tokio::test]
async fn starts_that_meet_a_damaged_template_at_once_build_one() {
    let place = tempfile::tempdir().unwrap();
    let (one, two) = (
        store(place.path(), "kernel", Hold::Files),
        store(place.path(), "kernel", Hold::Sealed),
    );
    let key = built(&one, recipe(4, 128)).await.key;
    damage(&one, &key);
    let (building, waiting) = (Notify::new(), Arc::new(Notify::new()));
    let first = one.get_by(recipe(4, 128), None, &SILENT, async |into| {
        building.notify_one();
        waiting.notified().await;
        freeze(&into)
    });
    let second = async {
        building.notified().await;
        let met = waiting.clone();
        let progress: Progress = Arc::new(move |step| {
            assert_eq!(step, Step::Waiting);
            met.notify_one();
        });
        let never = async |_: FrozenInto| -> Result<(), Error> { panic!("built twice") };
        two.get_by(recipe(4, 128), None, &progress, never).await
    };
    let (first, second) = tokio::join!(first, second);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert!(first.built && !second.built);
    assert_eq!(first.registered.hash, second.registered.hash);
}

#[tokio::test]
async fn damaged_template_stays_if_it_may_not_be_rebuilt() {
    let place = tempfile::tempdir().unwrap();
    let keys = place.path().join("data/keys");
    fs::create_dir_all(&keys).unwrap();
    let ours = key_pair(&keys, "ours");
    let store = store(place.path(), "kernel", Hold::Files);
    let signed = async |into: FrozenInto| freeze(&into);
    let key = SigningKey::load(&ours).unwrap();
    let template = store
        .get_by(recipe(4, 128), Some(key), &SILENT, signed)
        .await
        .unwrap();
    damage(&store, &template.key);
    let never = async |_: FrozenInto| -> Result<(), Error> { panic!("nobody would sign it") };
    let refused = store
        .get_by(recipe(4, 128), None, &SILENT, never)
        .await
        .unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotDamaged);
    assert_eq!(names(&store), [template.key.as_str()]);
    assert!(store.entry(template.key, "quiet").damaged.is_some());
}
