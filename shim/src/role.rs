//! The role of a container in its pod, from CRI's annotations. A container without them is a pod of its own.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Result};

/// Annotation with a container's role: containerd's name and CRI-O's.
const KIND: [&str; 2] = [
    "io.kubernetes.cri.container-type",
    "io.kubernetes.cri-o.ContainerType",
];
const POD: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];

/// The file in a bundle that names the sandbox of a container created through the sandbox API.
const SANDBOX: &str = "sandbox";

/// A container's role in its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The only container of a microVM.
    Single,
    /// The pod's own container: it stands for the microVM and has no process in it.
    Pod,
    /// Another container of a pod.
    Member { pod: String },
}

impl Role {
    /// The role that the annotations of container `id` give.
    pub fn of(id: &str, annotations: &BTreeMap<String, String>) -> Result<Role> {
        let first = |names: [&str; 2]| names.iter().find_map(|name| annotations.get(*name));
        match first(KIND).map(String::as_str) {
            None => Ok(Role::Single),
            Some("sandbox") => Ok(Role::Pod),
            Some("container") => match first(POD) {
                Some(pod) if pod == id => Ok(Role::Pod),
                Some(pod) if !pod.is_empty() => Ok(Role::Member { pod: pod.clone() }),
                _ => Err(Error::Invalid(format!(
                    "container {id} is annotated as a member of a pod, but annotation {} is missing",
                    POD[0]
                ))),
            },
            Some(other) => Err(Error::Invalid(format!(
                "container {id}: annotation {} is {other:?}, neither sandbox nor container",
                KIND[0]
            ))),
        }
    }

    /// As [`Role::of`]; a container of the sandbox API has its pod's id in a file in `bundle`.
    pub fn of_bundle(id: &str, annotations: &BTreeMap<String, String>, bundle: &Path) -> Result<Role> {
        let role = Role::of(id, annotations)?;
        if role != Role::Single {
            return Ok(role);
        }
        match std::fs::read_to_string(bundle.join(SANDBOX)) {
            Ok(pod) if !pod.is_empty() && pod != id => Ok(Role::Member { pod }),
            _ => Ok(role),
        }
    }

    /// The pod's id, which is the id of the container that its shim was started for.
    pub fn pod<'a>(&'a self, id: &'a str) -> &'a str {
        match self {
            Role::Single | Role::Pod => id,
            Role::Member { pod } => pod,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(pairs: &[(&str, &str)]) -> Result<Role> {
        let owned = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        Role::of("me", &owned.collect())
    }

    #[test]
    fn annotations_of_either_engine_say_who_belongs_together() {
        assert_eq!(role(&[]).unwrap(), Role::Single);
        assert_eq!(
            role(&[("io.kubernetes.cri.container-type", "sandbox")]).unwrap(),
            Role::Pod
        );
        let member = role(&[
            ("io.kubernetes.cri.container-type", "container"),
            ("io.kubernetes.cri.sandbox-id", "pod"),
        ]);
        let member = member.unwrap();
        assert_eq!(member, Role::Member { pod: "pod".into() });
        assert_eq!((member.pod("me"), Role::Single.pod("me")), ("pod", "me"));
        let crio = role(&[
            ("io.kubernetes.cri-o.ContainerType", "container"),
            ("io.kubernetes.cri-o.SandboxID", "pod"),
        ]);
        assert_eq!(crio.unwrap(), member);
        assert!(role(&[("io.kubernetes.cri.container-type", "container")]).is_err());
        assert!(role(&[("io.kubernetes.cri.container-type", "x")]).is_err());
    }

    #[test]
    fn sandbox_id_comes_from_the_bundle_without_annotations() {
        let bundle = tempfile::tempdir().unwrap();
        let of = |annotations: &BTreeMap<_, _>| Role::of_bundle("me", annotations, bundle.path()).unwrap();
        assert_eq!(of(&BTreeMap::new()), Role::Single);
        std::fs::write(bundle.path().join(SANDBOX), "pod").unwrap();
        assert_eq!(of(&BTreeMap::new()), Role::Member { pod: "pod".into() });
        let annotations = BTreeMap::from([(KIND[0].to_owned(), "sandbox".to_owned())]);
        assert_eq!(of(&annotations), Role::Pod);
    }
}
