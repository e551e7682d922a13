use serde_json::json;
use thaw_protocol::shim::mount;

use super::*;

fn thawed() -> Thawed {
    Thawed::new(ThawedContainer {
        id: "frozen".into(),
        image_digest: "sha256:ab".into(),
        args: vec!["serve".into(), "-x".into()],
        ..Default::default()
    })
}

fn request(source: &str) -> CreateTaskRequest {
    CreateTaskRequest {
        id: "c".into(),
        rootfs: vec![mount::Mount {
            type_: "overlay".into(),
            source: source.into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn spec(changes: serde_json::Value) -> Spec {
    let mut spec = json!({"process": {"args": ["serve", "-x"]}});
    let changes = changes.as_object().unwrap().clone();
    spec.as_object_mut().unwrap().extend(changes);
    serde_json::from_value(spec).unwrap()
}

#[test]
fn annotation_names_a_stored_snapshot_and_needs_a_namespace() {
    let of = |pairs: &[(&str, &str)]| {
        let owned = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        let annotations: BTreeMap<String, String> = owned.collect();
        Wanted::of(&annotations)
            .map(|wanted| wanted.map(|w| (w.snapshot.to_owned(), w.namespace.to_owned())))
            .map_err(|e| e.to_string())
    };
    assert_eq!(of(&[]), Ok(None));
    let wanted = of(&[(ANNOTATION, "web-ready"), (NAMESPACE, "shop")]);
    assert_eq!(wanted, Ok(Some(("web-ready".into(), "shop".into()))));
    assert!(of(&[(ANNOTATION, "web-ready")]).unwrap_err().contains(NAMESPACE));
    for bad in ["", "/etc", "a/b", "a\nb"] {
        assert!(of(&[(ANNOTATION, bad), (NAMESPACE, "shop")]).is_err(), "{bad:?}");
    }
}

#[test]
fn container_like_the_frozen_one_continues_it_once() {
    let (thawed, request) = (thawed(), request("thaw:sha256:ab"));
    let mounts = json!({"mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/etc/hosts", "type": "bind", "source": "/x", "options": ["rbind"]},
        {"destination": "/dev/termination-log", "type": "bind", "source": "/x", "options": ["rbind"]},
    ]});
    let from = thawed.take(&request, &spec(mounts.clone())).unwrap();
    assert_eq!((from.container.as_str(), from.execs), ("frozen", 0));
    let again = thawed.take(&request, &spec(mounts)).unwrap_err().to_string();
    assert!(again.contains("make the pod anew"), "{again}");
}

#[test]
fn container_other_than_the_frozen_one_is_refused_by_name() {
    let thawed = thawed();
    let good = || request("thaw:sha256:ab");
    let disk = json!({"linux": {"devices": [{"path": "/dev/data", "type": "b", "major": 8, "minor": 0}]}});
    for (request, changes, said) in [
        (request("thaw:sha256:cd"), json!({}), "sha256:cd"),
        (request("overlay"), json!({}), "Thaw's snapshotter"),
        (good(), json!({"process": {"args": ["serve"]}}), "its command is"),
        (good(), json!({"process": null}), "its command is"),
        (
            CreateTaskRequest {
                terminal: true,
                ..good()
            },
            json!({}),
            "tty",
        ),
        (good(), disk, "/dev/data"),
    ] {
        let refused = thawed.take(&request, &spec(changes)).unwrap_err().to_string();
        assert!(
            refused.contains(said) && refused.contains("container c"),
            "{refused}"
        );
    }
    thawed.take(&good(), &spec(json!({}))).unwrap();
}

#[test]
fn volumes_are_the_mounts_of_the_pod_alone() {
    let bind =
        |at: &str| json!({"destination": at, "type": "bind", "source": "/x", "options": ["rbind", "ro"]});
    let mounts = json!({"mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        bind("/etc/hosts"),
        bind("/dev/shm"),
        bind("/key"),
        bind("/var/run/secrets/kubernetes.io/serviceaccount"),
    ]});
    let volumes = volumes(&spec(mounts));
    let places: Vec<_> = volumes.iter().map(|mount| mount.destination.as_str()).collect();
    assert_eq!(places, ["/key", "/var/run/secrets/kubernetes.io/serviceaccount"]);
}

#[test]
fn name_servers_are_read_from_the_pods_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("resolv.conf");
    std::fs::write(
        &file,
        "search a.example\nnameserver 10.96.0.10\nnameserver x\nnameserver fd00::a \n",
    )
    .unwrap();
    let mounts = json!({"mounts": [{"destination": "/etc/resolv.conf", "type": "bind", "source": file}]});
    assert_eq!(name_servers(&spec(mounts)).unwrap(), ["10.96.0.10", "fd00::a"]);
    assert!(name_servers(&spec(json!({}))).unwrap().is_empty());
    let missing =
        json!({"mounts": [{"destination": "/etc/resolv.conf", "type": "bind", "source": "/missing/x"}]});
    assert!(name_servers(&spec(missing)).is_err());
}
