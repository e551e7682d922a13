//! Pods written for Kata, with fakes: the effects of their annotations and the node's file.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::atomic::Ordering;

use serde_json::json;
use support::{Rig, code};
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::runtimeoptions::Options;
use thaw_protocol::shim::task::CreateTaskRequest;
use thaw_protocol::shim::{Any, Message, MessageField};
use ttrpc::Code;

const FILE: &str = r#"
[hypervisor.qemu]
enable_annotations = ["default_.*", "kernel_params", "rate_limiter"]
default_memory = 320
default_maxvcpus = 2

[runtime]
disable_guest_seccomp = true
"#;

/// A task as containerd passes it to a runtime whose options name this file.
fn request(rig: &Rig, id: &str, annotations: serde_json::Value) -> CreateTaskRequest {
    let file = rig.path("configuration.toml");
    std::fs::write(&file, FILE).unwrap();
    let options = Options {
        config_path: file.display().to_string(),
        ..Default::default()
    };
    let mut request = rig.request(id, &["cat"], annotations);
    request.options = MessageField::some(Any {
        type_url: "runtimeoptions.v1.Options".into(),
        value: options.write_to_bytes().unwrap(),
        ..Default::default()
    });
    let config = rig.path(id).join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    spec["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ERRNO"});
    std::fs::write(&config, spec.to_string()).unwrap();
    request
}

#[tokio::test]
async fn kata_file_and_annotations_set_pod_and_container_sizes() {
    let rig = Rig::new().await;
    let pause = json!({
        "io.kubernetes.cri.container-type": "sandbox",
        "io.kubernetes.cri.sandbox-memory": "104857600",
        "io.katacontainers.config.hypervisor.default_vcpus": "8",
        "io.katacontainers.config.runtime.sandbox_cgroup_only": "true",
        "io.katacontainers.config.runtime.internetworking_model": "none",
    });
    rig.create(request(&rig, "pause", pause)).await.unwrap();
    let made = rig.thawd.made.lock().unwrap()[0].clone();
    assert_eq!((made.cpus, made.memory_mib), (2, 420));
    assert_eq!(made.network.mode, Mode::NONE.into());
    rig.create(request(&rig, "a", support::member())).await.unwrap();
    let created = rig.agent.created.lock().unwrap()[0].clone();
    assert!(created.OCI.Linux.Seccomp.is_none());
}

#[tokio::test]
async fn forbidden_annotation_fails_pod_before_its_machine() {
    let rig = Rig::new().await;
    for (name, value, said, why) in [
        (
            "hypervisor.path",
            "/bin/sh",
            "not enabled",
            Code::INVALID_ARGUMENT,
        ),
        (
            "hypervisor.kernel_params",
            "init=/bin/sh",
            "refused",
            Code::UNIMPLEMENTED,
        ),
        (
            "hypervisor.default_memory",
            "much",
            "no number",
            Code::INVALID_ARGUMENT,
        ),
    ] {
        let name = format!("io.katacontainers.config.{name}");
        let mut annotations = serde_json::Map::new();
        annotations.insert(name.clone(), value.into());
        let answer = rig.create(request(&rig, "one", annotations.into())).await;
        let text = answer.as_ref().unwrap_err().to_string();
        assert!(text.contains(&name) && text.contains(said), "{text}");
        assert_eq!(code(answer), why);
    }
    assert!(rig.thawd.made.lock().unwrap().is_empty());
}

#[tokio::test]
async fn pod_with_rate_limits_is_not_run_without_them() {
    let rig = Rig::new().await;
    let annotations = || {
        json!({
            "io.katacontainers.config.hypervisor.disk_rate_limiter_bw_max_rate": "80000000",
            "io.katacontainers.config.hypervisor.disk_rate_limiter_ops_one_time_burst": "9",
            "io.katacontainers.config.hypervisor.tx_rate_limiter_max_rate": "8000000",
        })
    };
    rig.thawd.knows_no_limits.store(true, Ordering::SeqCst);
    let answer = rig.create(request(&rig, "one", annotations())).await;
    let text = answer.as_ref().unwrap_err().to_string();
    assert!(text.contains("rate limits") && text.contains("thawd"), "{text}");
    assert_eq!(code(answer), Code::UNIMPLEMENTED);
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
    rig.thawd.knows_no_limits.store(false, Ordering::SeqCst);
    rig.create(request(&rig, "two", annotations())).await.unwrap();
    let made = rig.thawd.made.lock().unwrap()[1].clone();
    let disk = &made.disk_rate;
    assert_eq!(
        (disk.bytes_per_s, disk.ops_per_s, disk.once_ops),
        (10_000_000, 0, 0)
    );
    assert_eq!(made.net_out_rate.bytes_per_s, 1_000_000);
    assert!(made.net_in_rate.is_none());
}

#[tokio::test]
async fn container_creation_times_out() {
    let rig = Rig::new().await;
    rig.agent.hung.lock().unwrap().insert("one".into());
    let annotations = json!({"io.katacontainers.config.runtime.create_container_timeout": "1"});
    let answer = rig.create(request(&rig, "one", annotations)).await;
    let text = answer.as_ref().unwrap_err().to_string();
    assert!(text.contains("create_container_timeout"), "{text}");
    assert_eq!(code(answer), Code::FAILED_PRECONDITION);
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}
