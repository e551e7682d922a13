//! Descriptions of templates: for people in `thaw template`, for programs in `thaw template --json` and thawd's API.

use thaw_protocol::api;

use super::Entry;
use crate::snapshot::Manifest;

/// The description for programs.
pub fn describe(entry: &Entry) -> api::Template {
    let manifest = entry.manifest.as_ref();
    let machine = manifest.ok().map(|m| m.subject.machine);
    api::Template {
        key: entry.key.as_str().to_owned(),
        created: manifest.ok().map(|m| m.created),
        thaw: manifest.ok().map(|m| m.thaw.clone()),
        cpus_max: machine.map(|m| m.vcpus),
        memory_mib: machine.map(|m| m.memory_mib),
        baseline: manifest.ok().map(baseline),
        memory_data_bytes: manifest.ok().map(|m| m.files.memory.data_bytes),
        disk_bytes: entry.disk_bytes,
        stale: entry.stale.clone(),
        error: manifest
            .err()
            .map(ToString::to_string)
            .or_else(|| entry.damaged.clone()),
    }
}

/// The CPU baseline, as flags spell it.
pub fn baseline(manifest: &Manifest) -> String {
    let value = serde_json::json!(manifest.subject.cpu.baseline);
    value.as_str().unwrap_or_default().to_owned()
}
