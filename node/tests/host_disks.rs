//! Block devices of the host attached to a running pod, by any thawd, until they are detached or the pod ends.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use thaw_daemon::api::client::Client;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::FreezeSandbox;
use thaw_protocol::shim::pods::{AddDiskRequest, RemoveDiskRequest};
use thaw_sandbox::error::ErrorKind;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd};
use ttrpc::context::Context;

#[path = "support/pods.rs"]
mod pods;

use pods::{process, record};

/// A loop device. Dropping it detaches it.
struct Loop(PathBuf);

impl Loop {
    /// `None` if this host has no loop devices.
    fn of(file: &Path) -> Option<Loop> {
        let attached = Command::new("losetup")
            .arg("--find")
            .arg("--show")
            .arg(file)
            .output();
        match attached {
            Ok(done) if done.status.success() => Some(Loop(PathBuf::from(
                String::from_utf8(done.stdout).unwrap().trim(),
            ))),
            other => {
                thaw_test_skip::skip(format!("no loop device: {other:?}"));
                None
            }
        }
    }

    fn numbers(&self) -> (u32, u32) {
        let number = fs::metadata(&self.0).unwrap().rdev();
        (rustix::fs::major(number), rustix::fs::minor(number))
    }

    /// The number of descriptors of the device in a process: read-only ones and writable ones.
    fn open_in(&self, process: ProcessRecord) -> (usize, usize) {
        let of = format!("/proc/{}", process.pid);
        let (mut reading, mut writing) = (0, 0);
        for entry in fs::read_dir(format!("{of}/fd")).unwrap().flatten() {
            if fs::metadata(entry.path()).is_ok_and(|m| m.rdev() == fs::metadata(&self.0).unwrap().rdev()) {
                let number = entry.file_name().into_string().unwrap();
                let told = fs::read_to_string(format!("{of}/fdinfo/{number}")).unwrap();
                let flags = told.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
                match u32::from_str_radix(flags.trim(), 8).unwrap() & 3 {
                    0 => reading += 1,
                    _ => writing += 1,
                }
            }
        }
        (reading, writing)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A pod, and a device to attach to it.
struct Setup {
    /// Dropped, and so detached, before its file is removed.
    device: Loop,
    place: Place,
    id: String,
    vmm: ProcessRecord,
}

impl Setup {
    /// `None` if the test cannot run here.
    async fn start() -> Option<(Setup, Thawd)> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
        let place = Place::new(binaries, &lasting())?;
        let file = place.path("disk");
        fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let device = Loop::of(&file)?;
        let thawd = Thawd::start(&place);
        let id = pods::create(&place).await;
        let vmm = process(&record(&place, &id), "vmm");
        let setup = Setup {
            device,
            place,
            id,
            vmm,
        };
        Some((setup, thawd))
    }

    /// Attaches the device. Returns its name in the pod.
    async fn add(&self, read_only: bool) -> Result<String, String> {
        let (major, minor) = self.device.numbers();
        self.add_numbered(major, minor, read_only).await
    }

    async fn add_numbered(&self, major: u32, minor: u32, read_only: bool) -> Result<String, String> {
        let request = AddDiskRequest {
            sandbox_id: self.id.clone(),
            major,
            minor,
            read_only,
            ..Default::default()
        };
        let client = pods::connect(&self.place).await;
        let added = client.add_disk(Context::default(), &request).await;
        added.map(|added| added.name).map_err(|e| e.to_string())
    }

    async fn remove(&self, name: &str) {
        let request = RemoveDiskRequest {
            sandbox_id: self.id.clone(),
            name: name.into(),
            ..Default::default()
        };
        let client = pods::connect(&self.place).await;
        client.remove_disk(Context::default(), &request).await.unwrap();
    }

    /// The number of descriptors of the device in the VMM: read-only ones and writable ones.
    fn open_in_vmm(&self) -> (usize, usize) {
        self.device.open_in(self.vmm)
    }

    async fn freeze(&self) -> Result<(), ErrorKind> {
        let directory = json!({"directory": self.place.path("frozen")});
        let request: FreezeSandbox = serde_json::from_value(directory).unwrap();
        let client = Client::connect(&self.place.socket()).unwrap();
        let frozen = client.freeze(&self.id, &request).await;
        frozen.map(drop).map_err(|e| e.kind)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_devices_are_attached_to_a_pod_and_detached() {
    let Some((pod, thawd)) = Setup::start().await else {
        return;
    };
    let (major, _) = pod.device.numbers();
    let missing = pod.add_numbered(major, 1 << 19, false).await.unwrap_err();
    assert!(missing.contains("no block device"), "{missing}");
    for (read_only, name) in [(false, "3"), (true, "4"), (true, "5")] {
        let added = pod.add(read_only).await;
        assert_eq!(added.unwrap_or_else(|e| panic!("{e}: {}", log(&pod.place))), name);
    }
    assert_eq!(pod.open_in_vmm(), (2, 1));
    let of_thawd = pod.device.open_in(thawd.record());
    assert_eq!(of_thawd, (0, 0), "it is the VMM's alone");
    let full = pod.add(false).await.unwrap_err();
    assert!(full.contains("has 3 of the host's at a time"), "{full}");
    for _ in 0..2 {
        pod.remove("4").await;
    }
    assert_eq!(pod.open_in_vmm(), (1, 1));
    pods::end(&pod.place, &pod.id).await;
    eventually("the VMM has ended", || !pod.vmm.lives());
    pod.remove("3").await;
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attached_block_devices_are_known_to_the_next_thawd() {
    let Some((pod, thawd)) = Setup::start().await else {
        return;
    };
    for read_only in [false, true, true] {
        pod.add(read_only).await.unwrap();
    }
    pod.remove("4").await;
    // A snapshot cannot contain a device's data. The next thawd also knows that, and which slots are taken.
    assert_eq!(pod.freeze().await, Err(ErrorKind::Shared));
    thawd.kill();
    let thawd = Thawd::start(&pod.place);
    assert_eq!(pod.freeze().await, Err(ErrorKind::Shared));
    assert_eq!(pod.add(true).await.unwrap(), "4");
    assert_eq!(pod.open_in_vmm(), (2, 1));
    for name in ["3", "4", "5"] {
        pod.remove(name).await;
    }
    assert_eq!(pod.open_in_vmm(), (0, 0));
    let left = record(&pod.place, &pod.id);
    assert!(left["host_disks"].as_object().unwrap().is_empty());
    assert_eq!(pod.freeze().await, Ok(()), "without a device it can be frozen");

    pod.add(false).await.unwrap();
    pods::end(&pod.place, &pod.id).await;
    eventually("the VMM has ended", || !pod.vmm.lives());
    pod.remove("3").await;
    assert!(thawd.stop().success());
}
