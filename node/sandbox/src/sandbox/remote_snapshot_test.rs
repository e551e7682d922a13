//! Snapshots that are fetched while sandboxes run from them, up to the store.

use std::time::{Duration, Instant};

use thaw_test_registry::proxy::{Fault, Link, On, Proxy, Rule};

use super::*;
use crate::images::Images;
use crate::sandbox::remote_ahead::FetchAhead;
use crate::sandbox::remote_ahead::tests::working_set;
use crate::sandbox::remote_files::{MEMORY, Part, RemoteFiles};
use crate::sandbox::remote_snapshot::{RemoteSnapshot, Thawable};

async fn opened(node: &Node, reference: &str) -> Result<Thawable, Error> {
    let silent: Arc<dyn Progress> = Arc::new(Silent);
    node.remote.open(node, &asked(reference), has_all, &silent).await
}

async fn begun(node: &Node, reference: &str) -> Arc<RemoteSnapshot> {
    match opened(node, reference).await.unwrap() {
        Thawable::Remote(remote) => remote,
        stored => panic!("{stored:?}"),
    }
}

/// Waits until the node stores a snapshot.
async fn stored(node: &Node) -> Arc<Stored> {
    loop {
        if let Some(stored) = node.stored.list().first() {
            return stored.clone();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn memory(number: u64) -> Part {
    Part { file: MEMORY, number }
}

fn whole(files: &RemoteFiles, part: Part) -> Vec<u8> {
    let mut bytes = vec![0; crate::snapshot::manifest::CHUNK as usize];
    files.read(part, &mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn remote_snapshot_is_stored_once_all_of_it_was_fetched() {
    let scene = Scene::new().await;
    scene.registry.set_delay(Duration::from_millis(500));
    let to = node(&scene.root.path().join("to"));
    let (first, second) = tokio::join!(begun(&to, &scene.reference), begun(&to, &scene.reference));
    assert!(Arc::ptr_eq(&first, &second), "one is fetched for both");
    assert!(to.stored.list().is_empty() && !first.files.is_present(memory(50)));
    assert_eq!(entries(&to), 1);
    first.files.fetch(memory(50)).await.unwrap();
    assert_eq!(whole(&first.files, memory(50))[..5000], noise(2, 5000));
    first.fetch_disks().await.unwrap();
    let copy = stored(&to).await;
    assert!(to.stored.verify(&copy).unwrap().is_empty());
    assert_eq!(copy.directory, first.registered.directory);
    assert_eq!(copy.object.tenant, asked(&scene.reference).new.tenant);
    match opened(&to, &scene.reference).await.unwrap() {
        Thawable::Stored(directory) => assert_eq!(directory, copy.directory),
        remote => panic!("{remote:?}"),
    }
    // The next process finds it without the registry.
    scene.registry.set_down(true);
    let next = node(&scene.root.path().join("to"));
    let files = next.remote.again(&next, &first.place).await.unwrap();
    assert!(whole(&files, memory(50)) == whole(&first.files, memory(50)));
}

#[tokio::test]
async fn next_process_fetches_again_what_was_not_stored() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    let place = begun(&to, &scene.reference).await.place.clone();
    let next = node(&scene.root.path().join("next"));
    let files = next.remote.again(&next, &place).await.unwrap();
    files.fetch(memory(50)).await.unwrap();
    assert_eq!(whole(&files, memory(50))[..5000], noise(2, 5000));
    let other = crate::state::RemotePlace {
        manifest: Hash::of(b"another"),
        ..place
    };
    let error = next.remote.again(&next, &other).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::SnapshotNotFound, "{error}");
}

#[tokio::test]
async fn tag_that_moves_changes_no_memory() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    let place = begun(&to, &scene.reference).await.place.clone();
    let from = node(&scene.root.path().join("other"));
    let other = super::store(&from, 3, |_| {}, None);
    pushed(&from, &other, &scene.reference).await.unwrap();
    let next = node(&scene.root.path().join("next"));
    let files = next.remote.again(&next, &place).await.unwrap();
    files.fetch(memory(50)).await.unwrap();
    assert_eq!(whole(&files, memory(50))[..5000], noise(2, 5000));
}

#[tokio::test]
async fn registry_that_falls_silent_is_given_up_by_name() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(&scene.registry.host(), Link::default()).unwrap();
    proxy.faults(vec![Rule::always(On::ranges(), Fault::Hang)]);
    let mut to = node(&scene.root.path().join("to"));
    let mut config = crate::config::Config::clone(&to.images.config);
    (config.fetch.budget_ms, config.fetch.answer_ms) = (2000, 500);
    to.images = Images::open_with(&to.paths.images(), config).unwrap();
    let reference = scene.reference.replace(&scene.registry.host(), &proxy.host());
    let remote = begun(&to, &reference).await;
    let since = Instant::now();
    let error = remote.files.fetch(memory(50)).await.unwrap_err();
    let is_named = matches!(
        error.kind,
        ErrorKind::RegistryUnreachable | ErrorKind::RegistryFailed
    );
    assert!(is_named, "{error}");
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    assert!(to.stored.list().is_empty() && !remote.files.is_present(memory(50)));
}

#[tokio::test]
async fn removed_snapshot_is_read_on_and_fetched_again() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    let remote = begun(&to, &scene.reference).await;
    let copy = stored(&to).await;
    // Whoever stores it may have its lock for a moment.
    while to.stored.remove(&copy.object.id, &|_| None, false).is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!copy.directory.exists());
    assert_eq!(whole(&remote.files, memory(50))[..5000], noise(2, 5000));
    let next = node(&scene.root.path().join("to"));
    let files = next.remote.again(&next, &remote.place).await.unwrap();
    files.fetch(memory(50)).await.unwrap();
    assert_eq!(whole(&files, memory(50))[..5000], noise(2, 5000));
}

#[tokio::test]
async fn state_that_the_manifest_does_not_name_is_refused() {
    let scene = Scene::new().await;
    let mut listing = scene.listing.clone();
    let state = state_of(&[(1, 0, b"another"), (0x101, 0, &[0; 40])]);
    scene.exchange(
        &mut listing,
        &format!("/layers/{}", scene.layer("state.v1")),
        &state,
    );
    scene.registry.put_manifest("lie", listing.to_string().as_bytes());
    let to = node(&scene.root.path().join("to"));
    let refused = opened(&to, &scene.reference.replace(":ready", ":lie")).await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind, ErrorKind::SnapshotMalformed);
    assert!(error.what.contains("state"), "{error}");
    assert_eq!(entries(&to), 0);
}

#[tokio::test]
async fn working_set_is_fetched_first_whatever_it_says() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    let remote = begun(&to, &scene.reference).await;
    let disk = |number| Part { file: 1, number };
    let order = |working_set: Option<&[u8]>| {
        let ahead = FetchAhead::of(&remote.files, working_set);
        (ahead.working_set, ahead.rest)
    };
    let all = vec![memory(0), memory(50), disk(0), disk(1)];
    assert_eq!(order(None), (Vec::new(), all.clone()));
    // Its header is not looked at again: a wrong hint costs time.
    let bytes = working_set(&[(512, 3), (50 * 512 + 7, 1), (51 * 512, u32::MAX)]);
    let rest = vec![memory(0), disk(0), disk(1)];
    assert_eq!(order(Some(&bytes)), (vec![memory(50)], rest));
    assert_eq!(order(Some(b"no working set")), (Vec::new(), all));
}
