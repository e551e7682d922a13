//! Tests of the store: finding, checking, holding and removing templates.

use std::time::{Duration, Instant};

use super::*;
use crate::template::build::tests::{built, recipe};

/// A store whose kernel, guest image and VMM are test files, the kernel with these contents.
pub(in crate::template) fn store(place: &Path, kernel: &str, hold: Hold) -> Templates {
    let file = |name: &str| {
        let path = place.join(name);
        if !path.exists() {
            fs::write(&path, name).unwrap();
        }
        path
    };
    let paths = Paths {
        data: place.join("data"),
        run: place.join("run"),
        kernel: file(kernel),
        guest_image: file("guest"),
    };
    let mut templates = Templates::open(&paths, hold, Signatures::AsKeysSay).unwrap();
    templates.vmm = Some(file("vmm"));
    templates
}

#[tokio::test]
async fn a_template_of_what_is_no_more_is_stale_and_says_why() {
    let place = tempfile::tempdir().unwrap();
    let old = store(place.path(), "kernel", Hold::Files);
    let key = built(&old, recipe(4, 128)).await.key;
    let stale = |store: &Templates, words: &str| store.entry(key.clone(), words).stale;
    assert_eq!(stale(&old, "quiet"), None);
    let new = store(place.path(), "kernel-2", Hold::Files);
    assert_eq!(stale(&new, "quiet").as_deref(), Some("of another kernel"));
    assert_eq!(
        stale(&new, "loud").as_deref(),
        Some("of another kernel, kernel command line")
    );
    fs::write(place.path().join("vmm"), "vmm 2").unwrap();
    fs::write(place.path().join("guest"), "guest 2").unwrap();
    assert_eq!(
        stale(&old, "quiet").as_deref(),
        Some("of another guest image, thaw-vmm")
    );
    let listed = new.list("quiet");
    assert_eq!(listed.len(), 1);
    assert!(listed[0].disk_bytes > 0 && listed[0].manifest.is_ok());
    fs::remove_file(place.path().join("kernel-2")).unwrap();
    assert!(stale(&new, "quiet").unwrap().contains("kernel-2"));
}

#[tokio::test]
async fn template_at_hand_is_the_best_of_those_held() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Sealed);
    let line = super::super::command_line::command_line();
    let at_hand = |vcpus, memory| {
        let found = store.at_hand(vcpus, memory);
        found.map(|(shape, _)| (shape.vcpus, shape.memory_mib))
    };
    assert_eq!(at_hand(1, 1024), None);
    for (vcpus, memory) in [(4, 128), (4, 512), (16, 1024)] {
        let recipe = Recipe {
            command_line: line.clone(),
            ..recipe(vcpus, memory)
        };
        drop(built(&store, recipe.clone()).await);
        // A file that was written just now is hashed each time: a change might not show.
        let since = Instant::now();
        while store.remembered_ingredients(&recipe).is_none() {
            assert!(since.elapsed() < Duration::from_secs(10), "nothing is remembered");
            std::thread::sleep(Duration::from_millis(10));
            store.ingredients(&recipe).unwrap();
        }
    }
    assert_eq!(
        (at_hand(1, 1024), at_hand(4, 511)),
        (Some((4, 512)), Some((4, 128)))
    );
    assert_eq!((at_hand(5, 1024), at_hand(5, 1023)), (Some((16, 1024)), None));
    fs::write(place.path().join("guest"), "another guest").unwrap();
    assert_eq!(at_hand(1, 1024), None);
}

#[test]
fn sizes_that_a_node_makes_by_itself_fit_best() {
    let boot = |memory| Shape::fitting(1, memory).memory_mib;
    assert_eq!(
        [64, 128, 200, 256, 700, 1024].map(boot),
        [64, 128, 128, 256, 512, 1024]
    );
    assert_eq!(boot(1 << 16), 2048);
    assert_eq!(Shape::fitting(9, 512).vcpus, 16);
}

#[tokio::test]
async fn template_serves_many_sizes_and_another_where_it_must() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let shape = |vcpus, memory| {
        let shape = store.shape_for(vcpus, memory, "quiet");
        (shape.vcpus, shape.memory_mib)
    };
    for (vcpus, memory) in [(2, 128), (3, 512), (4, 2048)] {
        assert_eq!(shape(vcpus, memory), (4, 128));
    }
    assert_eq!((shape(1, 128), shape(1, 2048)), ((1, 128), (1, 128)));
    assert_eq!((shape(5, 128), shape(1, 64)), ((16, 128), (1, 64)));
    drop(built(&store, recipe(8, 256)).await);
    assert_eq!(shape(6, 1024), (8, 256), "it is there, and the common one is not");
    assert_eq!(shape(1, 1024), (8, 256), "likewise");
    assert_eq!(shape(1, 128), (1, 128), "it has too much memory");
    assert_eq!(shape(9, 1024), (16, 128), "it has too few CPUs");
    drop(built(&store, recipe(4, 128)).await);
    assert_eq!(shape(1, 1024), (4, 128));
    drop(built(&store, recipe(4, 512)).await);
    assert_eq!(shape(1, 1024), (4, 512), "the most boot memory");
    assert_eq!((shape(1, 511), shape(6, 1024)), ((4, 128), (8, 256)));
    drop(built(&store, recipe(1, 128)).await);
    assert_eq!(shape(1, 1024), (1, 128), "no more vCPUs than it uses");
    assert_eq!(shape(2, 1024), (4, 512), "it has too few CPUs");
    // A template of another command line does not count.
    assert_eq!(store.shape_for(6, 1024, "loud").vcpus, 16);
}

#[tokio::test]
async fn damaged_template_with_more_vcpus_is_chosen_before_a_new_one() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let key = built(&store, recipe(4, 128)).await.key;
    assert_eq!(store.shape_for(1, 128, "quiet").vcpus, 4);
    fs::remove_file(store.directory(&key).join("manifest.json")).unwrap();
    assert_eq!(store.shape_for(1, 128, "quiet").vcpus, 4);
    fs::remove_dir_all(store.directory(&key)).unwrap();
    assert_eq!(store.shape_for(1, 128, "quiet").vcpus, 1);
}

#[tokio::test]
async fn a_template_is_found_by_the_beginning_of_its_key_and_removed() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let key = built(&store, recipe(4, 128)).await.key;
    drop(built(&store, recipe(2, 128)).await);
    assert_eq!(store.find(key.as_str()).unwrap(), key);
    assert_eq!(store.find(key.short()).unwrap(), key);
    for unfit in ["", "zz", "../data"] {
        assert_eq!(
            store.find(unfit).unwrap_err().kind,
            ErrorKind::SnapshotNotFound,
            "{unfit}"
        );
    }
    store.remove(&key, &|_| None).unwrap();
    assert!(store.find(key.as_str()).is_err());
    assert_eq!(store.list("quiet").len(), 1);
    assert!(store.open_existing(&key).unwrap().is_none());
}

#[tokio::test]
async fn template_that_something_lies_on_is_not_removed() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let template = built(&store, recipe(4, 128)).await;
    let (key, directory) = (&template.key, store.directory(&template.key));
    assert!(store.holds(&directory) && !store.holds(place.path()));
    let user_of = |hash: Hash| (hash == template.registered.hash).then(|| "snapshot abc".to_owned());
    let refused = store.remove(key, &user_of).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotInUse);
    assert!(refused.what.contains("snapshot abc"), "{refused}");
    let kept = crate::snapshot::kept::Kept::take(&directory).unwrap();
    let refused = store.remove(key, &|_| None).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotInUse, "{refused}");
    assert!(store.open_existing(key).unwrap().is_some());
    drop(kept);
    store.remove(key, &|_| None).unwrap();
    assert!(!directory.exists());
}

#[tokio::test]
async fn a_process_that_lives_long_keeps_one_copy_of_its_own() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Sealed);
    let template = built(&store, recipe(4, 128)).await;
    let again = store.clone().open_existing(&template.key).unwrap().unwrap();
    assert!(Arc::ptr_eq(&again, &template.registered));
    fs::remove_dir_all(store.directory(&template.key)).unwrap();
    assert!(
        store.open_existing(&template.key).unwrap().is_some(),
        "it needs the file no more"
    );
}

#[tokio::test]
async fn a_damaged_template_is_not_opened_and_listed_as_damaged() {
    let place = tempfile::tempdir().unwrap();
    for hold in [Hold::Files, Hold::Sealed] {
        let key = built(&store(place.path(), "kernel", Hold::Files), recipe(4, 128))
            .await
            .key;
        let store = store(place.path(), "kernel", hold);
        let memory = store.directory(&key).join("memory");
        let mut bytes = fs::read(&memory).unwrap();
        bytes[5000] ^= 1;
        fs::remove_file(&memory).unwrap();
        fs::write(&memory, &bytes).unwrap();
        let failure = store.open_existing(&key).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::SnapshotDamaged);
        assert!(failure.to_string().contains("memory: chunk 0"), "{failure}");
        assert!(
            failure.to_string().contains(&format!("thaw template rm {key}")),
            "{failure}"
        );
        let damaged = store.entry(key.clone(), "quiet").damaged;
        assert!(damaged.is_some_and(|what| what.starts_with("memory: chunk 0")));
        fs::remove_file(store.directory(&key).join("manifest.json")).unwrap();
        assert_eq!(
            store.open_existing(&key).unwrap_err().kind,
            ErrorKind::SnapshotDamaged
        );
        let entry = store.entry(key.clone(), "quiet");
        assert!(entry.manifest.is_err() && entry.damaged.is_some());
        store.remove(&key, &|_| None).unwrap();
        assert!(built(&store, recipe(4, 128)).await.built);
        store.remove(&key, &|_| None).unwrap();
    }
}

#[tokio::test]
async fn damage_found_by_verify_is_remembered_until_a_file_changes() {
    let place = tempfile::tempdir().unwrap();
    let store = store(place.path(), "kernel", Hold::Files);
    let key = built(&store, recipe(4, 128)).await.key;
    store.verify(&key).unwrap();
    let state = store.directory(&key).join("state");
    let whole = fs::read(&state).unwrap();
    let damaged = || store.entry(key.clone(), "quiet").damaged;
    fs::write(&state, "STATE").unwrap();
    assert_eq!(damaged(), None, "nobody has looked");
    store.verify(&key).unwrap_err();
    assert_eq!(damaged().as_deref(), Some("state"));
    fs::remove_file(&state).unwrap();
    fs::write(&state, whole).unwrap();
    assert_eq!(damaged(), None, "it is another file");
    store.verify(&key).unwrap();
}
