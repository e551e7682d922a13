//! A freeze, a push, a pull and a pause on a disk that becomes full at each of their writes: the answer says so, the sandbox runs on, and
//! nothing is left. With enough room, the same request succeeds.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use serde_json::{Value, json};
use thaw_test_registry::memory::Registry;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd, asked};

/// The sandbox's path.
const WEB: &str = "/v1/sandboxes/web";
/// Bytes of a block of the disk.
const BLOCK: u64 = 4096;
/// Directories of the data directory whose files are kept for later.
const KEPT: [&str; 3] = ["components", "images", "verified"];

/// A small disk at a directory. Dropping it removes it.
struct Disk(PathBuf);

impl Disk {
    /// `None` if this process may not mount one.
    fn at(directory: &Path) -> Option<Disk> {
        fs::create_dir_all(directory).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256m,mode=700", "tmpfs"])
            .arg(directory)
            .output();
        match mounted {
            Ok(done) if done.status.success() => Some(Disk(directory.to_owned())),
            other => {
                thaw_test_skip::skip(format!("no small disk: {other:?}"));
                None
            }
        }
    }

    /// A file that fills it.
    fn filler(&self) -> Filler {
        let place = self.0.join("filler");
        Filler {
            file: File::create(&place).unwrap(),
            place,
        }
    }

    /// The names below it, but for what is kept, and for the directories in it, which are made once.
    fn names(&self) -> BTreeSet<PathBuf> {
        let mut names = BTreeSet::new();
        let mut directories = vec![self.0.clone()];
        while let Some(directory) = directories.pop() {
            let is_top = directory == self.0;
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if KEPT.iter().any(|kept| path == self.0.join(kept)) {
                    continue;
                }
                let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
                if is_directory {
                    directories.push(path.clone());
                }
                if !(is_top && is_directory) {
                    names.insert(path);
                }
            }
        }
        names
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Dropping it removes the file.
struct Filler {
    place: PathBuf,
    file: File,
}

impl Filler {
    /// Leaves so many blocks of the disk free.
    fn leave(&self, blocks: u64) {
        let free = statvfs(&self.place).unwrap().f_bfree;
        let length = self.file.metadata().unwrap().len();
        let new = (length + free * BLOCK).saturating_sub(blocks * BLOCK);
        if new < length {
            self.file.set_len(new).unwrap();
        } else if new > length {
            fallocate(&self.file, FallocateFlags::empty(), length, new - length).unwrap();
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.place);
    }
}

/// A node with a sandbox, whose data is on a small disk. The fields are dropped in this order.
struct Node {
    thawd: Thawd,
    disk: Disk,
    place: Place,
}

impl Node {
    fn new() -> Option<Node> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent()?;
        let place = Place::new(binaries, &lasting())?;
        place.fill_pools_to(0..=0, 0..=0);
        let disk = Disk::at(&place.path("data"))?;
        let node = Node {
            thawd: Thawd::start(&place),
            disk,
            place,
        };
        let mut web = node.place.request();
        web["name"] = "web".into();
        asked::done(&node.place, "POST /v1/sandboxes", &web);
        Some(node)
    }

    fn ask(&self, request: &str, body: &Value) -> (String, Value) {
        let stream = asked::ask(&self.place, request, None, body).unwrap();
        let (status, body) = asked::answer(stream).unwrap();
        (status, serde_json::from_str(&body).unwrap_or_default())
    }

    /// Asks with ever more room on the disk, until that suffices. Returns how often it did not, and the answer.
    fn with_more_room(&self, request: &str, body: &Value) -> (usize, Value) {
        let filler = self.disk.filler();
        let before = self.disk.names();
        let (mut room, mut refused) = (0, 0);
        loop {
            filler.leave(room);
            let (status, answer) = self.ask(request, body);
            if status.contains(" 20") {
                return (refused, answer);
            }
            let what = format!("{request} with {room} blocks");
            assert!(
                status.contains(" 507") && answer["code"] == "disk-full",
                "{what}: {status} {answer}; {}",
                log(&self.place)
            );
            eventually(&format!("{what}: nothing is left"), || {
                self.disk.names() == before
            });
            let shown = asked::done(&self.place, &format!("GET {WEB}"), &json!(null));
            assert_eq!(shown["state"], "running", "{what}: {}", log(&self.place));
            refused += 1;
            room += 1 + room / 8;
            assert!(room < 1 << 16, "{what}: {status} {answer}");
        }
    }
}

#[test]
fn full_disk_at_any_write_leaves_nothing_and_stops_nothing() {
    let Some(node) = Node::new() else { return };
    let registry = Registry::start().unwrap();
    let reference = json!({"reference": format!("{}/web:ready", registry.host())});
    let (refused, frozen) = node.with_more_room(&format!("POST {WEB}/freeze"), &json!({}));
    assert!(refused > 3, "{refused}");
    let stored = format!("/v1/snapshots/{}", frozen["snapshot"].as_str().unwrap());
    // A pack waits on the disk before it is sent.
    let (refused, _) = node.with_more_room(&format!("POST {stored}/push"), &reference);
    assert!(refused > 0, "{refused}");
    let (refused, pulled) = node.with_more_room("POST /v1/snapshots", &reference);
    assert!(refused > 3, "{refused}");
    let pulled = format!("/v1/snapshots/{}", pulled["id"].as_str().unwrap());
    for snapshot in [&stored, &pulled] {
        let verified = asked::done(&node.place, &format!("POST {snapshot}/verify"), &json!({}));
        assert_eq!(verified["damaged"], json!([]));
        asked::done(&node.place, &format!("DELETE {snapshot}"), &json!({}));
    }
    let release = json!({"memory": "release"});
    let (refused, _) = node.with_more_room(&format!("POST {WEB}/pause"), &release);
    assert!(refused > 3, "{refused}");
    asked::done(&node.place, &format!("POST {WEB}/resume"), &json!({}));
    // It works as before.
    asked::done(&node.place, &format!("POST {WEB}/freeze"), &json!({}));
    asked::done(&node.place, &format!("DELETE {WEB}"), &json!({}));
    let Node { thawd, disk, place } = node;
    assert!(thawd.stop().success(), "{}", log(&place));
    drop(disk);
}
