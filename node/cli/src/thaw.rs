//! `thaw thaw`: launches a sandbox from a snapshot and attaches to it like `thaw run`. `thaw fork`: freezes a sandbox once and thaws
//! clones from that snapshot.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use futures_util::future::join_all;
use thaw_protocol::api::{FreezeSandbox, RateLimits, ThawSandbox};
use thaw_protocol::control::MemoryMode;
use thaw_sandbox::config::Config;
use thaw_sandbox::container::Running;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::snapshot::{Hold, Registry, Scratch, Signatures};
use thaw_sandbox::trace::Trace;

use super::detach::Until;
use super::interrupt::interrupted;
use super::launch::{Keeping, Launched};
use super::memory_mode::{memory_mode, parse_memory_mode};
use super::run::{Started, conclude, keeping};
use super::running::{Owner, absolute};
use super::{MEMORY_MODE_HELP, NetworkArguments, RateLimitArguments, detach, snapshot, values};
use crate::stdio::{AttachOptions, Signals, Stdin};
use crate::ui::Ui;

#[derive(Debug, Args)]
#[command(
    disable_help_flag = true,
    after_help = "SNAPSHOT is the id, the name or the beginning of the id of a stored snapshot. With a slash, or if\nno stored snapshot is so named, it is a directory. If there is no such directory, and it begins\nwith the name of a registry, it is what a snapshot was pushed to: the sandbox starts at once, its\nmemory is fetched while it runs, and then the snapshot is stored.\n\nExamples:\n  thaw thaw web-ready\n  thaw thaw -d --name web-2 -p 8081:80 ./web-frozen\n  thaw thaw -d registry.example/web:ready"
)]
pub struct ThawArguments {
    /// The snapshot that `thaw freeze` stored or wrote, or that `thaw snapshot push` pushed
    #[arg(value_name = "SNAPSHOT")]
    pub snapshot: PathBuf,
    /// Pass stdin to the process
    #[arg(short, long)]
    pub interactive: bool,
    /// Print the sandbox's id once it runs, and leave it running. Its output and its exit status are kept as by `thaw run --detach`
    #[arg(short, long, conflicts_with = "interactive")]
    pub detach: bool,
    /// With --detach: keep nothing after the container's end
    #[arg(long)]
    pub rm: bool,
    /// The guest's host name [default: the sandbox's id]
    #[arg(short = 'h', long, value_name = "NAME")]
    pub hostname: Option<String>,
    /// A name for the sandbox
    #[arg(long, value_name = "NAME", value_parser = values::parse_name)]
    pub name: Option<String>,
    #[command(flatten)]
    pub through: NetworkArguments,
    #[command(flatten)]
    pub limits: RateLimitArguments,
    #[arg(long, value_name = "MODE", value_parser = parse_memory_mode, help = MEMORY_MODE_HELP)]
    pub memory_mode: Option<MemoryMode>,
    /// Fail unless the snapshot has a hook (thaw run --after-thaw) and this succeeds
    #[arg(long)]
    pub require_hook: bool,
    /// At the end, show how long each step of the start took
    #[arg(long)]
    pub timings: bool,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    pub help: Option<bool>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
What clones share: everything that is in the memory of the sandbox's processes. Keys, passwords, tokens and sessions are in each
clone. A random generator inside a program goes on from the same state, so that it gives the same session ids, nonces and
temporary names in each. Locks, leases and names that the program holds elsewhere are held by all. Connections end.
What is new: the kernel's random generator, the clock, the host name, the machine id and the network. A program renews the rest
with a hook (thaw run --after-thaw), or when /run/thaw/generation changes: docs/snapshots.md.

Examples:
  for id in $(thaw fork -n 10 web); do thaw exec $id hostname; done
  thaw run -d --name web --after-thaw http:8080/thawed IMAGE && thaw fork --require-hook web")]
pub struct ForkArguments {
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    /// How many clones
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub count: u16,
    /// Sign it with this Ed25519 key: PEM, as `openssl genpkey -algorithm ed25519` writes it
    #[arg(long, value_name = "FILE")]
    pub sign: Option<PathBuf>,
    /// Fail unless the sandbox has a hook (thaw run --after-thaw) and this succeeds in each clone
    #[arg(long)]
    pub require_hook: bool,
}

/// Thaws a sandbox. `is_keeper`: this is the process that `-d`, or `thaw fork`, starts.
pub(super) async fn thaw(arguments: &ThawArguments, is_keeper: bool, ui: &Ui) -> Result<u8, Error> {
    if arguments.detach && !is_keeper {
        return detach::detached_self(Until::Started, ui).await;
    }
    let trace = Trace::asked(arguments.timings);
    let (directory, snapshot) = snapshot::reference(&arguments.snapshot)?;
    let request = ThawSandbox {
        directory,
        snapshot,
        hostname: arguments.hostname.clone(),
        name: arguments.name.clone(),
        client: None,
        memory_mode: memory_mode(arguments.memory_mode)?,
        publish: arguments.through.publish.clone(),
        network_policy: arguments.through.policy()?,
        rate_limits: arguments.limits.over(RateLimits::default()),
        labels: Default::default(),
        timeout_s: None,
        idle_timeout_s: None,
        on_timeout: Default::default(),
        require_hook: arguments.require_hook,
        timings: arguments.timings,
    };
    let mut sandbox = tokio::select! {
        sandbox = launch(request, arguments, &trace) => sandbox?,
        status = interrupted() => return Ok(status),
    };
    sandbox.keeping = keeping(is_keeper, arguments.rm);
    ui.fact(serde_json::json!({"event": "sandbox", "id": sandbox.id}));
    sandbox.print_ports(&arguments.through.publish, ui);
    let result = attach(arguments, &sandbox, &trace, ui).await;
    conclude(sandbox, result, arguments.timings.then_some(&trace), ui).await
}

/// Thaws from the stored snapshot that the arguments name, or, if there is none of that name, from a directory of that name.
async fn launch(request: ThawSandbox, arguments: &ThawArguments, trace: &Trace) -> Result<Launched, Error> {
    match Launched::thaw(request.clone(), trace).await {
        Err(e) if e.kind == ErrorKind::SnapshotNotFound && arguments.snapshot.is_dir() => {
            let from_directory = ThawSandbox {
                directory: Some(absolute(&arguments.snapshot)?),
                snapshot: None,
                ..request
            };
            Launched::thaw(from_directory, trace).await
        }
        thawed => thawed,
    }
}

async fn attach(
    arguments: &ThawArguments,
    sandbox: &Launched,
    trace: &Trace,
    ui: &Ui,
) -> Result<Option<super::run::End>, Error> {
    let running = Running::read(&sandbox.directory)?;
    let signals = Signals::new()?;
    let started = Started::thawed(sandbox, &running, trace).await?;
    let how = AttachOptions {
        stdin: match arguments.interactive {
            true => Stdin::Pass,
            false => Stdin::Leave,
        },
        tty: running.tty && sandbox.keeping == Keeping::Nothing,
        output: sandbox.keeping == Keeping::Nothing,
    };
    started.attend(sandbox, how, signals, None, trace, ui).await
}

pub(super) async fn fork(arguments: &ForkArguments, ui: &Ui) -> Result<u8, Error> {
    let owner = Owner::find(&arguments.sandbox)?;
    let data = Paths::from_env().data;
    let signatures = Signatures::of(&Config::from_env()?.snapshots);
    let registry = Registry::open(&data, Hold::Files, signatures)?;
    let scratch = Scratch::for_clones(&data, &registry, arguments.sign.is_some())?;
    let directory = scratch.snapshot();
    let request = FreezeSandbox {
        directory: Some(directory.clone()),
        sign: arguments.sign.as_deref().map(absolute).transpose()?,
        require_hook: arguments.require_hook,
        ..FreezeSandbox::default()
    };
    owner.client.freeze(&owner.id, &request).await?;
    let mut line: Vec<OsString> = vec!["thaw".into(), directory.into()];
    if arguments.require_hook {
        line.insert(1, "--require-hook".into());
    }
    let clones = (0..arguments.count).map(|_| detach::detached(&line, Until::Started, ui));
    let mut failed = None;
    for clone in join_all(clones).await {
        match clone {
            Ok(id) => detach::print_id(&id, ui),
            Err(e) => failed = Some(e),
        }
    }
    // The clones have all of its files open.
    drop(scratch);
    failed.map_or(Ok(0), Err)
}
