//! thawd as a service: its notifications to systemd, its sandboxes across a stop and a start, and what it reports about them, itself and
//! its configuration.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use thaw_daemon::api::client::Client;
use thaw_daemon::api::server::SHUTDOWN_TIMEOUT;
use thaw_protocol::api::CreateSandbox;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd};

fn place() -> Option<Place> {
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    Place::new(binaries, &lasting())
}

fn client(place: &Place) -> Client {
    Client::connect(&place.socket()).unwrap()
}

fn request(place: &Place, name: &str) -> CreateSandbox {
    let mut request = place.request();
    request["name"] = name.into();
    serde_json::from_value(request).unwrap()
}

/// The head and the body of the answer to a request.
fn ask(place: &Place, method: &str, path: &str, body: &str) -> (String, String) {
    let mut stream = UnixStream::connect(place.socket()).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: thawd\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_lowercase(), body.to_owned())
}

fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(said).unwrap())
}

fn receive(told: &UnixDatagram) -> String {
    let mut buffer = [0; 4096];
    let length = told.recv(&mut buffer).unwrap();
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

/// Waits for a message to the service manager with this line, and returns the message.
fn wait_for(told: &UnixDatagram, line: &str) -> String {
    loop {
        let text = receive(told);
        if text.lines().any(|l| l == line) {
            return text;
        }
    }
}

#[test]
fn systemd_is_notified_of_readiness_watchdog_and_stop() {
    let Some(place) = place() else { return };
    let notify = place.path("notify");
    let told = UnixDatagram::bind(&notify).unwrap();
    let mut command = place.thawd();
    command
        .env("NOTIFY_SOCKET", &notify)
        .env("WATCHDOG_USEC", "20000");
    let thawd = Thawd::begin(&place, command);
    let ready = wait_for(&told, "READY=1");
    assert!(ready.contains("STATUS=0 sandboxes"), "{ready}");
    client(&place);
    wait_for(&told, "WATCHDOG=1");
    wait_for(&told, "WATCHDOG=1");
    let pid = Pid::from_raw(thawd.record().pid).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    wait_for(&told, "STOPPING=1");
    // Nobody reads any more: thawd would wait for a full queue, but not for a closed socket.
    drop(told);
    assert!(thawd.stop().success());
}

/// The line of the test's own message to the service manager.
const MARK: &str = "MARK=1";

/// How many messages of each kind the service manager got.
#[derive(Default)]
struct Told {
    alive: AtomicUsize,
    marks: AtomicUsize,
}

/// Counts the watchdog notifications. A thread reads all messages, so that the queue never fills.
fn told_alive(told: UnixDatagram) -> Arc<Told> {
    let count = Arc::new(Told::default());
    let counted = count.clone();
    std::thread::spawn(move || {
        loop {
            let text = receive(&told);
            let has = |line: &str| usize::from(text.lines().any(|l| l == line));
            counted.alive.fetch_add(has("WATCHDOG=1"), Ordering::SeqCst);
            counted.marks.fetch_add(has(MARK), Ordering::SeqCst);
        }
    });
    count
}

/// The test stands in for systemd: it waits for longer than a period of the watchdog, then ends thawd as systemd does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_thawd_is_silent_and_the_next_one_has_its_sandboxes() {
    const PERIOD: Duration = Duration::from_millis(200);
    let Some(place) = place() else { return };
    let notify = place.path("notify");
    let told = told_alive(UnixDatagram::bind(&notify).unwrap());
    let mut command = place.thawd();
    command
        .env("NOTIFY_SOCKET", &notify)
        .env("WATCHDOG_USEC", PERIOD.as_micros().to_string());
    let mut hung = Thawd::begin(&place, command);
    assert!(hung.serves(&place), "{}", log(&place));
    let made = client(&place).create(&request(&place, "web")).await.unwrap();
    let vmm = thaw_pools::process::ProcessRecord::of(made.sandbox.vmm_pid.unwrap()).unwrap();
    let alive = || told.alive.load(Ordering::SeqCst);
    let before = alive();
    eventually("it says that it is alive", || alive() > before + 1);

    let pid = Pid::from_raw(hung.record().pid).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    eventually("it has stopped", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap();
        stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
    });
    // Whatever it sent before is received before this.
    let sender = UnixDatagram::unbound().unwrap();
    sender.send_to(MARK.as_bytes(), &notify).unwrap();
    eventually("what it sent is received", || {
        told.marks.load(Ordering::SeqCst) > 0
    });
    let before = alive();
    std::thread::sleep(PERIOD * 3);
    assert_eq!(alive(), before);

    kill_process(pid, Signal::ABORT).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    eventually("it has ended", || hung.has_ended());
    assert!(vmm.lives());
    let next = Thawd::start(&place);
    assert_eq!(client(&place).get("web").await.unwrap().state, "running");
    client(&place).delete("web").await.unwrap();
    assert!(next.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_run_on_across_drain_stop_and_start_of_thawd() {
    let Some(place) = place() else { return };
    let first = Thawd::start(&place);
    let made = client(&place)
        .create(&request(&place, "web"))
        .await
        .unwrap_or_else(|e| panic!("{e}: {}", log(&place)));
    let sandbox = made.sandbox;
    let vmm = thaw_pools::process::ProcessRecord::of(sandbox.vmm_pid.unwrap()).unwrap();

    // While drained, it creates no sandboxes, keeps its existing ones, and reports that.
    let (code, said) = run(place.thawd().arg("drain"));
    assert_eq!((code, said.trim()), (Some(0), "it makes no more; 1 run on"));
    let body = serde_json::to_string(&request(&place, "late")).unwrap();
    let (head, problem) = ask(&place, "POST", "/v1/sandboxes", &body);
    assert!(
        head.starts_with("http/1.1 503") && head.contains("retry-after: 30"),
        "{head}"
    );
    assert!(problem.contains(r#""code":"draining""#), "{problem}");
    assert!(client(&place).health().await.unwrap().draining);
    client(&place).pause("web").await.unwrap();
    client(&place).resume("web").await.unwrap();
    let (code, said) = run(place.thawd().args(["drain", "--undo"]));
    assert_eq!(
        (code, said.trim()),
        (Some(0), "it makes sandboxes again; 1 run on")
    );
    let other = client(&place).create(&request(&place, "late")).await.unwrap();
    client(&place).delete(&other.sandbox.id).await.unwrap();

    // Each stop stands for an upgrade: the next thawd has all earlier sandboxes.
    let mut thawd = first;
    for _ in 0..2 {
        assert!(thawd.stop().success(), "{}", log(&place));
        assert!(vmm.lives(), "a stopped thawd leaves it running");
        thawd = Thawd::start(&place);
        let adopted = client(&place).get("web").await.unwrap();
        assert_eq!(
            (adopted.id.as_str(), adopted.state.as_str()),
            (sandbox.id.as_str(), "running")
        );
        assert_eq!(
            (adopted.labels, adopted.vmm_pid),
            (sandbox.labels.clone(), sandbox.vmm_pid)
        );
        assert!(adopted.resource_version > sandbox.resource_version);
        client(&place).pause("web").await.unwrap();
        client(&place).resume("web").await.unwrap();
    }
    assert!(vmm.lives());
    client(&place).delete("web").await.unwrap();
    eventually("its VMM has ended", || !vmm.lives());
    assert!(client(&place).list().await.unwrap().is_empty());
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_is_timed_in_its_answer_and_counted_with_its_usage() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let body = serde_json::to_string(&request(&place, "web")).unwrap();
    let (head, created) = ask(&place, "POST", "/v1/sandboxes", &body);
    assert!(
        head.starts_with("http/1.1 201"),
        "{head} {created}: {}",
        log(&place)
    );
    let timing = head
        .lines()
        .find_map(|l| l.strip_prefix("server-timing: "))
        .unwrap();
    for stage in [
        "disk;dur=",
        "network;dur=",
        "thaw;dur=",
        "handshake;dur=",
        "total;dur=",
    ] {
        assert!(timing.contains(stage), "{timing}");
    }
    let (_, metrics) = ask(&place, "GET", "/metrics", "");
    for line in [
        "thaw_sandboxes{state=\"running\"} 1",
        "thaw_start_seconds_count{how=\"create\"} 1",
        "thaw_start_stage_seconds_count{how=\"create\",stage=\"thaw\"} 1",
        "thaw_pool_claims_total{pool=\"disk\"} 1",
        "thaw_api_requests_total{method=\"POST\",route=\"/v1/sandboxes\",status=\"201\"} 1",
    ] {
        assert!(metrics.contains(&format!("{line}\n")), "no {line}");
    }
    // This guest prints without end, so it uses CPU time.
    let (head, usage) = ask(&place, "GET", "/v1/sandboxes/web/metrics", "");
    assert!(head.starts_with("http/1.1 200"), "{head}");
    let usage: thaw_protocol::api::Usage = serde_json::from_str(&usage).unwrap();
    assert!(usage.memory_bytes.unwrap() > 0 && usage.at_ns > 0);
    let mut top = Command::new(Path::new(env!("CARGO_BIN_EXE_thaw")));
    top.args(["--json", "top", "--once", "--interval", "0.5"])
        .env("THAW_RUN", place.path("run"))
        .env("THAW_DATA", place.path("data"));
    let (code, said) = run(&mut top);
    assert_eq!(code, Some(0), "{said}");
    let shown: serde_json::Value = serde_json::from_str(&said).unwrap();
    let rows = shown["sandboxes"].as_array().unwrap();
    assert_eq!((rows.len(), rows[0]["name"].as_str()), (1, Some("web")));
    assert!(rows[0]["cpu_percent"].as_f64().unwrap() >= 0.0);
    assert!(shown["pools"].as_array().unwrap().len() >= 3);
    client(&place).delete("web").await.unwrap();
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_is_asked_about_its_start_at_once_or_later() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let client = client(&place);
    let asked = CreateSandbox {
        timings: true,
        ..request(&place, "timed")
    };
    let account = client.create(&asked).await.unwrap().account;
    let has_entry = account.stages.iter().any(|stage| stage.name == "entry");
    assert!(has_entry && account.counts.contains_key("faults"), "{account:?}");
    // Its answer has them only if its start was slow.
    client.create(&request(&place, "plain")).await.unwrap();
    let both = "thaw_start_stage_seconds_count{how=\"create\",stage=\"entry\"} 2\n";
    eventually("both are counted", || {
        ask(&place, "GET", "/metrics", "").1.contains(both)
    });
    for name in ["timed", "plain"] {
        client.delete(name).await.unwrap();
    }
    assert!(thawd.stop().success());
}

#[test]
fn whom_it_serves_over_tcp_is_read_again_when_it_is_told_to() {
    let Some(place) = place() else { return };
    let tokens = place.path("tokens");
    let write = |text: &str| {
        std::fs::write(&tokens, text).unwrap();
        std::fs::set_permissions(&tokens, PermissionsExt::from_mode(0o600)).unwrap();
    };
    let [old, new] = ["o", "n"].map(|c| c.repeat(32));
    write(&format!("one {old}\n"));
    place.configure(&format!("[api]\nlisten = \"127.0.0.1:0\"\ntokens = {tokens:?}\n"));
    let thawd = Thawd::start(&place);
    let said = log(&place);
    let (_, port) = said.split_once("127.0.0.1:").unwrap();
    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
    let ask = |token: &str| {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        let head = "GET /v1/health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer";
        stream
            .write_all(format!("{head} {token}\r\n\r\n").as_bytes())
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer[9..12].to_owned()
    };
    let again = || {
        let pid = Pid::from_raw(thawd.record().pid).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
    };
    assert_eq!((ask(&old), ask(&new)), ("200".into(), "401".into()));
    write(&format!("one {new}\n"));
    again();
    eventually("the new token is taken", || ask(&new) == "200");
    assert_eq!(ask(&old), "401");
    write("one\n");
    again();
    eventually("it says what is wrong", || {
        log(&place).contains("tokens and certificates stay what they were")
    });
    assert_eq!(ask(&new), "200");
    assert!(thawd.stop().success());
}

#[test]
fn a_configuration_is_checked_before_it_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let thawd = || Command::new(env!("CARGO_BIN_EXE_thawd"));
    let (code, default) = run(thawd().args(["config", "default"]));
    assert_eq!(code, Some(0));
    let file = directory.path().join("thawd.toml");
    std::fs::write(&file, &default).unwrap();
    let (code, said) = run(thawd().args(["config", "check"]).arg(&file));
    assert_eq!((code, said), (Some(0), format!("{} is good\n", file.display())));
    std::fs::write(&file, "[pools]\nmakers = 0\n").unwrap();
    let (code, said) = run(thawd().args(["config", "check"]).env("THAW_CONFIG", &file));
    assert_eq!(code, Some(100));
    assert!(
        said.contains("thawd.toml: line 2") && said.contains("makers"),
        "{said}"
    );
}

/// The lines of the unit file that thawd's guarantees depend on.
#[test]
fn the_unit_is_what_thawd_needs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/systemd/thawd.service");
    let unit = std::fs::read_to_string(path).unwrap();
    let value = |key: &str| {
        let mut values = unit
            .lines()
            .filter_map(|l| l.strip_prefix(key)?.strip_prefix('='));
        let value = values.next().unwrap_or_else(|| panic!("no {key}")).to_owned();
        assert!(values.next().is_none(), "{key} twice");
        value
    };
    assert_eq!(value("Type"), "notify");
    assert!(
        value("ExecReload").contains("-HUP"),
        "tokens and certificates are read again"
    );
    assert_eq!(value("KillMode"), "process", "sandboxes outlive thawd");
    let preserved = value("RuntimeDirectoryPreserve");
    assert_eq!(preserved, "yes", "the next thawd finds them there");
    let stop: u64 = value("TimeoutStopSec").parse().unwrap();
    assert!(stop > SHUTDOWN_TIMEOUT.as_secs(), "it may finish what it answers");
    assert!(value("WatchdogSec").parse::<u64>().unwrap() >= 10);
    // An end by the watchdog counts as a failure.
    assert_eq!(value("Restart"), "on-failure");
    for device in ["/dev/kvm", "/dev/net/tun", "/dev/userfaultfd"] {
        assert!(unit.contains(&format!("\nDeviceAllow={device} rw\n")), "{device}");
    }
}
