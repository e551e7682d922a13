//! thaw-share lives exactly as long as its sandbox, whichever thawd owns the sandbox.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use thaw_daemon::api::client::Client;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, FreezeSandbox};
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::{AddShareRequest, RemoveShareRequest, ShareSource};
use thaw_sandbox::error::ErrorKind;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd};
use ttrpc::context::Context;

#[path = "support/pods.rs"]
mod pods;

use pods::{process, record};

/// `None` if the test cannot run here; the reason has been reported.
fn place() -> Option<Place> {
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    if !binaries.join("thaw-share").exists() {
        thaw_test_skip::skip("thaw-share is not built");
        return None;
    }
    let place = Place::new(binaries, &lasting())?;
    fs::create_dir(place.path("shared")).unwrap();
    fs::write(place.path("file"), b"one").unwrap();
    Some(place)
}

fn client(place: &Place) -> Client {
    Client::connect(&place.socket()).unwrap()
}

fn request(place: &Place) -> CreateSandbox {
    let mut request = place.request();
    request["volumes"] = json!([
        {"host": place.path("shared"), "guest": "/data"},
        {"host": place.path("file"), "guest": "/etc/file", "read_only": true},
    ]);
    serde_json::from_value(request).unwrap()
}

fn cgroup(process: ProcessRecord) -> String {
    fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap()
}

async fn create(place: &Place) -> (String, ProcessRecord, ProcessRecord) {
    let made = client(place).create(&request(place)).await;
    let id = made
        .unwrap_or_else(|e| panic!("{e} {:?}: {}", e.context, log(place)))
        .sandbox
        .id;
    let record = record(place, &id);
    let (vmm, share) = (process(&record, "vmm"), process(&record, "share"));
    assert!(vmm.lives() && share.lives());
    (id, vmm, share)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thaw_share_survives_thawd_and_ends_with_its_sandbox() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let (mut makers, makers_first) = (Vec::new(), thawd.record());
    makers.push(makers_first);
    let (id, vmm, share) = create(&place).await;
    assert_eq!(cgroup(share), cgroup(vmm), "the sandbox pays for it");

    // A snapshot cannot contain the guest's open files there.
    let freeze: FreezeSandbox = serde_json::from_value(json!({"directory": place.path("frozen")})).unwrap();
    let refused = client(&place).freeze(&id, &freeze).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Shared, "{refused}");
    assert!(!place.path("frozen").exists());

    thawd.kill();
    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    assert!(share.lives(), "{}", log(&place));
    assert_eq!(client(&place).get(&id).await.unwrap().state, "running");
    let refused = client(&place).freeze(&id, &freeze).await.unwrap_err();
    assert_eq!(
        refused.kind,
        ErrorKind::Shared,
        "also for who takes it over: {refused}"
    );
    assert!(thawd.stop().success());
    assert!(share.lives(), "a stop leaves it as well");

    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    client(&place).delete(&id).await.unwrap();
    eventually("thaw-share has ended", || !share.lives() && !vmm.lives());

    // When the VMM is killed, thaw-share ends by itself.
    let (id, vmm, share) = create(&place).await;
    assert!(vmm.kill());
    eventually("thaw-share has ended with its VMM", || !share.lives());
    client(&place).delete(&id).await.unwrap();
    assert!(thawd.stop().success());
    leave_nothing(&place, &makers);
    assert!(!log(&place).contains("thaw-share has ended"), "{}", log(&place));
}

/// Waits for the `nth` replacement of a thaw-share in this place, that of `ended`, until its VMM has it. The record names it earlier, and if
/// it is killed before its VMM has it, it never served.
fn next(place: &Place, id: &str, ended: ProcessRecord, nth: usize) -> ProcessRecord {
    eventually("another thaw-share serves", || {
        let log = fs::read_to_string(place.path("thawd.log")).unwrap();
        log.matches("another thaw-share serves").count() >= nth
    });
    let now = process(&record(place, id), "share");
    assert!(now != ended && now.lives() && !ended.lives(), "{}", log(place));
    now
}

/// Waits until no process, cgroup or mount of the place and its thawds is left.
fn leave_nothing(place: &Place, makers: &[ProcessRecord]) {
    eventually("nothing is left", || {
        let left = Counts::of(place, makers);
        left.processes.is_empty() && left.cgroups.is_empty() && left.mounts.is_empty()
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thaw_share_that_dies_is_restarted_by_any_thawd() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let mut makers = vec![thawd.record()];
    let (id, vmm, first) = create(&place).await;
    assert!(first.kill());
    let second = next(&place, &id, first, 1);
    assert_eq!(cgroup(second), cgroup(vmm), "the sandbox pays for it");
    assert!(vmm.lives());
    assert_eq!(client(&place).get(&id).await.unwrap().state, "running");

    // While no thawd runs.
    thawd.kill();
    assert!(second.lives() && second.kill());
    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    let third = next(&place, &id, second, 2);
    // The next thawd also watches the thaw-share that it has adopted.
    thawd.kill();
    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    assert!(third.lives());
    assert!(third.kill());
    let fourth = next(&place, &id, third, 3);
    assert!(vmm.lives());
    client(&place).delete(&id).await.unwrap();
    eventually("all has ended", || !fourth.lives() && !vmm.lives());
    assert!(thawd.stop().success());
    leave_nothing(&place, &makers);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thaw_share_that_keeps_dying_is_given_up_alone() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let (id, vmm, mut share) = create(&place).await;
    for nth in 1..=5 {
        assert!(share.kill());
        share = next(&place, &id, share, nth);
    }
    assert!(share.kill());
    eventually("it is told", || {
        log(&place).contains("thaw-share has ended for good")
    });
    assert!(vmm.lives());
    let told = async {
        loop {
            let described = client(&place).get(&id).await.unwrap();
            assert_eq!(described.state, "running");
            if let Some(why) = described.volumes_error {
                return why;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let why = tokio::time::timeout(Duration::from_secs(30), told).await;
    let why = why.expect("it is described so");
    assert!(why.contains("5 times in 10 minutes"), "{why}");
    client(&place).delete(&id).await.unwrap();
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_shared_makes_no_sandbox() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let mut missing = request(&place);
    missing.volumes[0].host = place.path("missing");
    let refused = client(&place).create(&missing).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::VolumeUnavailable, "{refused}");
    assert!(refused.what.contains("missing"), "{refused}");
    let mut socket = request(&place);
    socket.volumes[0].host = place.socket();
    let refused = client(&place).create(&socket).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::ShareFailed, "{refused}");
    let mut twice = request(&place);
    twice.volumes[1].guest = twice.volumes[0].guest.clone();
    client(&place).create(&twice).await.unwrap_err();
    assert!(client(&place).list().await.unwrap().is_empty());
    eventually("nothing is left", || {
        fs::read_dir(place.path("run/sandboxes")).map_or(true, |mut entries| entries.next().is_none())
    });
    assert!(thawd.stop().success());
}

/// The mounts in a process's namespace.
fn mounts(of: ProcessRecord) -> String {
    fs::read_to_string(format!("/proc/{}/mountinfo", of.pid)).unwrap()
}

/// The shares of a pod.
struct PodShares<'a> {
    place: &'a Place,
    id: String,
}

impl PodShares<'_> {
    async fn add(&self, name: &str, path: &Path) -> Result<(), String> {
        let request = AddShareRequest {
            sandbox_id: self.id.clone(),
            name: name.into(),
            source: MessageField::some(ShareSource {
                type_: "bind".into(),
                source: path.display().to_string(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let client = pods::connect(self.place).await;
        let added = client.add_share(Context::default(), &request).await;
        added.map(drop).map_err(|e| format!("{e}: {}", log(self.place)))
    }

    async fn remove(&self, name: &str) {
        let request = RemoveShareRequest {
            sandbox_id: self.id.clone(),
            name: name.into(),
            ..Default::default()
        };
        let client = pods::connect(self.place).await;
        client.remove_share(Context::default(), &request).await.unwrap();
    }

    /// The processes that the record names: its VMM and its thaw-share.
    fn processes(&self) -> (ProcessRecord, ProcessRecord) {
        let record = record(self.place, &self.id);
        (process(&record, "vmm"), process(&record, "share"))
    }
}

/// Whether a process has a mount for each of these shares, and none for the others.
fn has_shares(of: ProcessRecord, shares: &[&str]) -> bool {
    let mounts = mounts(of);
    let is_mounted = |name: &str| mounts.contains(&format!(" /{name} "));
    ["0", "1", "2", "3"]
        .iter()
        .all(|name| is_mounted(name) == shares.contains(name))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_of_a_running_pod_are_added_and_removed() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let id = pods::create(&place).await;
    let before = record(&place, &id);
    assert!(
        before["share"].is_null(),
        "a pod without shares has no thaw-share"
    );
    let shares = PodShares { place: &place, id };
    let missing = shares.add("0", &place.path("missing")).await.unwrap_err();
    assert!(missing.contains("missing"), "{missing}");
    for (name, path) in [("0", "shared"), ("1", "file")] {
        shares.add(name, &place.path(path)).await.unwrap();
    }
    let (vmm, serving) = shares.processes();
    assert_eq!(cgroup(serving), cgroup(vmm), "the pod pays for it");
    assert!(has_shares(serving, &["0", "1"]), "{}", mounts(serving));
    let freeze: FreezeSandbox = serde_json::from_value(json!({"directory": place.path("frozen")})).unwrap();
    let refused = client(&place).freeze(&shares.id, &freeze).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Shared, "{refused}");
    shares.remove("0").await;
    assert!(has_shares(serving, &["1"]), "{}", mounts(serving));
    pods::end(&place, &shares.id).await;
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_of_a_pod_outlive_thawd_and_thaw_share() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let mut makers = vec![thawd.record()];
    let id = pods::create(&place).await;
    let shares = PodShares { place: &place, id };
    for (name, path) in [("0", "shared"), ("1", "file")] {
        shares.add(name, &place.path(path)).await.unwrap();
    }
    let (vmm, serving) = shares.processes();
    thawd.kill();
    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    shares.remove("0").await;
    shares.add("2", &place.path("shared")).await.unwrap();
    assert_eq!(shares.processes().1, serving, "the same one");
    assert!(has_shares(serving, &["1", "2"]), "{}", mounts(serving));
    let marks = [place.root().to_owned(), place.path("run").canonicalize().unwrap()];
    let marks = marks.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
    let host = fs::read_to_string("/proc/self/mountinfo").unwrap();
    // Other programs mount too.
    let ours = host
        .lines()
        .find(|line| marks.iter().any(|mark| line.contains(mark)));
    assert_eq!(ours, None, "no share is mounted here");

    // A thaw-share that dies is restarted, with all shares.
    let before = mounts(serving).lines().count();
    assert!(serving.kill());
    let serving = next(&place, &shares.id, serving, 1);
    assert_eq!(mounts(serving).lines().count(), before);
    shares.add("3", &place.path("shared")).await.unwrap();
    shares.remove("2").await;
    assert!(has_shares(serving, &["1", "3"]), "{}", mounts(serving));

    pods::end(&place, &shares.id).await;
    eventually("thaw-share has ended", || !serving.lives() && !vmm.lives());
    shares.remove("1").await;
    assert!(thawd.stop().success());
    leave_nothing(&place, &makers);
    assert!(!log(&place).contains("for good"), "{}", log(&place));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_thaw_share_died_without_a_thawd_is_ended() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let id = pods::create(&place).await;
    let shares = PodShares { place: &place, id };
    shares.add("0", &place.path("shared")).await.unwrap();
    let (vmm, serving) = shares.processes();
    thawd.kill();
    assert!(serving.kill());
    let thawd = Thawd::start(&place);
    eventually("the pod has ended", || !vmm.lives());
    assert!(
        log(&place).contains("its thaw-share has ended"),
        "{}",
        log(&place)
    );
    assert!(thawd.stop().success());
}
