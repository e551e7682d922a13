use super::*;
use crate::sandbox::{CopyPlace, Tenants};
use crate::state::{Paused, Record};

const ID: &str = "0123456789ab";

fn place(registry: &Registry, key: u8) -> CopyPlace {
    CopyPlace {
        repository: format!("{}/paused", registry.host()),
        tag: format!("{ID}00ff"),
        key: [key; 32],
    }
}

fn viewer(tenant: &str) -> Viewer {
    Viewer {
        tenant: Some(tenant.parse().unwrap()),
        is_node: false,
    }
}

/// A paused sandbox of the tenant acme.
fn paused(node: &Node) -> Paused {
    let record: Record = serde_json::from_value(json!({
        "id": ID, "name": null, "image": "x", "image_digest": null, "command": [], "created": 1, "owner": null, "client": null, "vmm": null,
        "tethered": false, "ready": true, "vcpus": 1, "memory_mib": 128, "terms": {"tenant": "acme", "annotations": {"e2b": "{}"}},
    }))
    .unwrap();
    let stored = store(node, 2, |_| {}, None);
    let draft = node.paused.begin(ID).unwrap();
    std::fs::rename(&stored.directory, draft.snapshot()).unwrap();
    let kept = tempfile::tempdir().unwrap();
    draft.finish(record, kept.path()).unwrap()
}

/// A node, and the sandboxes of all its tenants.
fn tenants(root: &Path) -> (Node, Tenants) {
    let node = node(root);
    (node.clone(), Tenants::open(node))
}

#[tokio::test]
async fn copied_sandbox_is_taken_over_and_claimed_once() {
    let (root, registry) = (tempfile::tempdir().unwrap(), Registry::start().unwrap());
    let place = |key| place(&registry, key);
    let (from, of_from) = tenants(&root.path().join("from"));
    let here = paused(&from);
    of_from
        .copy_paused(&here, &place(1), async { Ok(()) })
        .await
        .unwrap();
    assert!(here.copied().unwrap().is_some());
    let (to, of_to) = tenants(&root.path().join("to"));
    let take = async |key, tenant| of_to.take(&place(key), &viewer(tenant), has_all).await;
    for refused in [take(2, "acme").await, take(1, "other").await] {
        assert_eq!(refused.unwrap_err().kind, ErrorKind::SandboxNotFound);
    }
    let taken = take(1, "acme").await.unwrap();
    assert_eq!(taken.record().terms.annotations, here.record().terms.annotations);
    assert_eq!((taken.record().id.as_str(), entries(&to)), (ID, 0));
    let memory = |paused: &Paused| std::fs::read(paused.snapshot().join("manifest.json")).unwrap();
    assert_eq!(memory(&taken), memory(&here));
    let twice = take(1, "acme").await.unwrap_err();
    assert_eq!(twice.kind, ErrorKind::NameInUse, "{twice}");
    assert_eq!((memory(&taken), entries(&to)), (memory(&here), 0));
    of_to.claim_paused(&taken).await.unwrap();
    of_to.claim_paused(&taken).await.unwrap();
    let late = of_from.claim_paused(&here).await.unwrap_err();
    assert_eq!(late.kind, ErrorKind::SandboxClaimed, "{late}");
    assert!(here.copied().unwrap().is_some(), "it stays another node's");
    let again = take(1, "acme").await.unwrap_err();
    assert_eq!(again.kind, ErrorKind::SandboxClaimed, "{again}");
}

#[tokio::test]
async fn discarded_copy_is_resumed_by_no_node() {
    let (root, registry) = (tempfile::tempdir().unwrap(), Registry::start().unwrap());
    let place = |key| place(&registry, key);
    let (from, of_from) = tenants(&root.path().join("from"));
    let here = paused(&from);
    let (_, of_other) = tenants(&root.path().join("other"));
    let discard = async |key, tenant| of_other.discard_copy(&place(key), &viewer(tenant)).await;
    let early = discard(1, "acme").await.unwrap_err();
    assert_eq!(early.kind, ErrorKind::SandboxNotFound, "{early}");
    of_from
        .copy_paused(&here, &place(1), async { Ok(()) })
        .await
        .unwrap();
    for refused in [discard(2, "acme").await, discard(1, "other").await] {
        assert_eq!(refused.unwrap_err().kind, ErrorKind::SandboxNotFound);
    }
    discard(1, "acme").await.unwrap();
    for late in [
        discard(1, "acme").await.unwrap_err(),
        of_from.claim_paused(&here).await.unwrap_err(),
        of_other
            .take(&place(1), &viewer("acme"), has_all)
            .await
            .unwrap_err(),
    ] {
        assert_eq!(late.kind, ErrorKind::SandboxClaimed, "{late}");
    }
}

#[tokio::test]
async fn copy_that_is_overtaken_by_a_resume_has_no_name() {
    let (root, registry) = (tempfile::tempdir().unwrap(), Registry::start().unwrap());
    let (from, of_from) = tenants(&root.path().join("from"));
    let here = paused(&from);
    of_from.claim_paused(&here).await.unwrap();
    let refused = Error::new(ErrorKind::SandboxNotFound, "it was resumed");
    let resumed = async { Err::<(), _>(refused) };
    assert!(
        of_from
            .copy_paused(&here, &place(&registry, 1), resumed)
            .await
            .is_err()
    );
    assert!(
        registry.manifest(&place(&registry, 1).tag).is_none(),
        "no one finds the copy"
    );
    of_from
        .copy_paused(&here, &place(&registry, 1), async { Ok(()) })
        .await
        .unwrap();
    let note = here.copied().unwrap().unwrap();
    let other = crate::state::Copied {
        nonce: "other".into(),
        ..note
    };
    here.note_copied(&other).unwrap();
    of_from.claim_paused(&here).await.unwrap();
    here.note_copied(&crate::state::Copied {
        nonce: "late".into(),
        ..other
    })
    .unwrap();
    assert!(of_from.claim_paused(&here).await.is_err());
}

#[tokio::test]
async fn unfinished_copy_is_pushed_again_with_its_claim() {
    let (root, registry) = (tempfile::tempdir().unwrap(), Registry::start().unwrap());
    let (from, of_from) = tenants(&root.path().join("from"));
    let here = paused(&from);
    let place = place(&registry, 1);
    let copy = async || of_from.copy_paused(&here, &place, async { Ok(()) }).await;
    copy().await.unwrap();
    let note = here.copied().unwrap().unwrap();
    assert!(!note.is_complete);
    copy().await.unwrap();
    assert_eq!(here.copied().unwrap().as_ref(), Some(&note));
    // Something else where the claim belongs.
    let (_, tag) = note.claim.rsplit_once(':').unwrap();
    registry.put_manifest(tag, &registry.manifest(&place.tag).unwrap());
    let refused = of_from.claim_paused(&here).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::RegistryFailed, "{refused}");
    assert!(here.copied().unwrap().is_some());
}
