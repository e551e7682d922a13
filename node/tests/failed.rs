//! Sandboxes that end without a request are listed as failed with the reason, by thawd and by `thaw`, until they are removed or their
//! retention is over, even if no thawd ran when they ended. Sandboxes whose end was requested are not listed.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use thaw_daemon::api::client::Client;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, ProcessIdentity, Sandbox, SandboxFailure};
use thaw_protocol::control::CONTROL_VERSION;
use thaw_sandbox::control_client::{ControlClient, Vmm};
use thaw_tiny_guest::Guest;
use thaw_tiny_guest::bare::{PANIC, brief, crashed, hungry, lasting, panicked, spinning};
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd, asked};

fn place(guest: &Guest) -> Option<Place> {
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let place = Place::new(binaries, guest)?;
    place.fill_pools_to(0..=0, 0..=0);
    Some(place)
}

fn client(place: &Place) -> Client {
    Client::connect(&place.socket()).unwrap()
}

fn named(place: &Place, name: &str) -> CreateSandbox {
    let request: CreateSandbox = serde_json::from_value(place.request()).unwrap();
    CreateSandbox {
        name: Some(name.into()),
        ..request
    }
}

async fn made(place: &Place, name: &str) -> Sandbox {
    let made = client(place).create(&named(place, name)).await;
    made.unwrap_or_else(|e| panic!("{e}: {}", log(place))).sandbox
}

fn kill_vmm(sandbox: &Sandbox) {
    let vmm = ProcessRecord::of(sandbox.vmm_pid.unwrap()).unwrap();
    assert!(vmm.kill());
}

/// Waits until a sandbox is listed as failed, and returns the failure.
async fn failure(place: &Place, id: &str) -> SandboxFailure {
    let client = client(place);
    for _ in 0..6000 {
        let shown = client
            .get(id)
            .await
            .unwrap_or_else(|e| panic!("{e}: {}", log(place)));
        if shown.state == "failed" {
            return shown.failure.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{id} is not listed as failed: {}", log(place));
}

fn thaw(place: &Place, arguments: &[&str]) -> Output {
    let output = place.command("thaw").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    output
}

fn printed(place: &Place, arguments: &[&str]) -> String {
    String::from_utf8(thaw(place, arguments).stdout).unwrap()
}

/// The sandboxes that `thaw ps -a` lists, by id.
fn listed(place: &Place) -> BTreeMap<String, Value> {
    let all: Vec<Value> = serde_json::from_str(&printed(place, &["--json", "ps", "-a"])).unwrap();
    all.into_iter()
        .map(|one| (one["id"].as_str().unwrap().to_owned(), one))
        .collect()
}

/// Waits until nothing is left of any sandbox, not even the record of a failed one.
fn is_clean(place: &Place, thawd: &Thawd) {
    let counts = || Counts::of(place, &[thawd.record()]);
    eventually("no VMM is left", || counts().vmms() == 0);
    eventually("no machine is left", || counts().machines == 0);
    eventually("no directory is left", || {
        !place.path("run/sandboxes").exists() && !place.path("run/failed").exists()
    });
    eventually("no cgroup is left", || counts().cgroups.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_vmm_is_listed_watched_and_removed() {
    let Some(place) = place(&lasting()) else { return };
    let thawd = Thawd::start(&place);
    let watch = asked::ask(&place, "GET /v1/sandboxes?watch=1", None, &Value::Null).unwrap();
    let changes = BufReader::new(watch).lines().map_while(Result::ok);
    let mut changes = changes.filter_map(|line| serde_json::from_str::<Value>(&line).ok());
    let mut changes = changes.by_ref().filter(|change| change["type"].is_string());
    let mut next = |wanted: &dyn Fn(&Value) -> bool| changes.find(|change| wanted(change)).unwrap();

    let mut request = named(&place, "web");
    request.publish = serde_json::from_value(serde_json::json!([{"host": 0, "guest": 80}])).unwrap();
    let first = client(&place).create(&request).await.unwrap().sandbox;
    let shown = printed(&place, &["ps"]);
    let port = first.network.as_ref().map(|n| n.published[0].host);
    if let Some(port) = port {
        assert!(shown.contains(&format!("0.0.0.0:{port}->80/tcp")), "{shown}");
    }
    assert_eq!(printed(&place, &["ps", "-q"]), format!("{}\n", first.id));
    kill_vmm(&first);
    let told = next(&|change| change["object"]["state"] == "failed");
    assert_eq!(
        (&told["type"], &told["object"]["id"]),
        (&"MODIFIED".into(), &first.id.clone().into())
    );
    let failed = &told["object"]["failure"];
    assert_eq!(
        (&failed["reason"], &failed["signal"]),
        (&"signal".into(), &9.into())
    );
    let said = failed["console"][0].as_str().unwrap();
    assert_eq!(said.len(), 32, "a bare guest says who it is: {failed}");

    // Its resources and its name were released before the failure was listed.
    let counts = Counts::of(&place, &[thawd.record()]);
    assert_eq!((counts.vmms(), counts.machines), (0, 0), "{counts:?}");
    assert!(!place.path("run/sandboxes").join(&first.id).exists());
    let second = made(&place, "web").await;
    let shown = client(&place).get("web").await.unwrap();
    assert_eq!(shown.id, second.id);
    assert_eq!(printed(&place, &["ps", "-q"]), format!("{}\n", second.id));
    assert_eq!(printed(&place, &["ps", "-a", "-q"]).lines().count(), 2);
    let table = printed(&place, &["ps", "-a"]);
    assert!(
        table.contains("failed") && table.contains("ago: signal"),
        "{table}"
    );
    assert_eq!(listed(&place)[&first.id]["failure"]["reason"], "signal");
    let filter = "GET /v1/sandboxes?fieldSelector=state%3Dfailed";
    let (_, body) = asked::answer(asked::ask(&place, filter, None, &Value::Null).unwrap()).unwrap();
    assert!(body.contains(&first.id) && !body.contains(&second.id), "{body}");
    let (_, metrics) =
        asked::answer(asked::ask(&place, "GET /metrics", None, &Value::Null).unwrap()).unwrap();
    assert!(
        metrics.contains("thaw_sandbox_failures_total{reason=\"signal\"} 1")
            && metrics.contains("thaw_sandboxes{state=\"failed\"} 1"),
        "{metrics}"
    );
    let logged = log(&place);
    let line = logged.lines().find(|line| line.contains("the sandbox failed"));
    assert!(
        line.is_some_and(|line| line.contains("ERROR") && line.contains("SIGKILL")),
        "{logged}"
    );

    // A prefix of its id is enough.
    thaw(&place, &["rm", &first.id[..11]]);
    let told = next(&|change| change["type"] == "DELETED");
    assert_eq!(told["object"]["id"], first.id.clone());
    // A requested end is no failure.
    thaw(&place, &["rm", "web"]);
    assert!(listed(&place).is_empty());
    is_clean(&place, &thawd);
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guests_own_end_is_told_with_its_last_words() {
    for (guest, reason, word) in [
        (brief(), "guest-power-off", ""),
        (crashed(), "cpu-fault", ""),
        (panicked(), "guest-panic", PANIC),
    ] {
        let Some(place) = place(&guest) else { return };
        let thawd = Thawd::start(&place);
        let sandbox = made(&place, "a").await;
        let failure = failure(&place, &sandbox.id).await;
        assert_eq!(failure.reason, reason, "{failure:?}");
        assert_eq!((failure.signal, failure.exit_status), (None, None));
        let last = failure.console.last().unwrap();
        assert!(last.contains(word), "{failure:?}");
        assert_eq!(failure.message.contains("told to"), reason == "guest-panic");
        thaw(&place, &["rm", "a"]);
        is_clean(&place, &thawd);
        assert!(thawd.stop().success());
    }
}

/// This kernel's version.
fn linux() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_without_thawd_is_listed_by_the_next() {
    let Some(place) = place(&lasting()) else { return };
    let thawd = Thawd::start(&place);
    let (dies, lives, asked) = (
        made(&place, "dies").await,
        made(&place, "lives").await,
        made(&place, "asked").await,
    );
    thawd.kill();
    kill_vmm(&dies);
    let directory = place.path("run/sandboxes");
    let log_file = directory.join(&asked.id).join("vmm.log");
    let forbidden = "thaw-vmm: forbidden system call ptrace (101) of a device thread\n";
    std::fs::write(log_file, forbidden).unwrap();
    kill_vmm(&asked);
    // Without a thawd, `thaw` finds it.
    let before = listed(&place);
    assert_eq!(before[&dies.id]["failure"]["reason"], "unknown");
    assert_eq!(before[&asked.id]["failure"]["reason"], "forbidden-call");
    assert_eq!(before[&lives.id]["state"], "running");
    assert!(!directory.join(&dies.id).exists());

    let second = Thawd::start(&place);
    assert_eq!(failure(&place, &dies.id).await.reason, "unknown");
    let message = failure(&place, "asked").await.message;
    assert!(message.contains("ptrace"), "{message}");
    // An adopted sandbox fails like any other, though thawd is not its VMM's parent.
    kill_vmm(&lives);
    let adopted = failure(&place, &lives.id).await;
    let told = adopted.reason == "signal" && adopted.signal == Some(9);
    // Before Linux 6.15, another process may have reaped it, and its status is lost.
    let may_be_lost = linux() < (6, 15) && adopted.reason == "unknown";
    assert!(told || may_be_lost, "{adopted:?}");
    // A restart changes none of its records.
    assert!(second.stop().success());
    let third = Thawd::start(&place);
    assert_eq!(failure(&place, &lives.id).await, adopted);
    for id in [&dies.id, &lives.id, &asked.id] {
        thaw(&place, &["rm", id]);
    }
    is_clean(&place, &third);
    assert!(third.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_ends_without_thawd_is_asked_why() {
    let Some(place) = place(&crashed()) else { return };
    let thawd = Thawd::start(&place);
    let sandbox = made(&place, "a").await;
    thawd.kill();
    let control = place.path("run/sandboxes").join(&sandbox.id).join("control.sock");
    let pid = Vmm(sandbox.vmm_pid.unwrap());
    let vmm = ControlClient::adopt(&control, pid, CONTROL_VERSION)
        .await
        .unwrap();
    vmm.life().wait_for(|life| life.exited.is_some()).await.unwrap();
    drop(vmm);
    let next = Thawd::start(&place);
    assert_eq!(failure(&place, &sandbox.id).await.reason, "cpu-fault");
    thaw(&place, &["rm", "a"]);
    is_clean(&place, &next);
    assert!(next.stop().success());
}

/// The runbook's "Hung guest". This guest computes with interrupts off and has no agent, so nothing in it answers. The second one's VMM does
/// not answer either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_guest_is_removed_in_time_even_if_its_vmm_hangs() {
    const LIMIT: Duration = Duration::from_secs(20);
    let Some(place) = place(&spinning()) else { return };
    let thawd = Thawd::start(&place);
    for vmm_hangs in [false, true] {
        let sandbox = made(&place, "hung").await;
        assert_eq!(printed(&place, &["ps", "-q"]), format!("{}\n", sandbox.id));
        if vmm_hangs {
            let vmm = Pid::from_raw(sandbox.vmm_pid.unwrap()).unwrap();
            kill_process(vmm, Signal::STOP).unwrap();
        }
        let began = Instant::now();
        thaw(&place, &["rm", "hung"]);
        is_clean(&place, &thawd);
        assert!(began.elapsed() < LIMIT, "removed after {:?}", began.elapsed());
    }
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_expire_and_do_not_grow_in_number() {
    let Some(place) = place(&lasting()) else { return };
    let pools = std::fs::read_to_string(place.path("thawd.toml")).unwrap();
    place.configure(&format!(
        "{pools}\n[sandbox]\nfailed_retention_s = 3\nfailed_most = 2\n"
    ));
    let thawd = Thawd::start(&place);
    let mut ids = Vec::new();
    for name in ["a", "b", "c"] {
        let sandbox = made(&place, name).await;
        kill_vmm(&sandbox);
        failure(&place, &sandbox.id).await;
        ids.push(sandbox.id);
    }
    let count = || std::fs::read_dir(place.path("run/failed")).map_or(0, |files| files.count());
    eventually("two are kept at most", || count() <= 2);
    let gone = client(&place).get(&ids[0]).await.unwrap_err();
    assert_eq!(gone.kind, thaw_sandbox::error::ErrorKind::SandboxNotFound);
    eventually("their time is over", || count() == 0);
    eventually("none is listed", || listed(&place).is_empty());
    is_clean(&place, &thawd);
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_of_the_client_is_no_failure_of_the_sandbox() {
    let Some(place) = place(&lasting()) else { return };
    let thawd = Thawd::start(&place);
    let mut clients: Vec<_> = (0..2)
        .map(|_| Command::new("sleep").arg("100").spawn().unwrap())
        .collect();
    let mut owned = Vec::new();
    for (n, process) in clients.iter().enumerate() {
        let record = ProcessRecord::of(process.id() as i32).unwrap();
        let mut request = named(&place, &format!("s{n}"));
        request.client = Some(ProcessIdentity {
            pid: record.pid,
            start_time: record.start_time,
        });
        owned.push(client(&place).create(&request).await.unwrap().sandbox);
    }
    // One sandbox dies before its client.
    kill_vmm(&owned[1]);
    for process in &mut clients {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    assert_eq!(failure(&place, &owned[1].id).await.reason, "signal");
    eventually("the other has ended", || {
        !place.path("run/sandboxes").join(&owned[0].id).exists()
    });
    let left: Vec<_> = listed(&place).into_keys().collect();
    assert_eq!(left, [owned[1].id.clone()]);
    thaw(&place, &["rm", "s1"]);
    is_clean(&place, &thawd);
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vmm_the_kernel_killed_for_memory_is_told_so() {
    let Some(place) = place(&hungry(96)) else { return };
    let thawd = Thawd::start(&place);
    let sandbox = made(&place, "a").await;
    let text = std::fs::read(place.path("run/sandboxes").join(&sandbox.id).join("record.json")).unwrap();
    let record: Value = serde_json::from_slice(&text).unwrap();
    let name = record["cgroup"].as_str().unwrap_or_default();
    let cgroup = thaw_pools::cgroup::Hierarchy::detect().adopt(name);
    let limited = cgroup.directories().iter().any(|directory| {
        ["memory.max", "memory.limit_in_bytes"]
            .map(|file| std::fs::write(directory.join(file), (32u64 << 20).to_string()))
            .iter()
            .any(Result::is_ok)
    });
    if !limited {
        return thaw_test_skip::skip("memory of cgroups cannot be limited here");
    }
    let failure = failure(&place, &sandbox.id).await;
    assert_eq!(failure.reason, "out-of-memory", "{failure:?}");
    thaw(&place, &["rm", "a"]);
    is_clean(&place, &thawd);
    assert!(thawd.stop().success());
}
