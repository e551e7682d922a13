//! Each record on disk as the previous release wrote it and as this one does: byte for byte in `previous/` and `current/`.
//!
//! `previous/` is never edited: it is what nodes have on their disks. A change of `current/` is a change of format, which the release
//! before this one must still be able to read: a field may be added, and none it knows be taken away or mean something else.
//! `THAW_WRITE_FIXTURES=1 cargo test` writes `current/` anew.

#![allow(clippy::unwrap_used)]

use std::fmt::Debug;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A snapshot's manifest as the previous release wrote it.
pub const PREVIOUS_MANIFEST: &[u8] = include_bytes!("../previous/manifest.json");

fn read(name: &str, release: &str) -> Vec<u8> {
    let path = place(name, release);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn place(name: &str, release: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(release).join(name)
}

/// Has the record `name` of both releases read, compared, and written as this release writes it. Those that are one for the other:
/// what the previous release knows is in both.
///
/// # Panics
/// Where they differ.
pub fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(name: &str) -> T {
    let previous = read(name, "previous");
    let record: T = thaw_records::decode(&previous).unwrap_or_else(|e| panic!("previous/{name}: {e}"));
    let written = thaw_records::encode(&record).unwrap();
    if std::env::var_os("THAW_WRITE_FIXTURES").is_some() {
        std::fs::write(place(name, "current"), &written).unwrap();
    }
    let current = read(name, "current");
    assert_eq!(
        String::from_utf8_lossy(&written),
        String::from_utf8_lossy(&current),
        "current/{name} is not what is written"
    );
    assert_eq!(
        thaw_records::decode::<T>(&current).unwrap(),
        record,
        "current/{name}"
    );
    let (previous, current): (Value, Value) = (
        serde_json::from_slice(&previous).unwrap(),
        serde_json::from_slice(&current).unwrap(),
    );
    assert_eq!(current["version"], thaw_records::VERSION, "current/{name}");
    has_all_of(name, &previous, &current);
    record
}

/// Whoever reads `previous` finds all of it in `current`.
fn has_all_of(path: &str, previous: &Value, current: &Value) {
    match (previous, current) {
        (Value::Object(previous), Value::Object(current)) => {
            for (key, value) in previous {
                let found = current.get(key);
                let found = found.unwrap_or_else(|| panic!("{path}.{key} is not there any more"));
                has_all_of(&format!("{path}.{key}"), value, found);
            }
        }
        _ => assert_eq!(previous, current, "{path}"),
    }
}
