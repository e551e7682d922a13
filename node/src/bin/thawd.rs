//! The node's daemon: sandboxes that outlive whoever asked for them, and outlive this process too.

use std::process::ExitCode;

use clap::Parser;
use thaw_node::api::daemon::Daemon;
use thaw_node::api::peer::Access;
use thaw_node::api::server::serve;
use thaw_node::api::tcp::Tcp;
use thaw_node::cli::logging;
use thaw_node::exit::Failure;
use thaw_node::paths::{Paths, VARIABLES};
use thaw_node::sandbox::Node;
use thaw_node::snapshot::Hold;
use thaw_node::snapshotter::Listening;
use thaw_node::ui::Ui;
use thaw_pools::failpoint;
use tokio::signal::unix::{SignalKind, signal};

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
}

fn help() -> String {
    let variables: Vec<String> = VARIABLES
        .iter()
        .map(|(name, what)| format!("  {name:<17} {what}"))
        .collect();
    format!("Environment:\n{}", variables.join("\n"))
}

fn main() -> ExitCode {
    thaw_node::exit::end_on_panic();
    let arguments = Arguments::parse();
    logging::start(&arguments.log_level, arguments.json);
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            Ui::new(arguments.json, false).failure(&failure);
            ExitCode::from(failure.code.number())
        }
    }
}

/// Takes as many descriptors as it may have: each sandbox, and each that waits in a pool, takes some.
fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("cannot have more descriptors: {e}");
    }
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(place) = &arguments.failpoint {
        failpoint::arm(place).map_err(|e| Failure::new(thaw_node::exit::ExitCode::Runtime, e.to_string()))?;
    }
    raise_descriptors();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::system("cannot start the runtime", &e))?;
    let mut pools = None;
    let served = runtime.block_on(async {
        let paths = Paths::from_env();
        let socket = arguments.socket.clone().unwrap_or_else(|| paths.daemon_socket());
        let access = match &arguments.socket_group {
            Some(group) => Access::for_group(group)?,
            None => Access::default(),
        };
        let mut ends = Vec::new();
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            ends.push(signal(kind).map_err(|e| Failure::system("cannot catch a signal", &e))?);
        }
        let mut node = Node::open_as(paths, Hold::Sealed, arguments.test_templates)?;
        node.fill_pools()?;
        pools = Some((node.shells.clone(), node.pools.clone()));
        let snapshotter = match &arguments.snapshots_socket {
            Some(socket) => {
                Some(Listening::open(node.images.clone(), &node.paths.snapshots(), socket).await?)
            }
            None => None,
        };
        let tcp = Tcp::open(node.api_config()).await?;
        if let Some(address) = tcp.as_ref().and_then(|tcp| tcp.address().ok()) {
            tracing::info!(%address, "listening");
        }
        let daemon = Daemon::start(node).await?;
        tracing::info!(socket = %socket.display(), "listening");
        let (stop, mut stopped) = tokio::sync::watch::channel(());
        let end = async move {
            let [first, second] = &mut ends[..] else { return };
            tokio::select! { _ = first.recv() => {}, _ = second.recv() => {} }
            // Whoever waits for it sees that it is gone.
            drop(stop);
        };
        let snapshotter = async {
            let ended = async { while stopped.changed().await.is_ok() {} };
            match snapshotter {
                Some(snapshotter) => snapshotter.serve(ended).await,
                None => Ok(()),
            }
        };
        let (served, snapshotter) = tokio::join!(serve(daemon, &socket, access, tcp, end), snapshotter);
        served.and(snapshotter)
    });
    // Once it is gone, nobody claims or releases any more.
    drop(runtime);
    if let Some((shells, pools)) = pools {
        shells.close();
        pools.close();
    }
    served
}
