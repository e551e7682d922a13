//! Namespaces of the host that a specification asks for: PID and IPC.
//!
//! Invariant: a container gets the guest's namespace in place of the host's only if its pod accepts that. A
//! namespace that a specification does not list is the runtime's own, which is the host's (OCI runtime
//! specification, `config-linux.md`).

use std::collections::BTreeMap;

use super::config::Spec;
use crate::error::{Error, Result};

/// Annotation by which a pod accepts the guest's namespaces in place of the host's, and its only value.
pub const ANNOTATION: &str = "run.thaw.host-namespaces";
const GUEST: &str = "guest";

/// Whether the annotations accept the guest's namespaces in place of the host's.
pub fn accepts_guest_namespaces(annotations: &BTreeMap<String, String>) -> Result<bool> {
    match annotations.get(ANNOTATION).map(String::as_str) {
        None => Ok(false),
        Some(GUEST) => Ok(true),
        Some(other) => Err(Error::Invalid(format!(
            "annotation {ANNOTATION} is {other:?}: its only value is {GUEST:?}"
        ))),
    }
}

/// Refuses a specification that asks for the host's PID namespace.
pub fn refuse_processes(spec: &Spec) -> Result<()> {
    refuse(spec, "pid", "processes", "hostPID, --pid=host")
}

/// Refuses a specification that asks for the host's IPC namespace.
pub fn refuse_ipc(spec: &Spec) -> Result<()> {
    refuse(spec, "ipc", "IPC objects", "hostIPC, --ipc=host")
}

fn refuse(spec: &Spec, kind: &str, what: &str, how: &str) -> Result<()> {
    if spec.linux.namespace(kind).is_some() {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "the host's {what} cannot be a microVM's: ask for none ({how}), or annotate the pod {ANNOTATION}={GUEST} to have the \
         guest's own instead"
    )))
}
