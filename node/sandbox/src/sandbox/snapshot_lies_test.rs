//! Registries that lie about a snapshot, and pulls that are killed: nothing is left of them.

use std::os::unix::process::ExitStatusExt;

use thaw_failpoint::Failpoint;

use super::*;

/// Names the failpoint, the directory of the node and the reference to the process that is killed.
const KILLED_AT: &str = "THAW_TEST_PULL_KILLED_AT";
const ROOT: &str = "THAW_TEST_PULL_ROOT";
const REFERENCE: &str = "THAW_TEST_PULL_REFERENCE";

#[tokio::test]
async fn lying_bytes_leave_nothing() {
    let scene = Scene::new().await;
    for at in ["chunks.v1", "table.v1", "state.v1"] {
        let layer = scene.layer(at);
        let whole = scene.blob(&scene.listing["layers"][layer]);
        let name = scene.listing["layers"][layer]["digest"]
            .as_str()
            .unwrap()
            .to_owned();
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        for lie in [
            flipped,
            whole[..whole.len() - 1].to_vec(),
            [&whole[..], b"more"].concat(),
        ] {
            scene.registry.lie(&name, &lie);
            let (error, _) = scene.refused(&scene.listing).await;
            let is_named = matches!(error.kind, ErrorKind::DigestMismatch | ErrorKind::LayerTruncated);
            assert!(is_named, "{at}: {error}");
        }
        scene.registry.lie(&name, &whole);
    }
    let to = node(&scene.root.path().join("to"));
    pulled(&to, &scene.reference).await.unwrap();
}

#[tokio::test]
async fn documents_that_contradict_each_other_are_refused() {
    let scene = Scene::new().await;
    let table = scene.layer("table.v1");
    let pack = scene.layer("chunks.v1");
    let of_table = scene.blob(&scene.listing["layers"][table]);
    let of_pack = scene.blob(&scene.listing["layers"][pack]);
    let mut lies = Vec::new();
    let mut lie = |pointer: String, bytes: &[u8]| {
        let mut listing = scene.listing.clone();
        scene.exchange(&mut listing, &pointer, bytes);
        lies.push(listing);
    };
    // Right digests of wrong contents: a changed chunk, a hash of another, a place elsewhere, other sizes.
    let mut flipped = of_pack.clone();
    flipped[0] ^= 1;
    lie(format!("/layers/{pack}"), &flipped);
    lie(format!("/layers/{pack}"), &[&of_pack[..], b"more"].concat());
    for at in [
        12,
        16,
        24,
        32,
        32 + 36,
        32 + 40,
        of_table.len() - 8,
        of_table.len() - 1,
    ] {
        let mut flipped = of_table.clone();
        flipped[at] ^= 1;
        lie(format!("/layers/{table}"), &flipped);
    }
    for (field, value) in [
        ("data_bytes", json!(4096)),
        ("memory_bytes", json!(u64::MAX)),
        ("guest_image", json!(null)),
        ("cpuid", json!(Config::encoded_cpuid(&[1; 40]))),
        (
            "images",
            json!([{"digest": digest(b"x"), "metadata": Hash::of(b"x")}]),
        ),
        (
            "images",
            json!([{"reference": "oci:/etc", "digest": digest(b"x"), "metadata": Hash::of(b"x")}]),
        ),
    ] {
        let mut config: Value = serde_json::from_slice(&scene.blob(&scene.listing["config"])).unwrap();
        config[field] = value;
        lie("/config".into(), config.to_string().as_bytes());
    }
    let swapped = scene.blob(&scene.listing["layers"][scene.layer("state.v1")]);
    lie(format!("/layers/{}", scene.layer("manifest.v1+json")), &swapped);
    for listing in lies {
        let (error, _) = scene.refused(&listing).await;
        assert_eq!(error.kind, ErrorKind::SnapshotMalformed, "{error}");
    }
}

#[tokio::test]
async fn tag_that_moves_during_a_pull_changes_nothing() {
    let scene = Scene::new().await;
    let (from, to) = (
        node(&scene.root.path().join("other")),
        node(&scene.root.path().join("to")),
    );
    let silent: Arc<dyn Progress> = Arc::new(Silent);
    let wanted = asked(&scene.reference);
    let found = Found::open(&to, &wanted, &silent).await.unwrap();
    let digest = found.digest;
    let other = store(&from, 3, |_| {}, None);
    pushed(&from, &other, &scene.reference).await.unwrap();
    let pulling = found.begin(&to, &wanted, has_all, &silent).await.unwrap();
    let pulling = pulling.fetch(&silent).await.unwrap();
    let first = pulling.finish(&to).await.unwrap();
    let config = Config::decode(&scene.blob(&scene.listing["config"])).unwrap();
    assert_eq!(first.hash(), Some(config.manifest.blake3));
    assert!(to.stored.verify(&first).unwrap().is_empty());
    to.stored.remove(&first.object.id, &|_| None, false).unwrap();

    // The digest still names the first one, and the tag the other.
    let pinned = format!("{}@{digest}", scene.reference);
    for (reference, hash) in [(&pinned, first.hash()), (&scene.reference, other.hash())] {
        let pulled = pulled(&to, reference).await.unwrap();
        assert_eq!(pulled.hash(), hash, "{reference}");
        to.stored.remove(&pulled.object.id, &|_| None, false).unwrap();
    }
    // A registry that sends the other one for that digest is refused.
    let theirs = scene.registry.manifest("ready").unwrap();
    scene.registry.put_manifest(&digest.to_string(), &theirs);
    let error = pulled(&to, &pinned).await.unwrap_err();
    assert_eq!((error.kind, entries(&to)), (ErrorKind::DigestMismatch, 0));
}

#[tokio::test]
async fn two_pulls_of_one_name_store_one_snapshot() {
    let scene = Scene::new().await;
    let to = node(&scene.root.path().join("to"));
    let both = tokio::join!(pulled(&to, &scene.reference), pulled(&to, &scene.reference));
    let (stored, refused) = match both {
        (Ok(stored), Err(refused)) | (Err(refused), Ok(stored)) => (stored, refused),
        both => panic!("{both:?}"),
    };
    assert_eq!((refused.kind, entries(&to)), (ErrorKind::NameInUse, 1));
    assert!(to.stored.verify(&stored).unwrap().is_empty());
}

#[tokio::test]
async fn chunks_of_another_snapshot_are_refused() {
    let scene = Scene::new().await;
    let from = node(&scene.root.path().join("other"));
    let other = store(&from, 3, |_| {}, None);
    pushed(&from, &other, &scene.reference.replace("ready", "other"))
        .await
        .unwrap();
    let theirs: Value = serde_json::from_slice(&scene.registry.manifest("other").unwrap()).unwrap();
    // A sound table and its sound packs, under the manifest of the first.
    let mut listing = scene.listing.clone();
    for at in scene.layer("table.v1")..listing["layers"].as_array().unwrap().len() {
        listing["layers"][at] = theirs["layers"][at].clone();
    }
    let (error, _) = scene.refused(&listing).await;
    assert_eq!(error.kind, ErrorKind::SnapshotMalformed);
    assert!(error.what.contains("memory: chunk"), "{error}");
}

#[tokio::test]
async fn huge_sizes_and_other_artifacts_fetch_nothing() {
    let scene = Scene::new().await;
    for at in 0..scene.listing["layers"].as_array().unwrap().len() {
        let mut listing = scene.listing.clone();
        listing["layers"][at]["size"] = json!(u64::MAX);
        let (error, fetched) = scene.refused(&listing).await;
        assert_eq!(
            (error.kind, fetched.len()),
            (ErrorKind::SnapshotMalformed, 0),
            "{error}"
        );
    }
    let mut listing = scene.listing.clone();
    listing["artifactType"] = json!("application/vnd.thaw.image.v1");
    let (error, fetched) = scene.refused(&listing).await;
    assert_eq!(
        (error.kind, fetched.len()),
        (ErrorKind::NotASnapshot, 0),
        "{error}"
    );
}

/// Runs in a process of its own, which dies at a failpoint.
#[tokio::test]
async fn snapshot_is_pulled_until_it_is_killed() {
    let Ok(point) = std::env::var(KILLED_AT) else {
        return;
    };
    let to = node(Path::new(&std::env::var_os(ROOT).unwrap()));
    thaw_failpoint::arm(&point).unwrap();
    pulled(&to, &std::env::var(REFERENCE).unwrap()).await.unwrap();
}

#[tokio::test]
async fn killed_pull_leaves_nothing() {
    let scene = Scene::new().await;
    let place = scene.root.path().join("to");
    for (point, is_stored) in [
        (Failpoint::ObjectPlaced, false),
        (Failpoint::DraftLocked, false),
        (Failpoint::DraftDiskMade, false),
        (Failpoint::PullPackWritten, false),
        (Failpoint::SnapshotFileSealed, false),
        (Failpoint::SnapshotPlaced, false),
        (Failpoint::PullCompared, false),
        (Failpoint::ObjectBegun, false),
        (Failpoint::ObjectWritten, true),
    ] {
        let test = "sandbox::snapshot_pull::tests::lies::snapshot_is_pulled_until_it_is_killed";
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args([test, "--exact", "--nocapture"])
            .env(KILLED_AT, point.name())
            .env(ROOT, &place)
            .env(REFERENCE, &scene.reference);
        let output = command.output().unwrap();
        assert_eq!(output.status.signal(), Some(9), "{point}: {output:?}");
        // The next start sweeps.
        let next = node(&place);
        let stored = next.stored.list();
        assert_eq!(
            (stored.len(), entries(&next)),
            (is_stored.into(), is_stored.into()),
            "{point}"
        );
        for stored in stored {
            assert!(next.stored.verify(&stored).unwrap().is_empty());
        }
    }
}
