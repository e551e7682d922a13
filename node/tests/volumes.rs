//! A sandbox's thaw-share lives as long as its sandbox, whoever owns that, and not longer.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use thaw_daemon::api::client::Client;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, FreezeSandbox};
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::*;
use thaw_protocol::shim::pods_ttrpc::PodsClient;
use thaw_sandbox::error::ErrorKind;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd};
use ttrpc::context::Context;

/// None, having said why, where it cannot run.
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

fn record(place: &Place, id: &str) -> Value {
    let path = place.path("run/sandboxes").join(id).join("record.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn process(record: &Value, name: &str) -> ProcessRecord {
    serde_json::from_value(record[name].clone()).unwrap()
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
async fn it_lives_through_the_deaths_of_thawd_and_ends_with_its_sandbox() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let (mut makers, makers_first) = (Vec::new(), thawd.record());
    makers.push(makers_first);
    let (id, vmm, share) = create(&place).await;
    assert_eq!(cgroup(share), cgroup(vmm), "the sandbox pays for it");

    // What the guest has open there, no snapshot can hold.
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

    // The VMM killed, it ends by itself.
    let (id, vmm, share) = create(&place).await;
    assert!(vmm.kill());
    eventually("thaw-share has ended with its VMM", || !share.lives());
    client(&place).delete(&id).await.unwrap();
    assert!(thawd.stop().success());
    let left = Counts::of(&place, &makers);
    assert!(left.processes.is_empty() && left.cgroups.is_empty(), "{left:?}");
    assert!(left.mounts.is_empty(), "{left:?}");
    assert!(!log(&place).contains("thaw-share has ended"), "{}", log(&place));
}

/// The thaw-share that took the place of this one, which has ended.
fn next(place: &Place, id: &str, ended: ProcessRecord) -> ProcessRecord {
    let now = || process(&record(place, id), "share");
    eventually("another thaw-share serves", || now() != ended && now().lives());
    assert!(!ended.lives());
    now()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thaw_share_that_dies_is_started_again_by_whichever_thawd_there_is() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let mut makers = vec![thawd.record()];
    let (id, vmm, first) = create(&place).await;
    assert!(first.kill());
    let second = next(&place, &id, first);
    eventually("it is told", || log(&place).contains("another thaw-share serves"));
    assert_eq!(cgroup(second), cgroup(vmm), "the sandbox pays for it");
    assert!(vmm.lives());
    assert_eq!(client(&place).get(&id).await.unwrap().state, "running");

    // While no thawd runs.
    thawd.kill();
    assert!(second.lives() && second.kill());
    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    let third = next(&place, &id, second);
    // It is in the record before it has its relay, and ends with a thawd that dies between the two.
    eventually("its VMM has it", || {
        log(&place).matches("another thaw-share serves").count() == 2
    });
    // The next thawd watches the one it has taken over, too.
    thawd.kill();
    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    assert!(third.lives());
    assert!(third.kill());
    let fourth = next(&place, &id, third);
    assert!(vmm.lives());
    client(&place).delete(&id).await.unwrap();
    eventually("all has ended", || !fourth.lives() && !vmm.lives());
    assert!(thawd.stop().success());
    let left = Counts::of(&place, &makers);
    assert!(
        left.processes.is_empty() && left.cgroups.is_empty() && left.mounts.is_empty(),
        "{left:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thaw_share_that_dies_again_and_again_is_given_up_and_ends_nothing_else() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let (id, vmm, mut share) = create(&place).await;
    for _ in 0..5 {
        assert!(share.kill());
        share = next(&place, &id, share);
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

/// What is mounted in a process's namespace.
fn mounts(of: ProcessRecord) -> String {
    fs::read_to_string(format!("/proc/{}/mountinfo", of.pid)).unwrap()
}

async fn pods(place: &Place) -> PodsClient {
    let address = format!("unix://{}", place.path("run/pods.sock").display());
    PodsClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}

fn share(id: &str, name: &str, path: &Path) -> AddShareRequest {
    AddShareRequest {
        sandbox_id: id.into(),
        name: name.into(),
        source: MessageField::some(ShareSource {
            type_: "bind".into(),
            source: path.display().to_string(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_pod_is_given_directories_and_has_them_taken_away_by_whichever_thawd_there_is() {
    let Some(place) = place() else { return };
    let host = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let thawd = Thawd::start(&place);
    let mut makers = vec![thawd.record()];
    let with = Context::default;
    let pod = CreatePodRequest {
        client_pid: std::process::id() as i32,
        cpus: 1,
        memory_mib: place.request()["memory_mib"].as_u64().unwrap() as u32,
        ..Default::default()
    };
    let made = pods(&place).await.create(with(), &pod).await;
    let id = made.unwrap_or_else(|e| panic!("{e}: {}", log(&place))).sandbox_id;
    assert!(
        record(&place, &id)["share"].is_null(),
        "one without shares has no thaw-share"
    );

    let refused = pods(&place)
        .await
        .add_share(with(), &share(&id, "0", &place.path("missing")))
        .await;
    assert!(refused.unwrap_err().to_string().contains("missing"));
    for (name, path) in [("0", "shared"), ("1", "file")] {
        let added = pods(&place)
            .await
            .add_share(with(), &share(&id, name, &place.path(path)))
            .await;
        added.unwrap_or_else(|e| panic!("{e}: {}", log(&place)));
    }
    let written = record(&place, &id);
    let (vmm, serving) = (process(&written, "vmm"), process(&written, "share"));
    assert_eq!(cgroup(serving), cgroup(vmm), "the pod pays for it");
    let both = mounts(serving);
    assert!(both.contains(" /0 ") && both.contains(" /1 "), "{both}");
    let freeze: FreezeSandbox = serde_json::from_value(json!({"directory": place.path("frozen")})).unwrap();
    let refused = client(&place).freeze(&id, &freeze).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Shared, "{refused}");

    thawd.kill();
    let thawd = Thawd::start(&place);
    makers.push(thawd.record());
    let gone = |name: &str| RemoveShareRequest {
        sandbox_id: id.clone(),
        name: name.into(),
        ..Default::default()
    };
    let client_of_pods = pods(&place).await;
    client_of_pods.remove_share(with(), &gone("0")).await.unwrap();
    client_of_pods
        .add_share(with(), &share(&id, "2", &place.path("shared")))
        .await
        .unwrap();
    assert_eq!(process(&record(&place, &id), "share"), serving, "the same one");
    let now = mounts(serving);
    assert!(
        !now.contains(" /0 ") && now.contains(" /1 ") && now.contains(" /2 "),
        "{now}"
    );
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), host);

    // One that dies is started again, with all that was placed in it.
    assert!(serving.kill());
    let serving = next(&place, &id, serving);
    assert_eq!(mounts(serving).lines().count(), now.lines().count());
    client_of_pods
        .add_share(with(), &share(&id, "3", &place.path("shared")))
        .await
        .unwrap();
    client_of_pods.remove_share(with(), &gone("2")).await.unwrap();
    let now = mounts(serving);
    assert!(
        now.contains(" /1 ") && now.contains(" /3 ") && !now.contains(" /2 "),
        "{now}"
    );

    let end = PodRequest {
        sandbox_id: id.clone(),
        ..Default::default()
    };
    client_of_pods.end(with(), &end).await.unwrap();
    eventually("thaw-share has ended", || !serving.lives() && !vmm.lives());
    client_of_pods.remove_share(with(), &gone("1")).await.unwrap();
    assert!(thawd.stop().success());
    let left = Counts::of(&place, &makers);
    assert!(
        left.processes.is_empty() && left.cgroups.is_empty() && left.mounts.is_empty(),
        "{left:?}"
    );
    assert!(!log(&place).contains("for good"), "{}", log(&place));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_thaw_share_died_without_a_thawd_is_ended() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let pod = CreatePodRequest {
        client_pid: std::process::id() as i32,
        cpus: 1,
        memory_mib: place.request()["memory_mib"].as_u64().unwrap() as u32,
        ..Default::default()
    };
    let made = pods(&place).await.create(Context::default(), &pod).await;
    let id = made.unwrap_or_else(|e| panic!("{e}: {}", log(&place))).sandbox_id;
    let added = share(&id, "0", &place.path("shared"));
    pods(&place)
        .await
        .add_share(Context::default(), &added)
        .await
        .unwrap();
    let written = record(&place, &id);
    let (vmm, serving) = (process(&written, "vmm"), process(&written, "share"));
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
