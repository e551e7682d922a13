//! A running pod is given block devices of the host, and gives them back: to whichever thawd there is, and at its end.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use thaw_daemon::api::client::Client;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::FreezeSandbox;
use thaw_protocol::shim::pods::*;
use thaw_protocol::shim::pods_ttrpc::PodsClient;
use thaw_sandbox::error::ErrorKind;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd};
use ttrpc::context::Context;

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Loop {
    /// None where loop devices cannot be had.
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

    /// How many descriptors of it a process has, for reading only and for writing.
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

async fn pods(place: &Place) -> PodsClient {
    let address = format!("unix://{}", place.path("run/pods.sock").display());
    PodsClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}

fn record(place: &Place, id: &str) -> Value {
    let path = place.path("run/sandboxes").join(id).join("record.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_has_a_block_device_while_it_is_given_one_and_not_longer() {
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &lasting()) else {
        return;
    };
    let file = place.path("disk");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let Some(device) = Loop::of(&file) else { return };
    let (major, minor) = device.numbers();
    let thawd = Thawd::start(&place);
    let with = Context::default;
    let pod = CreatePodRequest {
        client_pid: std::process::id() as i32,
        cpus: 1,
        memory_mib: place.request()["memory_mib"].as_u64().unwrap() as u32,
        ..Default::default()
    };
    let made = pods(&place).await.create(with(), &pod).await;
    let id = made.unwrap_or_else(|e| panic!("{e}: {}", log(&place))).sandbox_id;
    let vmm: ProcessRecord = serde_json::from_value(record(&place, &id)["vmm"].clone()).unwrap();
    let asked = |minor: u32, read_only: bool| AddDiskRequest {
        sandbox_id: id.clone(),
        major,
        minor,
        read_only,
        ..Default::default()
    };
    let gone = |name: &str| RemoveDiskRequest {
        sandbox_id: id.clone(),
        name: name.into(),
        ..Default::default()
    };

    let client = pods(&place).await;
    let missing = client.add_disk(with(), &asked(1 << 19, false)).await.unwrap_err();
    assert!(missing.to_string().contains("no block device"), "{missing}");
    let mut names = Vec::new();
    for read_only in [false, true, true] {
        let added = client.add_disk(with(), &asked(minor, read_only)).await;
        names.push(added.unwrap_or_else(|e| panic!("{e}: {}", log(&place))).name);
    }
    assert_eq!(names, ["3", "4", "5"]);
    assert_eq!(device.open_in(vmm), (2, 1));
    assert_eq!(device.open_in(thawd.record()), (0, 0), "it is the VMM's alone");
    let full = client
        .add_disk(with(), &asked(minor, false))
        .await
        .unwrap_err()
        .to_string();
    assert!(full.contains("has 3 of the host's at a time"), "{full}");
    client.remove_disk(with(), &gone("4")).await.unwrap();
    client.remove_disk(with(), &gone("4")).await.unwrap();
    assert_eq!(device.open_in(vmm), (1, 1));

    // No snapshot can hold what is on it; the next thawd knows that too, and which slots are taken.
    let freeze: FreezeSandbox = serde_json::from_value(json!({"directory": place.path("frozen")})).unwrap();
    let api = || Client::connect(&place.socket()).unwrap();
    let refused = api().freeze(&id, &freeze).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Shared, "{refused}");
    thawd.kill();
    let thawd = Thawd::start(&place);
    let refused = api().freeze(&id, &freeze).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Shared, "{refused}");
    let client = pods(&place).await;
    assert_eq!(
        client.add_disk(with(), &asked(minor, true)).await.unwrap().name,
        "4"
    );
    assert_eq!(device.open_in(vmm), (2, 1));
    for name in ["3", "4", "5"] {
        client.remove_disk(with(), &gone(name)).await.unwrap();
    }
    assert_eq!(device.open_in(vmm), (0, 0));
    assert!(record(&place, &id)["host_disks"].as_object().unwrap().is_empty());
    let refused = api().freeze(&id, &freeze).await;
    refused.unwrap_or_else(|e| panic!("without one it can be frozen: {e}"));

    client.add_disk(with(), &asked(minor, false)).await.unwrap();
    let end = PodRequest {
        sandbox_id: id.clone(),
        ..Default::default()
    };
    client.end(with(), &end).await.unwrap();
    eventually("the VMM has ended", || !vmm.lives());
    client.remove_disk(with(), &gone("3")).await.unwrap();
    assert!(thawd.stop().success());
}
