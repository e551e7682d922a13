//! What the containers of a pod share beside its network: System V objects, message queues, names and `/dev/shm` always, as
//! these are the guest's own; processes where they are to; and what the pod's specification sets for all of them.

use std::collections::BTreeMap;

use thaw_protocol::agent::layout;

use super::Pod;
use crate::error::{Error, Result};
use crate::grouping::Role;
use crate::process::Phase;
use crate::spec::config::Spec;

/// What the pod's own container says of the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shared {
    /// Of the namespaces all its containers are in.
    sysctl: BTreeMap<String, String>,
    /// The pod's containers were to see the host's processes: those of the guest, here.
    sees_all_processes: bool,
}

impl Shared {
    pub fn of(spec: &Spec) -> Shared {
        Shared {
            sysctl: spec.linux.sysctl.clone(),
            sees_all_processes: spec.linux.namespace("pid").is_none(),
        }
    }

    /// Puts it into the specification of one of the pod's; `apart` are those of them that share their processes with nobody.
    ///
    /// A PID namespace with a path is the pod's. Where others have one of their own the path can only be meant for one of
    /// these, as an ephemeral container's is, but all of a pod's have one process on the host: which one, nobody says.
    fn join(&self, id: &str, spec: &mut Spec, apart: &[String]) -> Result<()> {
        for (key, value) in &self.sysctl {
            spec.linux
                .sysctl
                .entry(key.clone())
                .or_insert_with(|| value.clone());
        }
        if self.sees_all_processes {
            spec.linux.namespaces.retain(|namespace| namespace.kind != "pid");
        }
        let mut namespaces = spec.linux.namespaces.iter_mut();
        let joined = namespaces.find(|namespace| namespace.kind == "pid" && !namespace.path.is_empty());
        match (joined, apart) {
            (None, _) | (Some(_), []) => Ok(()),
            (Some(namespace), [only]) => {
                namespace.path = layout::pids_of(only);
                Ok(())
            }
            (Some(_), several) => Err(Error::Unsupported(format!(
                "container {id} is to share the processes of one of {}, and which of them cannot be told: have the pod's \
                 containers share theirs (shareProcessNamespace)",
                several.join(", ")
            ))),
        }
    }
}

impl Pod {
    /// Notes what the pod's own container has for the others, or gives it to one of them.
    pub(super) fn share(&self, id: &str, role: &Role, spec: &mut Spec) -> Result<()> {
        match role {
            Role::Single => Ok(()),
            Role::Pod => {
                let _ = self.shared.set(Shared::of(spec));
                Ok(())
            }
            Role::Member { .. } => {
                let made = self.made();
                let apart = made
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

    fn with_pids(path: &str) -> Spec {
        spec(json!({"namespaces": [{"type": "pid", "path": path}, {"type": "mount"}]}))
    }

    fn pids(spec: &Spec) -> Option<&str> {
        spec.linux
            .namespace("pid")
            .map(|namespace| namespace.path.as_str())
    }

    #[test]
    fn a_pods_sysctls_are_each_containers_unless_it_has_its_own() {
        let shared = Shared::of(&spec(json!({"sysctl": {"net.a": "1", "kernel.b": "2"}})));
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
    fn processes_are_the_pods_or_the_only_others_or_all_of_the_guests() {
        let pod = Shared::of(&with_pids(""));
        let mut own = with_pids("");
        pod.join("c", &mut own, &["a".into(), "b".into()]).unwrap();
        assert_eq!(pids(&own), Some(""));
        let mut shared = with_pids("/proc/7/ns/pid");
        pod.join("c", &mut shared, &[]).unwrap();
        assert_eq!(pids(&shared), Some("/proc/7/ns/pid"));
        pod.join("c", &mut shared, &["a".into()]).unwrap();
        assert_eq!(layout::whose_pids(pids(&shared).unwrap()), Some("a"));
        let mut unclear = with_pids("/proc/7/ns/pid");
        let error = pod
            .join("c", &mut unclear, &["a".into(), "b".into()])
            .unwrap_err();
        assert!(error.to_string().contains("one of a, b"), "{error}");
        let host = Shared::of(&spec(json!({})));
        host.join("c", &mut unclear, &["a".into(), "b".into()]).unwrap();
        assert_eq!(pids(&unclear), None);
    }
}
