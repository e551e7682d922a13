//! What the containers of a pod share besides the network. They always share IPC objects, hostname and
//! `/dev/shm`, which are the guest's own; they share processes if requested, and sysctls that the pod's
//! specification sets.

use std::collections::BTreeMap;

use thaw_protocol::agent::layout;

use super::Pod;
use crate::error::{Error, Result};
use crate::process::Phase;
use crate::role::Role;
use crate::spec::config::Spec;
use crate::spec::host;

/// Settings of the pod's own container for the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shared {
    /// Sysctls of the namespaces that all containers share.
    sysctl: BTreeMap<String, String>,
    /// The pod accepts the guest's namespaces in place of the host's.
    accepts_guest_namespaces: bool,
    /// The pod asked for the host's PID namespace, and its containers see the guest's processes instead.
    shares_guest_pids: bool,
}

impl Shared {
    /// Reads a pod's specification. Refuses one that asks for namespaces of the host, unless it accepts the
    /// guest's instead.
    pub fn of(spec: &Spec) -> Result<Shared> {
        let accepts_guest_namespaces = host::accepts_guest_namespaces(&spec.annotations)?;
        if !accepts_guest_namespaces {
            host::refuse_processes(spec)?;
            host::refuse_ipc(spec)?;
        }
        Ok(Shared {
            sysctl: spec.linux.sysctl.clone(),
            accepts_guest_namespaces,
            shares_guest_pids: spec.linux.namespace("pid").is_none(),
        })
    }

    /// Applies the settings to the specification of a container; `apart` lists the containers with PID
    /// namespaces of their own.
    ///
    /// A PID namespace with a path is the pod's. If containers have PID namespaces of their own, the path
    /// refers to one of these, as for an ephemeral container. Which one is unknown if there are several,
    /// because the tasks of a pod have the same process id on the host.
    fn join(&self, id: &str, spec: &mut Spec, apart: &[String]) -> Result<()> {
        for (key, value) in &self.sysctl {
            spec.linux
                .sysctl
                .entry(key.clone())
                .or_insert_with(|| value.clone());
        }
        if self.shares_guest_pids {
            spec.linux.namespaces.retain(|namespace| namespace.kind != "pid");
        } else if !self.accepts_guest_namespaces {
            host::refuse_processes(spec)?;
        }
        let mut namespaces = spec.linux.namespaces.iter_mut();
        let joined = namespaces.find(|namespace| namespace.kind == "pid" && !namespace.path.is_empty());
        match (joined, apart) {
            (None, _) | (Some(_), []) => Ok(()),
            (Some(namespace), [only]) => {
                namespace.path = layout::pid_namespace_path(only);
                Ok(())
            }
            (Some(_), several) => Err(Error::Unsupported(format!(
                "container {id} shares the processes of one of {}, but which one is unknown: have the pod's \
                 containers share theirs (shareProcessNamespace)",
                several.join(", ")
            ))),
        }
    }
}

impl Pod {
    /// Records the settings of the pod's own container, or applies them to another container.
    pub(super) fn share(&self, id: &str, role: &Role, spec: &mut Spec) -> Result<()> {
        match role {
            Role::Single => Shared::of(spec).map(|_| ()),
            Role::Pod => {
                let _ = self.shared.set(Shared::of(spec)?);
                Ok(())
            }
            Role::Member { .. } => {
                let containers = self.created();
                let apart = containers
                    .iter()
                    .filter(|c| {
                        c.is_in_guest() && c.has_own_pids && !matches!(c.init.phase(), Phase::Ended(_))
                    })
                    .map(|c| c.id.clone());
                let apart: Vec<_> = apart.collect();
                let shared = self.shared.get().cloned().unwrap_or_default();
                shared.join(id, spec, &apart)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(linux: serde_json::Value) -> Spec {
        serde_json::from_value(json!({ "linux": linux })).unwrap()
    }

    /// The settings of a pod with this specification, if it accepts the guest's namespaces.
    fn accepting(mut spec: Spec) -> Shared {
        let accepted = (host::ANNOTATION.to_owned(), "guest".to_owned());
        spec.annotations.extend([accepted]);
        Shared::of(&spec).unwrap()
    }

    fn with_pids(path: &str) -> Spec {
        spec(json!({"namespaces": [{"type": "pid", "path": path}, {"type": "ipc"}, {"type": "mount"}]}))
    }

    fn pids(spec: &Spec) -> Option<&str> {
        spec.linux
            .namespace("pid")
            .map(|namespace| namespace.path.as_str())
    }

    #[test]
    fn pod_sysctls_are_defaults_of_its_containers() {
        let shared = accepting(spec(json!({"sysctl": {"net.a": "1", "kernel.b": "2"}})));
        let mut member = spec(json!({"sysctl": {"kernel.b": "3"}}));
        shared.join("c", &mut member, &[]).unwrap();
        let told: Vec<_> = member
            .linux
            .sysctl
            .iter()
            .map(|(k, v)| format!("{k}={v}"))
            .collect();
        assert_eq!(told, ["kernel.b=3", "net.a=1"]);
    }

    #[test]
    fn pid_namespace_is_the_pods_anothers_or_the_guests() {
        let pod = Shared::of(&with_pids("")).unwrap();
        let mut own = with_pids("");
        pod.join("c", &mut own, &["a".into(), "b".into()]).unwrap();
        assert_eq!(pids(&own), Some(""));
        let mut shared = with_pids("/proc/7/ns/pid");
        pod.join("c", &mut shared, &[]).unwrap();
        assert_eq!(pids(&shared), Some("/proc/7/ns/pid"));
        pod.join("c", &mut shared, &["a".into()]).unwrap();
        assert_eq!(
            layout::container_of_pid_namespace(pids(&shared).unwrap()),
            Some("a")
        );
        let mut unclear = with_pids("/proc/7/ns/pid");
        let error = pod
            .join("c", &mut unclear, &["a".into(), "b".into()])
            .unwrap_err();
        assert!(error.to_string().contains("one of a, b"), "{error}");
        let host = accepting(spec(json!({})));
        host.join("c", &mut unclear, &["a".into(), "b".into()]).unwrap();
        assert_eq!(pids(&unclear), None);
    }

    #[test]
    fn host_namespaces_are_refused_unless_mapped_to_the_guests() {
        for (own, word) in [("ipc", "hostPID"), ("pid", "hostIPC")] {
            let asking = spec(json!({"namespaces": [{"type": own}]}));
            let error = Shared::of(&asking).unwrap_err();
            assert!(matches!(error, Error::Unsupported(_)), "{error}");
            assert!(error.to_string().contains(word), "{error}");
            assert!(error.to_string().contains(host::ANNOTATION), "{error}");
            let shared = accepting(asking);
            assert_eq!(shared.shares_guest_pids, own == "ipc");
        }
        let mut unknown = with_pids("");
        unknown.annotations.insert(host::ANNOTATION.into(), "host".into());
        let error = Shared::of(&unknown).unwrap_err();
        assert!(error.to_string().contains("its only value is"), "{error}");
    }

    #[test]
    fn container_with_host_pid_namespace_is_refused_as_its_pod() {
        let ipc_alone = || spec(json!({"namespaces": [{"type": "ipc"}]}));
        let pod = Shared::of(&with_pids("")).unwrap();
        let error = pod.join("c", &mut ipc_alone(), &[]).unwrap_err();
        assert!(error.to_string().contains("hostPID"), "{error}");
        accepting(with_pids("")).join("c", &mut ipc_alone(), &[]).unwrap();
        // IPC objects belong to the pod, whatever its containers' specifications say.
        pod.join("c", &mut spec(json!({"namespaces": [{"type": "pid"}]})), &[])
            .unwrap();
    }
}
