//! Pods that containerd creates through its sandbox API, with fakes.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::json;
use support::{Rig, code};
use thaw_protocol::shim::pod_sandbox::*;
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::sandbox::*;
use thaw_protocol::shim::task::ConnectRequest;
use thaw_protocol::shim::{Any, Message, MessageField, cgroup2};
use ttrpc::Code;
use ttrpc::context::Context;

/// CRI's request: the configuration of the pod, and an empty bundle.
fn request(rig: &Rig, network: NamespaceMode) -> CreateSandboxRequest {
    let namespaces = NamespaceOption {
        network: network.into(),
        ..Default::default()
    };
    request_of(rig, namespaces, &[])
}

fn request_of(rig: &Rig, namespaces: NamespaceOption, annotations: &[(&str, &str)]) -> CreateSandboxRequest {
    let is_the_hosts = namespaces.network == NamespaceMode::NODE.into();
    let annotations = annotations.iter();
    let bundle = rig.path("pod");
    std::fs::create_dir_all(&bundle).unwrap();
    let config = PodSandboxConfig {
        hostname: "web-0".into(),
        annotations: annotations.map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        linux: MessageField::some(LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/pod1".into(),
            sysctls: [("net.core.somaxconn".to_owned(), "1024".to_owned())].into(),
            security_context: MessageField::some(LinuxSandboxSecurityContext {
                namespace_options: MessageField::some(namespaces),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let netns_path = match is_the_hosts {
        true => "",
        false => "/run/netns/cni-1",
    };
    CreateSandboxRequest {
        sandbox_id: "pod".into(),
        bundle_path: bundle.display().to_string(),
        netns_path: netns_path.into(),
        options: MessageField::some(Any {
            type_url: "runtime.v1.PodSandboxConfig".into(),
            value: config.write_to_bytes().unwrap(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn context() -> Context {
    Context::default()
}

async fn create(rig: &Rig) {
    let request = request(rig, NamespaceMode::POD);
    rig.sandbox.create_sandbox(context(), &request).await.unwrap();
}

async fn start(rig: &Rig) -> ttrpc::Result<StartSandboxResponse> {
    let request = StartSandboxRequest {
        sandbox_id: "pod".into(),
        ..Default::default()
    };
    rig.sandbox.start_sandbox(context(), &request).await
}

async fn status(rig: &Rig, id: &str) -> ttrpc::Result<SandboxStatusResponse> {
    let request = SandboxStatusRequest {
        sandbox_id: id.into(),
        verbose: true,
        ..Default::default()
    };
    rig.sandbox.sandbox_status(context(), &request).await
}

async fn wait(rig: &Rig) -> u32 {
    let request = WaitSandboxRequest {
        sandbox_id: "pod".into(),
        ..Default::default()
    };
    let answer = rig.sandbox.wait_sandbox(context(), &request).await.unwrap();
    assert!(answer.exited_at.is_some());
    answer.exit_status
}

async fn stop(rig: &Rig) {
    let request = StopSandboxRequest {
        sandbox_id: "pod".into(),
        ..Default::default()
    };
    rig.sandbox.stop_sandbox(context(), &request).await.unwrap();
}

async fn shutdown(rig: &Rig) {
    let request = ShutdownSandboxRequest {
        sandbox_id: "pod".into(),
        ..Default::default()
    };
    // The shim may end before it answers.
    let _ = rig.sandbox.shutdown_sandbox(context(), &request).await;
}

/// A container that containerd creates in the sandbox, which its bundle names.
async fn member(rig: &Rig, id: &str) -> ttrpc::Result<u32> {
    let config = json!({
        "process": {"args": ["cat"], "cwd": "/", "user": {}},
        "root": {"path": "rootfs"},
        "linux": {"namespaces": [
            {"type": "pid"}, {"type": "ipc", "path": "/proc/7/ns/ipc"}, {"type": "network"},
        ]},
    });
    let request = rig.request_of(id, &config);
    std::fs::write(rig.path(id).join("sandbox"), "pod").unwrap();
    rig.create(request).await
}

#[tokio::test]
async fn sandbox_is_a_microvm_whose_containers_come_and_go() {
    let vmm = std::process::id();
    let rig = Rig::with_vmm(vmm as i32).await;
    create(&rig).await;
    let made = rig.thawd.made.lock().unwrap()[0].clone();
    assert_eq!(
        (made.hostname.as_str(), made.cgroup.as_str()),
        ("web-0", "/kubepods/pod1/pod")
    );
    assert_eq!(made.network.mode, Mode::NAMESPACE.into());
    assert_eq!(made.network.namespace, "/run/netns/cni-1");
    assert_eq!(status(&rig, "pod").await.unwrap().state, "SANDBOX_NOTREADY");
    let started = start(&rig).await.unwrap();
    assert_eq!(started.pid, vmm);
    let spec: serde_json::Value = serde_json::from_slice(&started.spec.value).unwrap();
    let network = json!({"type": "network", "path": "/run/netns/cni-1"});
    assert!(
        spec["linux"]["namespaces"].as_array().unwrap().contains(&network),
        "{spec}"
    );
    assert_eq!(code(start(&rig).await), Code::FAILED_PRECONDITION);
    assert_connects_to_the_sandbox_only(&rig, vmm).await;
    assert_is_ready(&rig, vmm).await;
    for id in ["a", "b"] {
        assert_eq!(member(&rig, id).await.unwrap(), vmm);
        rig.start(id, "").await.unwrap();
    }
    // They get the pod's files, which only the shim provides.
    let created = rig.agent.created.lock().unwrap()[0].clone();
    for path in ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm"] {
        let mount = created.OCI.Mounts.iter().find(|mount| mount.destination == path);
        assert!(mount.is_some(), "{path}: {:?}", created.OCI.Mounts);
    }
    assert_eq!(created.OCI.Linux.Sysctl["net.core.somaxconn"], "1024");
    rig.kill("a", "", libc::SIGKILL).await.unwrap();
    assert_eq!(rig.wait("a", "").await.unwrap(), 137);
    rig.delete("a", "").await.unwrap();
    rig.kill("b", "", libc::SIGKILL).await.unwrap();
    rig.wait("b", "").await.unwrap();
    rig.delete("b", "").await.unwrap();
    // Neither they nor the task service end it.
    rig.shutdown(false).await;
    assert!(rig.serves() && rig.thawd.ended.lock().unwrap().is_empty());

    let (ended, ()) = tokio::join!(wait(&rig), stop(&rig));
    assert_eq!(ended, 0);
    stop(&rig).await;
    let stopped = status(&rig, "pod").await.unwrap();
    assert_eq!(stopped.state, "SANDBOX_NOTREADY");
    assert!(stopped.exited_at.is_some());
    assert_eq!(code(member(&rig, "late").await), Code::FAILED_PRECONDITION);
    shutdown(&rig).await;
    rig.ended().await;
    assert_eq!(rig.thawd.made.lock().unwrap().len(), 1);
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

async fn assert_connects_to_the_sandbox_only(rig: &Rig, vmm: u32) {
    // A restarted containerd calls this, and takes a shim that returns an error for dead.
    let ask = |id: &str| ConnectRequest {
        id: id.into(),
        ..Default::default()
    };
    let connected = rig.client.connect(context(), &ask("pod")).await.unwrap();
    assert_eq!(connected.task_pid, vmm);
    assert_eq!(
        code(rig.client.connect(context(), &ask("other")).await),
        Code::NOT_FOUND
    );
}

async fn assert_is_ready(rig: &Rig, vmm: u32) {
    let ready = status(rig, "pod").await.unwrap();
    assert_eq!((ready.state.as_str(), ready.pid), ("SANDBOX_READY", vmm));
    assert_eq!(ready.info["thaw.sandbox"], "sandbox-1");
    assert!(ready.created_at.is_some() && ready.exited_at.is_none());
    let platform = rig.sandbox.platform(context(), &PlatformRequest::new()).await;
    assert_eq!(platform.unwrap().platform.os, "linux");
    let ping = PingRequest {
        sandbox_id: "pod".into(),
        ..Default::default()
    };
    rig.sandbox.ping_sandbox(context(), &ping).await.unwrap();
    let metrics = SandboxMetricsRequest {
        sandbox_id: "pod".into(),
        ..Default::default()
    };
    let metrics = rig.sandbox.sandbox_metrics(context(), &metrics).await.unwrap();
    let used = cgroup2::Metrics::parse_from_bytes(&metrics.metrics.data.value).unwrap();
    assert!(used.memory.usage > 0);
}

#[tokio::test]
async fn invalid_sandbox_is_refused_and_shim_can_end() {
    let rig = Rig::new().await;
    assert_eq!(code(status(&rig, "pod").await), Code::NOT_FOUND);
    let hosts = request(&rig, NamespaceMode::NODE);
    let refused = rig.sandbox.create_sandbox(context(), &hosts).await;
    assert!(refused.as_ref().unwrap_err().to_string().contains("hostNetwork"));
    assert_eq!(code(refused), Code::UNIMPLEMENTED);
    for (pid, ipc, word) in [
        (NamespaceMode::NODE, NamespaceMode::POD, "hostPID"),
        (NamespaceMode::POD, NamespaceMode::NODE, "hostIPC"),
    ] {
        let namespaces = NamespaceOption {
            pid: pid.into(),
            ipc: ipc.into(),
            ..Default::default()
        };
        let of_the_host = request_of(&rig, namespaces, &[]);
        let refused = rig.sandbox.create_sandbox(context(), &of_the_host).await;
        assert!(refused.as_ref().unwrap_err().to_string().contains(word));
        assert_eq!(code(refused), Code::UNIMPLEMENTED);
    }
    assert!(rig.thawd.made.lock().unwrap().is_empty());
    let outside = CreateSandboxRequest {
        sandbox_id: "../pod".into(),
        ..hosts
    };
    assert_eq!(
        code(rig.sandbox.create_sandbox(context(), &outside).await),
        Code::INVALID_ARGUMENT
    );
    create(&rig).await;
    let again = request(&rig, NamespaceMode::POD);
    assert_eq!(
        code(rig.sandbox.create_sandbox(context(), &again).await),
        Code::ALREADY_EXISTS
    );
    assert_eq!(code(status(&rig, "other").await), Code::NOT_FOUND);
    let of_another = json!({
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.sandbox-id": "other",
    });
    let stray = rig.request("stray", &["cat"], of_another);
    assert_eq!(code(rig.create(stray).await), Code::INVALID_ARGUMENT);
    let second = rig.request(
        "pause",
        &["/pause"],
        json!({"io.kubernetes.cri.container-type": "sandbox"}),
    );
    assert_eq!(code(rig.create(second).await), Code::ALREADY_EXISTS);
    shutdown(&rig).await;
    rig.ended().await;
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn sandbox_and_containers_end_with_their_machine() {
    let rig = Rig::new().await;
    create(&rig).await;
    start(&rig).await.unwrap();
    member(&rig, "a").await.unwrap();
    rig.start("a", "").await.unwrap();
    rig.thawd.machine.send_replace(Some("its VMM was killed".into()));
    assert_eq!(wait(&rig).await, 137);
    assert_eq!(rig.wait("a", "").await.unwrap(), 137);
}

#[tokio::test]
async fn delete_after_a_killed_shim_ends_its_sandbox() {
    let rig = Rig::new().await;
    create(&rig).await;
    rig.served.lock().unwrap().take().unwrap().abort();
    rig.clean("pod").await;
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn sandbox_maps_host_namespaces_to_the_guests_if_annotated() {
    let rig = Rig::new().await;
    let namespaces = NamespaceOption {
        pid: NamespaceMode::NODE.into(),
        ipc: NamespaceMode::NODE.into(),
        ..Default::default()
    };
    let accepting = request_of(&rig, namespaces, &[("run.thaw.host-namespaces", "guest")]);
    rig.sandbox.create_sandbox(context(), &accepting).await.unwrap();
    member(&rig, "a").await.unwrap();
    let made = rig.agent.created.lock().unwrap()[0].clone();
    let kinds: Vec<_> = made
        .OCI
        .Linux
        .Namespaces
        .iter()
        .map(|n| n.Type.as_str())
        .collect();
    assert!(!kinds.contains(&"pid") && !kinds.contains(&"ipc"), "{kinds:?}");
    shutdown(&rig).await;
    rig.ended().await;
}
