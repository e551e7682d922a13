//! Converts a request of the sandbox API to the specification that the pod's own container would have, from
//! which the microVM is created.
//!
//! CRI passes the pod's whole configuration. Only those annotations are used that `thaw install` also has
//! containerd pass to containers; others are set by the pod's user and are not trusted.

use thaw_protocol::shim::pod_sandbox::{NamespaceMode, PodSandboxConfig};
use thaw_protocol::shim::sandbox::CreateSandboxRequest;
use thaw_protocol::shim::{Any, Message};

use crate::any::kind;
use crate::error::{Error, Result};
use crate::spec::config::{Cpu, Memory, Namespace, Spec};

/// The message name of CRI's pod configuration.
const CRI: &str = "runtime.v1.PodSandboxConfig";
/// Prefixes of the annotations that are used.
const ANNOTATIONS: [&str; 2] = ["io.katacontainers.", "run.thaw."];

/// CRI's pod configuration. Empty for another client of the API.
pub fn config(options: Option<&Any>) -> Result<PodSandboxConfig> {
    match options {
        Some(given) if kind(given) == CRI => PodSandboxConfig::parse_from_bytes(&given.value)
            .map_err(|e| Error::Invalid(format!("the pod's configuration: {e}"))),
        _ => Ok(PodSandboxConfig::new()),
    }
}

/// The pod's specification. `given` is the one that a client other than CRI wrote.
pub fn spec(request: &CreateSandboxRequest, config: &PodSandboxConfig, given: Option<Spec>) -> Result<Spec> {
    let linux = &config.linux;
    let namespaces = &linux.security_context.namespace_options;
    let is_the_hosts = namespaces.network == NamespaceMode::NODE.into();
    if namespaces.userns_options.is_some() && namespaces.userns_options.mode == NamespaceMode::POD.into() {
        return Err(Error::Unsupported(
            "a microVM supports no user namespaces, and isolates the host's users without one: remove hostUsers: false"
                .into(),
        ));
    }
    let was_given = given.is_some();
    let mut spec = given.unwrap_or_default();
    if !config.hostname.is_empty() {
        spec.hostname = config.hostname.clone();
    }
    for (name, value) in config.annotations.iter().chain(&request.annotations) {
        if ANNOTATIONS.iter().any(|of| name.starts_with(of)) {
            spec.annotations.insert(name.clone(), value.clone());
        }
    }
    if !linux.cgroup_parent.is_empty() {
        spec.linux.cgroups_path = cgroup(&linux.cgroup_parent, &request.sandbox_id);
    }
    let sysctls = linux.sysctls.iter();
    spec.linux
        .sysctl
        .extend(sysctls.map(|(k, v)| (k.clone(), v.clone())));
    let resources = &linux.resources;
    if resources.memory_limit_in_bytes > 0 {
        spec.linux.resources.memory = Some(Memory {
            limit: Some(resources.memory_limit_in_bytes),
            ..Default::default()
        });
    }
    if resources.cpu_quota > 0 {
        spec.linux.resources.cpu = Some(Cpu {
            quota: Some(resources.cpu_quota),
            period: u64::try_from(resources.cpu_period).ok(),
            ..Default::default()
        });
    }
    for (kind, mode) in [("pid", namespaces.pid), ("ipc", namespaces.ipc)] {
        if !was_given && mode != NamespaceMode::NODE.into() {
            spec.linux.namespaces.push(Namespace {
                kind: kind.into(),
                ..Default::default()
            });
        }
    }
    match request.netns_path.as_str() {
        // Without a network namespace, as for CRI pods with the host's network, creating the network fails
        // later.
        "" if is_the_hosts || was_given => {}
        path => {
            spec.linux.namespaces.retain(|of| of.kind != "network");
            spec.linux.namespaces.push(Namespace {
                kind: "network".into(),
                path: path.into(),
            });
        }
    }
    Ok(spec)
}

/// The cgroup in which CRI would put the pod's own container: a systemd scope in the pod's slice, or a
/// directory.
fn cgroup(parent: &str, id: &str) -> String {
    let last = parent.rsplit('/').next().unwrap_or_default();
    match last.ends_with(".slice") {
        true => format!("{last}:cri-containerd:{id}"),
        false => format!("{}/{id}", parent.trim_end_matches('/')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::shim::MessageField;
    use thaw_protocol::shim::pod_sandbox::*;

    fn any(config: &PodSandboxConfig) -> Any {
        Any {
            type_url: CRI.into(),
            value: config.write_to_bytes().unwrap(),
            ..Default::default()
        }
    }

    #[test]
    fn cri_pod_gives_its_containers_specification() {
        let annotations = [
            ("io.katacontainers.config.hypervisor.default_memory", "256"),
            ("io.kubernetes.cri.sandbox-memory", "99999999999"),
        ];
        let given = PodSandboxConfig {
            hostname: "web-0".into(),
            annotations: annotations.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            linux: MessageField::some(LinuxPodSandboxConfig {
                cgroup_parent: "/kubepods.slice/kubepods-podx.slice".into(),
                sysctls: [("net.core.somaxconn".to_owned(), "1024".to_owned())].into(),
                resources: MessageField::some(LinuxContainerResources {
                    cpu_period: 100_000,
                    cpu_quota: 150_000,
                    memory_limit_in_bytes: 64 << 20,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let request = CreateSandboxRequest {
            sandbox_id: "pod".into(),
            netns_path: "/run/netns/x".into(),
            options: MessageField::some(any(&given)),
            ..Default::default()
        };
        let read = config(request.options.as_ref()).unwrap();
        assert_eq!(read, given);
        let made = spec(&request, &read, None).unwrap();
        assert_eq!(made.hostname, "web-0");
        assert_eq!(made.linux.cgroups_path, "kubepods-podx.slice:cri-containerd:pod");
        assert_eq!(made.linux.sysctl["net.core.somaxconn"], "1024");
        assert_eq!(made.linux.namespace("network").unwrap().path, "/run/netns/x");
        assert_eq!(made.linux.namespace("pid").unwrap().path, "");
        assert_eq!(made.linux.namespace("ipc").unwrap().path, "");
        // The pod's user sets its size by limits and by annotations that the operator allows.
        assert_eq!(made.annotations.len(), 1);
        let shape = crate::sizing::shape(&made, &Default::default());
        assert_eq!((shape.cpus, shape.memory_mib), (2, 192));
        assert_eq!(cgroup("/kubepods/podx/", "pod"), "/kubepods/podx/pod");
    }

    #[test]
    fn sandbox_without_netns_gets_own_network_and_no_host_one() {
        let request = CreateSandboxRequest::new();
        let own = spec(&request, &PodSandboxConfig::new(), None).unwrap();
        assert_eq!(own.linux.namespace("network").unwrap().path, "");
        let with = |options: NamespaceOption| PodSandboxConfig {
            linux: MessageField::some(LinuxPodSandboxConfig {
                security_context: MessageField::some(LinuxSandboxSecurityContext {
                    namespace_options: MessageField::some(options),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let hosts = with(NamespaceOption {
            network: NamespaceMode::NODE.into(),
            pid: NamespaceMode::NODE.into(),
            ipc: NamespaceMode::NODE.into(),
            ..Default::default()
        });
        let hosts = spec(&request, &hosts, None).unwrap();
        assert!(hosts.linux.namespaces.is_empty(), "{:?}", hosts.linux.namespaces);
        let users = with(NamespaceOption {
            userns_options: MessageField::some(UserNamespace::new()),
            ..Default::default()
        });
        assert!(spec(&request, &users, None).is_err());
        // Settings of another client stay.
        let given = Spec::default();
        let made = spec(&request, &PodSandboxConfig::new(), Some(given)).unwrap();
        assert!(made.linux.namespace("network").is_none());
    }

    #[test]
    fn unknown_runtime_options_are_ignored_and_broken_refused() {
        let mut any = any(&PodSandboxConfig {
            hostname: "h".into(),
            ..Default::default()
        });
        any.type_url = "example.Options".into();
        assert_eq!(config(Some(&any)).unwrap(), PodSandboxConfig::new());
        any.type_url = format!("types.containerd.io/{CRI}");
        assert_eq!(config(Some(&any)).unwrap().hostname, "h");
        any.value = vec![0xff];
        assert!(config(Some(&any)).is_err());
    }
}
