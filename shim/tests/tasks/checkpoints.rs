//! Checkpoints, and tasks restored from them.

use serde_json::json;
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::runc_options::CheckpointOptions;
use thaw_protocol::shim::task::*;
use thaw_protocol::shim::task_types::Status;
use thaw_protocol::shim::{Any, Message, MessageField};
use ttrpc::Code;
use ttrpc::context::Context;

use crate::support::{Rig, code, member};

/// A checkpoint of container `one`, which has had an exec.
async fn checkpoint(rig: &Rig) -> String {
    checkpoint_by(rig, false).await
}

/// The same; writing it may end the container.
async fn checkpoint_by(rig: &Rig, exit: bool) -> String {
    let options = CheckpointOptions {
        exit,
        ..Default::default()
    };
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    rig.start("one", "").await.unwrap();
    rig.exec("one", "e", &["echo"]).await.unwrap();
    rig.start("one", "e").await.unwrap();
    rig.wait("one", "e").await.unwrap();
    let place = rig.path("checkpoint");
    std::fs::create_dir(&place).unwrap();
    let request = CheckpointTaskRequest {
        id: "one".into(),
        path: place.display().to_string(),
        options: MessageField::some(Any {
            type_url: "containerd.runc.v1.CheckpointOptions".into(),
            value: options.write_to_bytes().unwrap(),
            ..Default::default()
        }),
        ..Default::default()
    };
    rig.client.checkpoint(Context::default(), &request).await.unwrap();
    request.path
}

#[tokio::test]
async fn checkpoint_task_waits_for_start_under_its_new_name() {
    let old = Rig::new().await;
    let place = checkpoint(&old).await;
    let rig = Rig::new().await;
    // In the guest it keeps its original id.
    rig.agent.came_with("one");
    let request = CreateTaskRequest {
        checkpoint: place.clone(),
        ..rig.request("two", &["cat"], json!({}))
    };
    rig.create(request).await.unwrap();
    let thaw = rig.thawd.thawed.lock().unwrap()[0].clone();
    assert_eq!(
        (thaw.directory, thaw.client_pid),
        (format!("{place}/thaw"), std::process::id() as i32)
    );
    assert_eq!(rig.state("two", "").await.unwrap().status, Status::CREATED.into());
    let held = || {
        let heard = rig.agent.heard.lock().unwrap();
        let calls = heard
            .iter()
            .filter(|call| ["pause one", "resume one"].contains(&call.as_str()));
        calls.cloned().collect::<Vec<_>>()
    };
    assert_eq!(held(), ["pause one"]);
    rig.start("two", "").await.unwrap();
    assert_eq!(held(), ["pause one", "resume one"]);
    assert_eq!(rig.state("two", "").await.unwrap().status, Status::RUNNING.into());
    // The guest remembers the earlier exec.
    rig.exec("two", "e", &["echo"]).await.unwrap();
    rig.start("two", "e").await.unwrap();
    assert_eq!(rig.wait("two", "e").await.unwrap(), 0);
    rig.agent.run_out_of_memory("one");
    assert_eq!(rig.wait("two", "").await.unwrap(), 137);
    rig.delete("two", "").await.unwrap();
    let told = [
        "create two",
        "start two",
        "exec-added e",
        "exec-started e",
        "exit e 0",
        "oom two",
        "exit two 137",
        "delete two",
    ];
    assert_eq!(rig.events(told.len()).await, told);
    assert!(
        rig.agent.created.lock().unwrap().is_empty(),
        "nothing was made anew"
    );
}

#[tokio::test]
async fn restored_task_gets_the_network_of_its_namespace() {
    let old = Rig::new().await;
    let place = checkpoint(&old).await;
    let none = json!({"io.katacontainers.config.runtime.internetworking_model": "none"});
    for (path, annotations, wanted) in [
        (
            "/run/netns/x",
            json!({}),
            Some((Mode::NAMESPACE, "/run/netns/x".to_owned())),
        ),
        // As it was frozen.
        ("", json!({}), None),
        ("/run/netns/x", none, Some((Mode::NONE, String::new()))),
    ] {
        let rig = Rig::new().await;
        rig.agent.came_with("one");
        let config = json!({
            "process": {"args": ["cat"], "cwd": "/"},
            "root": {"path": "rootfs"},
            "annotations": annotations,
            "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "network", "path": path}]},
        });
        let request = CreateTaskRequest {
            checkpoint: place.clone(),
            ..rig.request_of("two", &config)
        };
        rig.create(request).await.unwrap();
        let thaw = rig.thawd.thawed.lock().unwrap()[0].clone();
        let network = thaw.network.into_option();
        assert_eq!(
            network.map(|network| (network.mode.enum_value().unwrap(), network.namespace)),
            wanted
        );
    }
}

#[tokio::test]
async fn checkpoint_with_exit_ends_its_container() {
    let stays = Rig::new().await;
    checkpoint(&stays).await;
    assert_eq!(
        stays.state("one", "").await.unwrap().status,
        Status::RUNNING.into()
    );
    let ends = Rig::new().await;
    checkpoint_by(&ends, true).await;
    assert_eq!(ends.wait("one", "").await.unwrap(), 137);
}

#[tokio::test]
async fn unusable_checkpoint_is_refused_and_leaves_nothing() {
    let old = Rig::new().await;
    let place = checkpoint(&old).await;
    let rig = Rig::new().await;
    let of = |checkpoint: &str, request: CreateTaskRequest| CreateTaskRequest {
        checkpoint: checkpoint.into(),
        ..request
    };
    // A checkpoint of a pod's member; a directory that is no checkpoint; one without its snapshot.
    let member = of(&place, rig.request("member", &["cat"], member()));
    assert_eq!(code(rig.create(member).await), Code::UNIMPLEMENTED);
    let nothing = of("/nowhere", rig.request("two", &["cat"], json!({})));
    assert_eq!(code(rig.create(nothing).await), Code::UNIMPLEMENTED);
    std::fs::rename(old.path("checkpoint/thaw.tar"), old.path("kept")).unwrap();
    let torn = of(&place, rig.request("two", &["cat"], json!({})));
    assert_eq!(code(rig.create(torn).await), Code::UNKNOWN);
    assert!(rig.thawd.made.lock().unwrap().is_empty());
    // A machine that does not contain the container is ended.
    std::fs::rename(old.path("kept"), old.path("checkpoint/thaw.tar")).unwrap();
    let gone = of(&place, rig.request("two", &["cat"], json!({})));
    assert_eq!(code(rig.create(gone).await), Code::INVALID_ARGUMENT);
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
    assert_eq!(code(rig.state("two", "").await), Code::NOT_FOUND);
}
