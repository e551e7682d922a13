//! A pod made by containerd's sandbox API (`sandboxer = "shim"`): a microVM with no container that stands for it.
//!
//! Invariant: its life is that of its microVM. It is made with it, ends with it whoever ends that, and its containers are those
//! whose bundles name it; none of them ends it.

pub mod files;
mod metrics;
mod request;
mod service;

use std::path::PathBuf;

pub use metrics::metrics;
pub use request::{config, spec};
use serde_json::json;
use thaw_protocol::shim::{Any, Timestamp};

use crate::agent::ProcessId;
use crate::process::{Exit, Phase, Process};
use crate::spec::config::Spec;
use crate::stdio::Stdio;

/// The type under which containerd knows a specification (its core/runtime/typeurl.go).
const SPEC: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";

/// A sandbox, as containerd has it.
#[derive(Debug)]
pub struct Sandbox {
    pub id: String,
    pub bundle: PathBuf,
    pub created_at: Timestamp,
    /// What containerd shows NRI's plugins of it.
    pub spec: Any,
    /// What stands for it: nothing in the guest, but it is started once and ends once.
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

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<Exit> {
        match self.life.phase() {
            Phase::Ended(exit) => Some(exit),
            Phase::Created | Phase::Starting | Phase::Running => None,
        }
    }

    /// CRI's name of its state.
    pub fn state(&self) -> &'static str {
        match self.life.phase() {
            Phase::Running => "SANDBOX_READY",
            Phase::Created | Phase::Starting | Phase::Ended(_) => "SANDBOX_NOTREADY",
        }
    }
}

/// A pod's specification, as far as it is one without a container: the OCI runtime specification's JSON.
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
