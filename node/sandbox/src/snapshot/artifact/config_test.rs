//! What of a config is refused.

use serde_json::{Value, json};

use super::*;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::manifest::{Base, ImageRecord, Subject};

const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A manifest of a sandbox with an image.
fn manifest(change: impl FnOnce(&mut Subject)) -> Manifest {
    let place = tempfile::tempdir().unwrap();
    let mut subject = Subject {
        kind: Kind::Sandbox,
        images: vec![ImageRecord {
            slot: 0,
            name: "image".into(),
            digest: DIGEST.into(),
            metadata: Hash::of(b"metadata"),
        }],
        ..subject()
    };
    change(&mut subject);
    let made = draft(&place.path().join("s")).finish(subject, None).unwrap();
    made.manifest().clone()
}

fn config() -> Config {
    Config {
        format: FORMAT,
        name: Some("web".into()),
        labels: [("tier".into(), "front".into())].into(),
        sandbox: "0123456789ab".into(),
        manifest: WholeFile {
            bytes: 7,
            blake3: Hash::of(b"manifest"),
        },
        facts: Facts::of(&manifest(|_| {})),
        cpuid: Config::encoded_cpuid(&[0; 80]),
        features: vec!["avx2".into()],
        chunk_bytes: CHUNK,
        data_bytes: 4096,
        images: vec![ImageSource {
            reference: Some("registry.example/web:1".into()),
            digest: DIGEST.into(),
            metadata: Hash::of(b"metadata"),
        }],
        paused: None,
    }
}

#[test]
fn config_is_read_as_it_was_written() {
    let config = config();
    assert_eq!(Config::decode(&config.encode()), Ok(config.clone()));
    assert_eq!(config.cpuid().unwrap().as_slice().len(), 2);
    let place = config.images[0].place().unwrap().unwrap();
    assert_eq!(place.to_string(), format!("registry.example/web:1@{DIGEST}"));
}

#[test]
fn config_that_no_node_writes_is_refused() {
    for (field, value) in [
        ("sandbox", json!("../x")),
        ("chunk_bytes", json!(4096)),
        ("data_bytes", json!(u64::MAX)),
        ("cpuid", json!("?")),
        ("cpuid", json!(STANDARD.encode([0; 41]))),
        ("cpuid", json!(STANDARD.encode(vec![0; 40 * 257]))),
        ("memory_bytes", json!(-1)),
        ("images", json!(null)),
        ("manifest", json!({"bytes": 1, "blake3": "0"})),
    ] {
        let mut document: Value = serde_json::from_slice(&config().encode()).unwrap();
        document[field] = value;
        let refused = Config::decode(document.to_string().as_bytes()).unwrap_err();
        assert!(
            matches!(refused, ArtifactError::Malformed { .. }),
            "{field}: {refused}"
        );
    }
    let mut newer: Value = serde_json::from_slice(&config().encode()).unwrap();
    newer["format"] = json!(2);
    let refused = Config::decode(newer.to_string().as_bytes());
    assert_eq!(refused, Err(ArtifactError::Version { found: 2 }));
}

#[test]
fn image_of_no_registry_is_refused() {
    for reference in ["oci:/etc", "docker-archive:/etc/passwd", "../etc", ""] {
        let mut config = config();
        config.images[0].reference = Some(reference.into());
        assert!(Config::decode(&config.encode()).is_err(), "{reference}");
    }
    let mut config = config();
    config.images[0].digest = "sha256:0".into();
    assert!(Config::decode(&config.encode()).is_err());
    config.images[0].digest = DIGEST.into();
    config.images[0].reference = None;
    assert_eq!(config.images[0].place(), Ok(None));
}

#[test]
fn manifest_that_differs_from_the_config_is_refused() {
    let config = config();
    let mut same = manifest(|_| {});
    // Made in another second.
    same.created = config.facts.created;
    assert_eq!(config.check_manifest(&same), Ok(()));
    let changes: [fn(&mut Subject); 6] = [
        |it| it.kind = Kind::Template,
        |it| it.machine.vcpus += 1,
        |it| it.cpu.host.push('!'),
        |it| it.guest_image = None,
        |it| it.images[0].metadata = Hash::of(b"other"),
        |it| it.images.clear(),
    ];
    for change in changes {
        let mut other = same.clone();
        change(&mut other.subject);
        assert!(config.check_manifest(&other).is_err());
    }
    same.subject.base = Some(Base {
        manifest: Hash::of(b"base"),
        place: "/base".into(),
    });
    assert!(
        config
            .check_manifest(&same)
            .unwrap_err()
            .to_string()
            .contains("delta")
    );
}
