//! Owners of a sandbox of `thaw run`: the command's own process, a thawd that runs already, and one that is started for it alone.
//!
//! The command is this program again ([`client`], [`own`]), so that each way begins with the start of a process and nothing of `thaw run`
//! that is the same for all counts. The guest has no process.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use thaw_daemon::api::client::Client;
use thaw_images::progress::Silent;
use thaw_protocol::api::{CreateSandbox, DEFAULT_DISK_MIB};
use thaw_protocol::control::MemoryMode;
use thaw_sandbox::container::RootServing;
use thaw_sandbox::images::Pull;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::snapshot::Hold;
use thaw_sandbox::state::Terms;
use thaw_sandbox::trace::Trace;
use thaw_sandbox::{NetworkMode, NetworkSource, Node, Sandbox, SandboxSpec, network};
use thaw_tiny_node::kernel::Cost;
use thaw_tiny_node::{Place, Thawd};

use crate::Report;
use crate::clock::{monotonic_ns, us_since};
use crate::create::{Node as Served, Ready};

/// The arguments with which this program is a command that owns its sandbox, or a client of thawd.
pub const OWN: &str = "--own";
pub const CLIENT: &str = "--client";
/// This program, beside thawd.
const PROGRAM: &str = "bench-alternatives";
/// What the command prints when the guest runs.
const CREATED: &str = "created";

const STARTED: &str = "start of the command to guest running";
const ENDED: &str = "end of the sandbox to end of the command";
const RSS: &str = "RSS of the owner";

fn name(owner: &str, what: &str) -> String {
    format!("owner {owner}: {what}")
}

const ITSELF: &str = "thaw run itself";
const RUNNING: &str = "thawd, nothing ready";
const PARKED: &str = "thawd, machines parked";
const PRIVATE: &str = "thawd started for it";

/// Each way `rounds` times; one more round of each is not counted.
pub async fn run(place: Place, rounds: usize, report: &mut Report) -> Result<(), String> {
    // Builds the template, and warms up.
    let served = Served::start(place, Ready::Nothing, 0..=0).await?;
    for round in 0..=rounds {
        let sample = commanded(&served.place, CLIENT, Some(served.thawd.record().pid))?;
        add(report, RUNNING, round, sample);
    }
    let place = served.stop();
    for round in 0..=rounds {
        add(report, ITSELF, round, commanded(&place, OWN, None)?);
        add(report, PRIVATE, round, with_private_thawd(&place)?);
    }
    let served = Served::start(place, Ready::Parked, 2..=4).await?;
    for round in 0..=rounds {
        let sample = commanded(&served.place, CLIENT, Some(served.thawd.record().pid))?;
        add(report, PARKED, round, sample);
        served.settle().await?;
    }
    drop(served.stop());
    let itself = name(ITSELF, STARTED);
    report.ratio("private_thawd_over_own_process", &name(PRIVATE, STARTED), &itself)?;
    report.ratio("parked_thawd_over_own_process", &name(PARKED, STARTED), &itself)
}

/// What one command took, ms, and its owner's memory.
struct Sample {
    started: f64,
    ended: f64,
    rss_kib: u64,
}

fn add(report: &mut Report, owner: &str, round: usize, sample: Sample) {
    if round > 0 {
        report.sample(&name(owner, STARTED), "ms", sample.started);
        report.sample(&name(owner, ENDED), "ms", sample.ended);
        report.sample(&name(owner, RSS), "MiB", sample.rss_kib as f64 / 1024.0);
    }
}

/// Runs one command; `owner` is the process that owns the sandbox, if it is not the command.
fn commanded(place: &Place, argument: &str, owner: Option<i32>) -> Result<Sample, String> {
    let start = monotonic_ns();
    let command = Commanded::start(place, argument)?;
    let started = us_since(start) / 1e3;
    let owner = owner.unwrap_or(command.child.id() as i32);
    let rss_kib = Cost::of(owner).ok_or("the owner has ended")?.rss_kib;
    Ok(Sample {
        started,
        ended: command.end()?,
        rss_kib,
    })
}

/// Starts a thawd, a command that is its client, and ends both.
fn with_private_thawd(place: &Place) -> Result<Sample, String> {
    let start = monotonic_ns();
    let thawd = Thawd::begin(place, place.thawd());
    while !thaw_pools::vmm::is_served(&place.socket()) {
        // What a command would wait for is a message of thawd's; this is not later by more than it sleeps.
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    let command = Commanded::start(place, CLIENT)?;
    let started = us_since(start) / 1e3;
    let rss_kib = Cost::of(thawd.record().pid).ok_or("thawd has ended")?.rss_kib;
    let ended = command.end()?;
    let stopping = monotonic_ns();
    thawd.stop();
    Ok(Sample {
        started,
        ended: ended + us_since(stopping) / 1e3,
        rss_kib,
    })
}

/// A command whose guest runs.
struct Commanded {
    child: Child,
    until: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Commanded {
    fn start(place: &Place, argument: &str) -> Result<Commanded, String> {
        let text = |e: std::io::Error| format!("{PROGRAM} {argument}: {e}");
        let mut command: Command = place.command(PROGRAM);
        let command = command.args([argument, &place.image(), &place.request().to_string()]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(text)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (until, said) = pipes.ok_or("a command without pipes")?;
        let mut said = BufReader::new(said);
        let mut line = String::new();
        said.read_line(&mut line).map_err(text)?;
        match line.trim() {
            CREATED => Ok(Commanded { child, until, said }),
            other => Err(format!("{PROGRAM} {argument} said {other:?}")),
        }
    }

    /// Tells it to end its sandbox and waits for its end: ms.
    fn end(mut self) -> Result<f64, String> {
        let start = monotonic_ns();
        drop(self.until);
        let mut rest = String::new();
        let _ = self.said.read_to_string(&mut rest);
        let status = self.child.wait().map_err(|e| e.to_string())?;
        match status.success() {
            true => Ok(us_since(start) / 1e3),
            false => Err(format!("{PROGRAM}: {status}")),
        }
    }
}

/// The command that owns its sandbox.
pub async fn own(image: &str) -> Result<(), String> {
    let node = Node::open_as(Paths::from_env(), Hold::Files, true).map_err(|e| e.to_string())?;
    let spec = SandboxSpec {
        image: Some(image.to_owned()),
        pull: Pull::Missing,
        plain_http: false,
        vcpus: 1,
        memory_mib: 128,
        disk_mib: DEFAULT_DISK_MIB,
        hostname: None,
        name: None,
        network: NetworkSource::Ours(NetworkMode::Private),
        network_terms: network::read(None, &[]).map_err(|e| e.to_string())?,
        command: Vec::new(),
        tethered: true,
        client: None,
        cold: false,
        memory_mode: MemoryMode::Cow,
        root: RootServing::Virtiofs,
        record: None,
        prefetch: false,
        terms: Terms::default(),
        volumes: Vec::new(),
        cpu_limit_millis: None,
    };
    let building = Arc::new(|_| {});
    let sandbox = Sandbox::create(&node, spec, &Trace::new(), Arc::new(Silent), building).await;
    let sandbox = Arc::new(sandbox.map_err(|e| e.to_string())?);
    created_until_told();
    sandbox.destroy().await;
    node.pools.unclaimed().await;
    Ok(())
}

/// The command that is a client of thawd.
pub async fn client(request: &str) -> Result<(), String> {
    let request: CreateSandbox = serde_json::from_str(request).map_err(|e| e.to_string())?;
    let client = Client::connect(&Paths::from_env().daemon_socket()).ok_or("thawd does not answer")?;
    let made = client.create(&request).await.map_err(|e| e.to_string())?;
    created_until_told();
    client.delete(&made.sandbox.id).await.map_err(|e| e.to_string())
}

/// Says that the guest runs, and waits for the end of standard input.
fn created_until_told() {
    println!("{CREATED}");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}
