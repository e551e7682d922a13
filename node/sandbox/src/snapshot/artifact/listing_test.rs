//! What of an OCI manifest is refused.

use serde_json::{Value, json};

use super::*;

fn listing() -> Listing {
    let of = |media_type: &str| Descriptor::of(media_type, media_type.as_bytes());
    Listing {
        config: of(CONFIG_TYPE),
        manifest: of(MANIFEST_TYPE),
        signature: Some(Descriptor::of(SIGNATURE_TYPE, &[1; SIGNATURE])),
        state: of(STATE_TYPE),
        working_set: Some(of(WORKING_SET_TYPE)),
        table: of(TABLE_TYPE),
        packs: vec![Descriptor::of(PACK_TYPE, b"a"), Descriptor::of(PACK_TYPE, b"b")],
    }
}

fn refused(change: impl FnOnce(&mut Value)) -> ArtifactError {
    let mut document: Value = serde_json::from_slice(&listing().encode()).unwrap();
    change(&mut document);
    Listing::decode(document.to_string().as_bytes()).unwrap_err()
}

#[test]
fn listing_is_read_as_it_was_written() {
    let whole = listing();
    assert_eq!(Listing::decode(&whole.encode()), Ok(whole.clone()));
    let least = Listing {
        signature: None,
        working_set: None,
        packs: Vec::new(),
        ..whole
    };
    assert_eq!(Listing::decode(&least.encode()), Ok(least));
}

#[test]
fn manifest_of_another_kind_is_no_snapshot() {
    for (change, named) in [
        (
            json!({"artifactType": "application/vnd.thaw.image.v1"}),
            "application/vnd.thaw.image.v1",
        ),
        (json!({"artifactType": null}), CONFIG_TYPE),
    ] {
        let found = refused(|it| it["artifactType"] = change["artifactType"].clone());
        assert_eq!(found, ArtifactError::OtherType(named.into()));
    }
    let index = br#"{"schemaVersion":2,"manifests":[]}"#;
    assert_eq!(
        Listing::decode(index),
        Err(ArtifactError::OtherType(String::new()))
    );
    assert!(Listing::decode(b"<html>").is_err());
}

#[test]
fn sizes_and_places_of_layers_are_checked() {
    let huge = |at: usize, size: u64| refused(move |it| it["layers"][at]["size"] = size.into());
    for (at, most) in [
        (0, MAX_MANIFEST),
        (1, 64),
        (2, state::MAX_STATE),
        (3, working_sets::MOST_BYTES),
        (4, table::MAX_TABLE),
        (5, MAX_PACK),
    ] {
        for size in [most + 1, u64::MAX] {
            assert!(matches!(huge(at, size), ArtifactError::TooLarge { .. }), "{at}");
        }
        assert!(matches!(huge(at, 0), ArtifactError::Malformed { .. }), "{at}");
    }
    let changes: [fn(&mut Value); 7] = [
        |it| drop(it["layers"].as_array_mut().unwrap().remove(0)),
        |it| drop(it["layers"].as_array_mut().unwrap().remove(4)),
        |it| it["layers"].as_array_mut().unwrap().swap(2, 4),
        |it| it["layers"][5]["mediaType"] = "application/octet-stream".into(),
        |it| it["layers"][5]["urls"] = json!(["https://elsewhere.example/pack"]),
        |it| it["config"]["mediaType"] = "application/vnd.oci.empty.v1+json".into(),
        |it| it["schemaVersion"] = 1.into(),
    ];
    for change in changes {
        let found = refused(change);
        assert!(matches!(found, ArtifactError::Malformed { .. }), "{found}");
    }
    let many = refused(|it| {
        let pack = it["layers"][5].clone();
        it["layers"]
            .as_array_mut()
            .unwrap()
            .resize(5 + MAX_PACKS + 1, pack);
    });
    assert!(many.to_string().contains("packs"), "{many}");
}
