//! Pods that begin as a thawed snapshot of the node.

use serde_json::{Value, json};
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::task::CreateTaskRequest;
use thaw_protocol::shim::task_types::Status;
use ttrpc::Code;

use crate::support::{Rig, code, member};

/// The specification of a pod's own container with this annotation.
fn pause(snapshot: &str) -> Value {
    json!({
        "process": {"args": ["/pause"], "cwd": "/"},
        "root": {"path": "rootfs"},
        "hostname": "web-0",
        "annotations": {
            "io.kubernetes.cri.container-type": "sandbox",
            "io.kubernetes.cri.sandbox-namespace": "shop",
            "thaw.run/snapshot": snapshot,
        },
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "network", "path": "/run/netns/x"}]},
    })
}

async fn thawed_pod() -> Rig {
    let rig = Rig::new().await;
    rig.agent.came_with("frozen");
    rig.create(rig.request_of("pause", &pause("web-ready")))
        .await
        .unwrap();
    rig.start("pause", "").await.unwrap();
    rig
}

fn held(rig: &Rig) -> Vec<String> {
    let heard = rig.agent.heard.lock().unwrap();
    let calls = heard.iter().filter(|call| call.ends_with("e frozen"));
    calls.cloned().collect()
}

#[tokio::test]
async fn annotated_pod_is_thawed_with_its_own_network() {
    let rig = thawed_pod().await;
    let thaw = rig.thawd.thawed.lock().unwrap()[0].clone();
    assert_eq!(
        (thaw.snapshot.as_str(), thaw.namespace.as_str()),
        ("web-ready", "shop")
    );
    assert_eq!((thaw.hostname.as_str(), thaw.directory.as_str()), ("web-0", ""));
    assert_eq!(thaw.network.mode, Mode::NAMESPACE.into());
    assert_eq!(thaw.network.namespace, "/run/netns/x");
    assert_eq!(held(&rig), ["pause frozen"], "it waits for its container");

    rig.create(rig.request("web", &["serve"], member()))
        .await
        .unwrap();
    assert_eq!(rig.state("web", "").await.unwrap().status, Status::CREATED.into());
    assert!(!held(&rig).contains(&"resume frozen".to_owned()));
    rig.start("web", "").await.unwrap();
    assert_eq!(held(&rig).last().unwrap(), "resume frozen");
    assert_eq!(rig.state("web", "").await.unwrap().status, Status::RUNNING.into());
    rig.exec("web", "e", &["echo"]).await.unwrap();
    rig.start("web", "e").await.unwrap();
    assert_eq!(rig.wait("web", "e").await.unwrap(), 0);
    let second = rig.create(rig.request("second", &["serve"], member())).await;
    assert_eq!(code(second), Code::UNIMPLEMENTED);
    assert!(
        rig.agent.created.lock().unwrap().is_empty(),
        "nothing was made anew"
    );
}

#[tokio::test]
async fn container_of_a_thawed_pod_must_be_the_frozen_one() {
    let rig = thawed_pod().await;
    let other = rig.create(rig.request("other", &["serve", "-x"], member())).await;
    assert_eq!(code(other), Code::UNIMPLEMENTED);
    // What was refused has taken nothing.
    rig.create(rig.request("web", &["serve"], member()))
        .await
        .unwrap();
}

/// The request for a container like the frozen one, with volumes of a directory at these places.
fn with_volumes(rig: &Rig, id: &str, places: &[&str]) -> CreateTaskRequest {
    let volume = rig.path("volume");
    std::fs::create_dir_all(&volume).unwrap();
    let mounts = places.iter().map(|place| {
        json!({"destination": place, "type": "bind", "source": volume, "options": ["rbind", "rprivate", "ro"]})
    });
    let config = json!({
        "process": {"args": ["serve"], "cwd": "/"},
        "root": {"path": "rootfs"},
        "annotations": member(),
        "mounts": mounts.collect::<Vec<_>>(),
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "network"}]},
    });
    rig.request_of(id, &config)
}

#[tokio::test]
async fn thawed_container_gets_the_volumes_of_its_pod() {
    let rig = thawed_pod().await;
    let refused = rig.create(with_volumes(&rig, "bad", &["/key", "/refused"])).await;
    assert_eq!(code(refused), Code::INTERNAL);
    assert!(
        rig.thawd.shares.lock().unwrap().is_empty(),
        "nothing stays shared"
    );

    rig.create(with_volumes(&rig, "web", &["/key"])).await.unwrap();
    let added = rig.agent.added.lock().unwrap()[0].clone();
    assert_eq!(added.container_id, "frozen");
    let [mount] = added.mounts.as_slice() else {
        panic!("{added:?}")
    };
    assert_eq!(
        (mount.destination.as_str(), mount.type_.as_str()),
        ("/key", "bind")
    );
    let last = added.storages.last().unwrap();
    assert_eq!((&last.mount_point, last.driver.as_str()), (&mount.source, "bind"));
    let shares: Vec<_> = rig.thawd.shares.lock().unwrap().values().cloned().collect();
    assert_eq!(shares[0].source, rig.path("volume").display().to_string());
    let heard = rig.agent.heard.lock().unwrap().clone();
    assert!(
        !heard.contains(&"resume frozen".to_owned()),
        "it is mounted before the start"
    );

    rig.start("web", "").await.unwrap();
    rig.kill("web", "", 9).await.unwrap();
    rig.wait("web", "").await.unwrap();
    rig.delete("web", "").await.unwrap();
    assert!(rig.thawd.shares.lock().unwrap().is_empty());
}

#[tokio::test]
async fn pod_of_an_unusable_snapshot_leaves_nothing() {
    let rig = Rig::new().await;
    for (snapshot, refused) in [
        ("missing", Code::UNKNOWN),
        ("unknown", Code::UNIMPLEMENTED),
        ("a/b", Code::INVALID_ARGUMENT),
    ] {
        let made = rig.create(rig.request_of("pause", &pause(snapshot))).await;
        assert_eq!(code(made), refused, "{snapshot}");
    }
    let mut small = pause("web-ready");
    small["annotations"]["io.kubernetes.cri.sandbox-memory"] = "67108864".into();
    assert_eq!(
        code(rig.create(rig.request_of("pause", &small)).await),
        Code::UNIMPLEMENTED
    );
    let single = rig.request("one", &["serve"], json!({"thaw.run/snapshot": "web-ready"}));
    assert_eq!(code(rig.create(single).await), Code::UNIMPLEMENTED);
    let (made, ended) = (&rig.thawd.made, &rig.thawd.ended);
    assert_eq!(made.lock().unwrap().len(), ended.lock().unwrap().len());
}
