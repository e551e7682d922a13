//! The features of the OCI runtime specification that this runtime supports, as specified in the
//! specification's `features.md`. CRI reports some of them to the kubelet: recursive read-only mounts, user
//! namespaces.

use serde_json::{Value, json};
use thaw_protocol::agent::seccomp::ACTIONS;
use thaw_protocol::shim::Any;

/// containerd's type name of the document (core/runtime/typeurl.go).
const TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Mount options: those the agent supports, and those that have the same effect in a guest.
const MOUNT_OPTIONS: &[&str] = &[
    "async",
    "atime",
    "bind",
    "defaults",
    "dev",
    "diratime",
    "dirsync",
    "exec",
    "lazytime",
    "noatime",
    "nodev",
    "nodiratime",
    "noexec",
    "norelatime",
    "nostrictatime",
    "nosuid",
    "private",
    "rbind",
    "relatime",
    "ro",
    "rprivate",
    "rro",
    "rslave",
    "rw",
    "silent",
    "slave",
    "strictatime",
    "suid",
    "sync",
];

fn document() -> Value {
    let no = json!({ "enabled": false });
    json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": "1.2.1",
        "hooks": ["prestart", "createRuntime", "poststart", "poststop"],
        "mountOptions": MOUNT_OPTIONS,
        "linux": {
            "namespaces": ["cgroup", "ipc", "mount", "network", "pid", "uts"],
            "cgroup": { "v1": false, "v2": true, "systemd": false, "systemdUser": false, "rdma": false },
            "seccomp": { "enabled": true, "actions": ACTIONS },
            "apparmor": no,
            "selinux": no,
            "intelRdt": no,
            "mountExtensions": { "idmap": no },
        },
    })
}

/// The document as an `Any` for containerd.
pub fn any() -> Any {
    Any {
        type_url: TYPE.into(),
        value: document().to_string().into_bytes(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cri_runtime_info_is_complete() {
        let told: Value = serde_json::from_slice(&any().value).unwrap();
        let options = told["mountOptions"].as_array().unwrap();
        assert!(options.contains(&json!("rro")) && !options.contains(&json!("rshared")));
        assert_eq!(told["linux"]["mountExtensions"]["idmap"]["enabled"], false);
        assert!(
            !told["linux"]["namespaces"]
                .as_array()
                .unwrap()
                .contains(&json!("user"))
        );
    }
}
