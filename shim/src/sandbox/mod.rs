//! A pod created through containerd's sandbox API (`sandboxer = "shim"`): a microVM without a container that
//! stands for it.
//!
//! Invariant: the sandbox lives exactly as long as its microVM. Its containers are those whose bundles name
//! it, and none of them ends it.

pub mod files;
mod metrics;
mod request;

use std::path::PathBuf;

pub use metrics::metrics;
pub use request::{config, spec};
use serde_json::json;
use thaw_protocol::shim::{Any, Timestamp};

use crate::agent::ProcessId;
use crate::process::{Exit, Phase, Process};
use crate::spec::config::Spec;
use crate::stdio::Stdio;

/// containerd's type name of a specification (core/runtime/typeurl.go).
const SPEC: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";

/// A sandbox of containerd.
#[derive(Debug)]
pub struct Sandbox {
    pub id: String,
    pub bundle: PathBuf,
    pub created_at: Timestamp,
    /// The specification that containerd shows to NRI plugins.
    pub spec: Any,
    /// The sandbox's phase and exit status. It has no process in the guest, but is started once and ends
    /// once.
    pub life: Process,
}

impl Sandbox {
    pub fn new(id: &str, bundle: PathBuf, spec: &Spec) -> Sandbox {
        let name = ProcessId {
            container: id.into(),
            exec: id.into(),
        };
        Sandbox {
            id: id.into(),
            bundle,
            created_at: Timestamp::now(),
            spec: shown(spec),
            life: Process::new(name, "", Stdio::default()),
        }
    }

    /// How it ended, or `None` while it exists.
    pub fn ended(&self) -> Option<Exit> {
        match self.life.phase() {
            Phase::Ended(exit) => Some(exit),
            Phase::Created | Phase::Starting | Phase::Running => None,
        }
    }

    /// Its state in CRI's words.
    pub fn state(&self) -> &'static str {
        match self.life.phase() {
            Phase::Running => "SANDBOX_READY",
            Phase::Created | Phase::Starting | Phase::Ended(_) => "SANDBOX_NOTREADY",
        }
    }
}

/// The pod's specification without a container, as OCI JSON.
fn shown(spec: &Spec) -> Any {
    let namespaces = spec.linux.namespaces.iter();
    let namespaces = namespaces.map(|of| json!({"type": of.kind, "path": of.path}));
    let shown = json!({
        "ociVersion": "1.1.0",
        "hostname": spec.hostname,
        "annotations": spec.annotations,
        "linux": {
            "cgroupsPath": spec.linux.cgroups_path,
            "namespaces": namespaces.collect::<Vec<_>>(),
            "sysctl": spec.linux.sysctl,
        },
    });
    Any {
        type_url: SPEC.into(),
        value: shown.to_string().into_bytes(),
        ..Default::default()
    }
}
