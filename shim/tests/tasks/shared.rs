//! Namespaces and mounts that a pod's containers share, and features they lack.

use serde_json::{Value, json};

use crate::support::{Rig, code};

const POD: &str = "io.kubernetes.cri.container-type";

fn config(kind: &str, linux: Value, mounts: Value) -> Value {
    json!({
        "process": {"args": ["cat"], "cwd": "/", "user": {}, "apparmorProfile": "cri-containerd.apparmor.d"},
        "root": {"path": "rootfs"},
        "annotations": {POD: kind, "io.kubernetes.cri.sandbox-id": "pause"},
        "linux": linux,
        "mounts": mounts,
    })
}

#[tokio::test]
async fn pod_shared_memory_outlives_containers_and_sysctls_apply() {
    let rig = Rig::new().await;
    // A tmpfs as CRI makes it for a pod.
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let bind =
        json!({"destination": "/dev/shm", "type": "bind", "source": shm.path(), "options": ["rbind", "ro"]});
    let mounts = json!([bind]);
    let own = json!([{"type": "pid"}, {"type": "ipc"}, {"type": "network"}]);
    let linux = json!({"namespaces": own, "sysctl": {"kernel.shm_rmid_forced": "1"}});
    let pause = rig.request_of("pause", &config("sandbox", linux, mounts.clone()));
    rig.create(pause).await.unwrap();
    rig.start("pause", "").await.unwrap();
    let pods = json!({"namespaces": [{"type": "pid", "path": "/proc/7/ns/pid"}]});
    let member = rig.request_of("a", &config("container", pods.clone(), mounts.clone()));
    rig.create(member).await.unwrap();
    let made = rig.agent.created.lock().unwrap()[0].clone();
    let kept = rig.agent.kept.lock().unwrap().clone();
    assert_eq!(kept.len(), 1);
    // The same storage, so that it is mounted once.
    assert!(made.storages.contains(&kept[0]), "{:?}", made.storages);
    assert_eq!(made.OCI.Linux.Sysctl["kernel.shm_rmid_forced"], "1");
    assert!(made.sandbox_pidns);
    // If one container has its own PID namespace, a path means that one; with two, the owner is ambiguous.
    for id in ["b", "c"] {
        let apart = rig.request_of(id, &config("container", json!({"namespaces": own}), json!([])));
        rig.create(apart).await.unwrap();
        let debugger = rig.request_of("d", &config("container", pods.clone(), json!([])));
        match id {
            "b" => {
                rig.create(debugger).await.unwrap();
                rig.delete("d", "").await.unwrap();
            }
            _ => assert_eq!(code(rig.create(debugger).await), ttrpc::Code::UNIMPLEMENTED),
        }
    }
    let made = rig.agent.created.lock().unwrap()[2].clone();
    let joined = &made.OCI.Linux.Namespaces[0];
    assert_eq!(
        (
            made.container_id.as_str(),
            made.sandbox_pidns,
            joined.Path.as_str()
        ),
        ("d", false, "/run/thaw/containers/b/ns/pid")
    );
    let told = rig.events(11).await;
    let ignored: Vec<_> = told
        .iter()
        .filter(|event| event.starts_with("ignored "))
        .collect();
    assert_eq!(ignored.len(), 4, "one a container: {told:?}");
    assert!(ignored[0].contains("container a: apparmorProfile"), "{ignored:?}");
}
