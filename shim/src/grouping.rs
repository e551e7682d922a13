//! Which containers share a microVM: CRI says so by annotations. Whoever has none is a pod of one.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Result};

/// containerd's, older containerds' and CRI-O's names of what a container is, and of which pod.
const KIND: [&str; 2] = [
    "io.kubernetes.cri.container-type",
    "io.kubernetes.cri-o.ContainerType",
];
const POD: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];

/// The file of a bundle that names the pod of a container made in a sandbox.
const SANDBOX: &str = "sandbox";

/// What a container is to its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// All there is in a microVM of its own.
    Single,
    /// The pod's own: it stands for the microVM, and needs no process there.
    Pod,
    /// One of a pod's.
    Member { pod: String },
}

impl Role {
    /// What the annotations of container `id` say.
    pub fn of(id: &str, annotations: &BTreeMap<String, String>) -> Result<Role> {
        let first = |names: [&str; 2]| names.iter().find_map(|name| annotations.get(*name));
        match first(KIND).map(String::as_str) {
            None => Ok(Role::Single),
            Some("sandbox") => Ok(Role::Pod),
            Some("container") => match first(POD) {
                Some(pod) if pod == id => Ok(Role::Pod),
                Some(pod) if !pod.is_empty() => Ok(Role::Member { pod: pod.clone() }),
                _ => Err(Error::Invalid(format!(
                    "container {id} is annotated as one of a pod's, and no {} says which pod",
                    POD[0]
                ))),
            },
            Some(other) => Err(Error::Invalid(format!(
                "container {id}: annotation {} is {other:?}, neither sandbox nor container",
                KIND[0]
            ))),
        }
    }

    /// The same of the container in `bundle`, where containerd's sandbox API leaves the id of its pod.
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

    /// The id that names the pod: that of the container its shim is started for.
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
