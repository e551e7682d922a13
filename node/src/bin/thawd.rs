//! The node's daemon. Its sandboxes outlive the callers that created them, and thawd itself.

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use thaw_cli::logging;
use thaw_cli::ui::Ui;
use thaw_containerd::snapshotter::Listening;
use thaw_daemon::api::client::Client;
use thaw_daemon::api::credentials::Credentials;
use thaw_daemon::api::daemon::Daemon;
use thaw_daemon::api::peer::Access;
use thaw_daemon::api::scrape::Scrape;
use thaw_daemon::api::server::{OtherApi, OverTcp, check_unserved, serve};
use thaw_daemon::api::tcp::Tcp;
use thaw_daemon::e2b::listener::E2b;
use thaw_daemon::e2b::members::Members;
use thaw_daemon::exit::{exit, line};
use thaw_daemon::pods;
use thaw_daemon::service;
use thaw_failpoint as failpoint;
use thaw_sandbox::config::{Config, default};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::{Paths, VARIABLES};
use thaw_sandbox::snapshot::Hold;
use thaw_sandbox::state::RunDirectory;
use thaw_sandbox::{Node, Tenants};
use thaw_sys::{allocator, descriptors};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Most VMMs that start at the same time with places kept for their descriptors. The others start too, but more slowly.
const STARTS: usize = 32;
/// Descriptors for which there is room from the beginning: enough for 3,000 sandboxes.
const DESCRIPTORS: u32 = 32 << 10;

/// Serves sandboxes over HTTP on a unix socket.
///
/// Stopping it leaves its sandboxes running; starting it again takes them over. Where it runs, `thaw run` uses it.
#[derive(Debug, Parser)]
#[command(version, after_help = help())]
struct Arguments {
    /// Where to listen [default: thawd.sock in the run directory]
    #[arg(long, value_name = "PATH")]
    socket: Option<std::path::PathBuf>,
    /// Whose members may use the socket too, by name or number [default: nobody's]
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Where to serve containerd as a remote snapshotter [default: not at all]
    ///
    /// In containerd's configuration: [proxy_plugins.thaw] type = "snapshot", address = "PATH".
    #[arg(long, value_name = "PATH")]
    snapshots_socket: Option<std::path::PathBuf>,
    /// Take guests weakened for a test (a thaw.test= word on their kernel's command line)
    #[arg(long)]
    test_templates: bool,
    /// Die at this failpoint, NAME or NAME:N; with =PATH, wait there for as long as that file, which it makes, is there
    #[arg(long, value_name = "NAME", hide = true, requires = "test_templates")]
    failpoint: Option<String>,
    /// What to log to stderr: error, warn, info, debug, trace, or target=level,...
    #[arg(
        long,
        value_name = "LEVEL",
        default_value = "info",
        env = "THAW_LOG",
        hide_env_values = true
    )]
    log_level: String,
    /// Log JSON lines
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// A command to run instead of serving.
#[derive(Debug, Subcommand)]
enum Command {
    /// Look at configuration files
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Have the thawd that serves make no more sandboxes, and wait until none is being made; those there are run on
    Drain {
        /// Have it make sandboxes again
        #[arg(long)]
        undo: bool,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Say whether a configuration file is good, or which line and key of it is not
    Check {
        /// The file [default: the one thawd would read]
        file: Option<std::path::PathBuf>,
    },
    /// Print every option with its default and what it does, as a file to begin with
    Default,
}

fn help() -> String {
    let variables: Vec<String> = VARIABLES
        .iter()
        .map(|(name, what)| format!("  {name:<17} {what}"))
        .collect();
    format!("Environment:\n{}", variables.join("\n"))
}

fn main() -> ExitCode {
    thaw_daemon::exit::end_on_panic();
    // By default it has eight times as many, and each keeps what it has grown to.
    allocator::limit_heaps(processors().try_into().unwrap_or(i32::MAX));
    let arguments = Arguments::parse();
    logging::start(&arguments.log_level, arguments.json);
    let done = match &arguments.command {
        None => run(&arguments),
        Some(Command::Config(ConfigCommand::Default)) => {
            print(default::DEFAULT.trim_end());
            Ok(())
        }
        Some(Command::Config(ConfigCommand::Check { file })) => {
            default::check(file.as_deref()).map(|good| print(&good))
        }
        Some(Command::Drain { undo }) => drain(&arguments, *undo),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            Ui::new(arguments.json, false).failure(&failure);
            ExitCode::from(exit(failure.kind).number)
        }
    }
}

/// Prepares for many descriptors: each sandbox and each resource in a pool needs some. Raises their limit to its maximum.
fn prepare_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    if let Err(e) = thaw_pools::vmm::reserve_descriptors(processors().min(STARTS)) {
        tracing::warn!("the more sandboxes there are, the more slowly VMMs will start: {e}");
    }
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("cannot have more descriptors: {e}");
    }
    if let Err(e) = descriptors::make_room(DESCRIPTORS) {
        tracing::debug!("no room was made for descriptors, so some creations will wait for it: {e}");
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Prints a line of the command's output. A closed stdout is no error.
fn print(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// The path of the socket to listen on.
fn socket(arguments: &Arguments, paths: &Paths) -> std::path::PathBuf {
    arguments.socket.clone().unwrap_or_else(|| paths.daemon_socket())
}

fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::system("cannot start the runtime", &e))
}

fn drain(arguments: &Arguments, undo: bool) -> Result<(), Error> {
    let socket = socket(arguments, &Paths::from_env());
    let nobody = || {
        let what = format!("nobody serves {}", socket.display());
        Error::new(ErrorKind::DaemonUnreachable, what)
    };
    let client = Client::connect(&socket).ok_or_else(nobody)?;
    let now = runtime()?.block_on(async {
        match undo {
            true => client.undrain().await,
            false => client.drain().await,
        }
    })?;
    let (makes, sandboxes) = (
        if now.draining {
            "no more"
        } else {
            "sandboxes again"
        },
        now.sandboxes,
    );
    print(&format!("it makes {makes}; {sandboxes} run on"));
    Ok(())
}

/// Reads the list of nodes of the configuration again.
fn reload_members(members: &Members) -> Result<(), Error> {
    match Config::from_env()?.e2b.cluster {
        Some(cluster) => members.reload(&cluster),
        None => Err(Error::new(
            ErrorKind::ConfigInvalid,
            "there is no [e2b.cluster] any more: to leave the nodes, restart thawd",
        )),
    }
}

/// Reloads the TCP credentials and the list of nodes at each signal from an operator. Never returns.
async fn read_again(mut said: Signal, credentials: Option<Arc<Credentials>>, members: Option<Arc<Members>>) {
    while said.recv().await.is_some() {
        if let Some(members) = members.clone() {
            match tokio::task::spawn_blocking(move || reload_members(&members)).await {
                Ok(Ok(())) => {}
                Ok(Err(e)) => tracing::error!("the list of nodes stays the same: {e}"),
                Err(e) => tracing::error!("the list of nodes stays the same: {e}"),
            }
        }
        let Some(credentials) = credentials.clone() else {
            tracing::info!("there is nothing to read again: nothing is served over TCP");
            continue;
        };
        let read = tokio::task::spawn_blocking(move || credentials.reload()).await;
        match read {
            Ok(Ok(())) => tracing::info!("tokens and certificates were read again"),
            Ok(Err(e)) => tracing::error!("tokens and certificates stay what they were: {e}"),
            Err(e) => tracing::error!("tokens and certificates stay what they were: {e}"),
        }
    }
}

/// The TCP sockets, and what is reloaded of them.
struct Opened {
    tcp: OverTcp,
    /// Those of the callers.
    credentials: Option<Arc<Credentials>>,
    members: Option<Arc<Members>>,
}

/// Opens the TCP sockets that the configuration names.
async fn over_tcp(node: &Node) -> Result<Opened, Error> {
    let listening = |address: std::io::Result<std::net::SocketAddr>, what: &str| {
        if let Ok(address) = address {
            tracing::info!(%address, "listening{what}");
        }
    };
    let config = &node.images.config;
    let (api_config, e2b_config) = (&config.api, &config.e2b);
    // The tokens and the certificate may be for E2B's API alone.
    let is_for_e2b = api_config.listen.is_none() && e2b_config.listen.is_some();
    let api = match is_for_e2b {
        true => None,
        false => Tcp::open(api_config).await?,
    };
    let credentials = api.as_ref().map(Tcp::credentials);
    let e2b = E2b::open(e2b_config, api_config, credentials.clone(), &node.paths).await?;
    let credentials = credentials.or_else(|| e2b.as_ref().map(E2b::credentials));
    let members = e2b.as_ref().and_then(E2b::members);
    let scrape = Scrape::open(&config.metrics).await?;
    if let Some(api) = &api {
        listening(api.address(), "");
    }
    if let Some(e2b) = &e2b {
        listening(e2b.address(), " for clients of E2B's API");
    }
    if let Some(scrape) = &scrape {
        listening(scrape.address(), " for who reads metrics");
    }
    let other = e2b.map(|e2b| Box::new(e2b) as Box<dyn OtherApi>);
    Ok(Opened {
        tcp: OverTcp { api, scrape, other },
        credentials,
        members,
    })
}

/// Catches a signal from now on.
fn caught(kind: SignalKind) -> Result<Signal, Error> {
    signal(kind).map_err(|e| Error::system("cannot catch a signal", &e))
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    if let Some(place) = &arguments.failpoint {
        failpoint::arm(place).map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?;
    }
    prepare_descriptors();
    let paths = Paths::from_env();
    let socket = socket(arguments, &paths);
    check_unserved(&socket)?;
    // Held to the end.
    let _lock = RunDirectory::open(&paths.run)?.lock_for_thawd()?;
    let runtime = runtime()?;
    let mut pools = None;
    let served = runtime.block_on(async {
        let access = match &arguments.socket_group {
            Some(group) => Access::for_group(group)?,
            None => Access::default(),
        };
        let (mut terminate, mut interrupt) =
            (caught(SignalKind::terminate())?, caught(SignalKind::interrupt())?);
        let hang_ups = caught(SignalKind::hangup())?;
        let mut node = Node::open_as(paths, Hold::Sealed, arguments.test_templates)?;
        node.fill_pools()?;
        tokio::spawn(node.images.clone().keep_measured());
        tokio::spawn(node.clone().collect_components());
        let tenants = Tenants::open(node.clone());
        tokio::spawn(tenants.clone().keep_snapshots_retired());
        pools = Some((tenants.clone(), node.shells.clone(), node.pools.clone()));
        let snapshotter = match &arguments.snapshots_socket {
            Some(socket) => {
                Some(Listening::open(node.images.clone(), &node.paths.snapshots(), socket, line).await?)
            }
            None => None,
        };
        let Opened {
            tcp,
            credentials,
            members,
        } = over_tcp(&node).await?;
        tokio::spawn(read_again(hang_ups, credentials, members));
        let pods = pods::Listening::open(&node.paths.pods_socket())?;
        let daemon = Daemon::start(tenants).await?;
        tokio::spawn(service::keep_alive(daemon.clone()));
        let listens = || {
            tracing::info!(socket = %socket.display(), "listening");
            service::ready(&daemon);
        };
        let (stop, mut stopped) = tokio::sync::watch::channel(());
        let mut pods_stopped = stopped.clone();
        let end = async move {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            service::stopping();
            // Closes the channel on which the other servers wait for the end.
            drop(stop);
        };
        let snapshotter = async {
            let ended = async { while stopped.changed().await.is_ok() {} };
            match snapshotter {
                Some(snapshotter) => snapshotter.serve(ended).await,
                None => Ok(()),
            }
        };
        let pods = pods.serve(daemon.clone(), async move {
            while pods_stopped.changed().await.is_ok() {}
        });
        let serving = serve(daemon.clone(), &socket, access, tcp, listens, end);
        let (served, snapshotter, pods) = tokio::join!(serving, snapshotter, pods);
        served.and(snapshotter).and(pods)
    });
    // Once the runtime is dropped, no task claims or releases resources.
    drop(runtime);
    if let Some((tenants, shells, pools)) = pools {
        tenants.close();
        shells.close();
        // If the last spare went to a sandbox, its directory left this one empty.
        tenants.shared().run.spares().remove_if_unused();
        pools.close();
    }
    served
}
