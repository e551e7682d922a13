//! What of a file may be in a bundle.
//!
//! Invariant: lists say what is shown. A key that is added elsewhere stays out until it is listed here.

use serde_json::Value;

/// Keys of a record that are shown, with all below them. Not the command and the volumes: their values are the user's.
const OF_RECORD: [&str; 16] = [
    "version",
    "id",
    "image_digest",
    "created",
    "owner",
    "client",
    "vmm",
    "control",
    "cgroup",
    "tethered",
    "ready",
    "vcpus",
    "memory_mib",
    "share",
    "cpu_limit_millis",
    "root",
];
/// Keys of the configuration whose texts are shown. Numbers and truth values always are.
const OF_CONFIG: [&str; 5] = ["limit", "listen", "range", "fast_path", "kind"];
const HIDDEN: &str = "(hidden)";

/// A configuration whose texts are hidden unless they are known to be harmless.
pub fn config(text: &[u8]) -> Result<Vec<u8>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "not text")?;
    // The parser's message would quote the line.
    let mut table: toml::Table = text.parse().map_err(|_| "not TOML: see `thawd config check`")?;
    for (key, value) in &mut table {
        hide(key, value);
    }
    toml::to_string(&table)
        .map(String::into_bytes)
        .map_err(|_| "not TOML".into())
}

fn hide(key: &str, value: &mut toml::Value) {
    match value {
        toml::Value::String(text) if !OF_CONFIG.contains(&key) => *text = HIDDEN.into(),
        toml::Value::Array(all) => all.iter_mut().for_each(|value| hide(key, value)),
        // All headers are hidden, whatever their names.
        toml::Value::Table(_) if key == "headers" => *value = HIDDEN.into(),
        toml::Value::Table(table) => table.iter_mut().for_each(|(key, value)| hide(key, value)),
        _ => {}
    }
}

/// A record without what users wrote.
pub fn record(text: &[u8]) -> Result<Vec<u8>, String> {
    let mut record: Value = serde_json::from_slice(text).map_err(|_| "not JSON")?;
    let fields = record.as_object_mut().ok_or("no object")?;
    fields.retain(|key, _| OF_RECORD.contains(&key.as_str()));
    serde_json::to_vec_pretty(&record).map_err(|e| e.to_string())
}

/// Mounts (proc_pid_mountinfo(5)) with their place and type, without options and sources: those of a network file system may have passwords.
pub fn mounts(text: &[u8]) -> Vec<u8> {
    let mut shown = String::new();
    for line in String::from_utf8_lossy(text).lines() {
        let place = line.split(' ').nth(4);
        let kind = line
            .split_once(" - ")
            .and_then(|(_, rest)| rest.split(' ').next());
        if let (Some(place), Some(kind)) = (place, kind) {
            shown += &format!("{place} {kind}\n");
        }
    }
    shown.into_bytes()
}
