//! The commands of `thaw`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use clap::{Args, Parser, Subcommand};
use thaw_daemon::exit::exit;
use thaw_protocol::api::Volume;
use thaw_protocol::control::MemoryMode;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::VARIABLES;

use crate::interrupt::in_runtime;
use crate::ui::Ui;

mod about;
mod attach;
mod completion;
mod container_arguments;
mod cp;
mod debug;
mod detach;
mod doctor;
mod events;
mod exec;
mod format;
mod image;
mod inspect;
mod install;
mod interrupt;
mod launch;
pub mod logging;
mod logs;
mod man;
mod memory_mode;
mod mount;
mod names;
mod network;
mod port;
mod ps;
mod rate_limits;
mod ready;
mod run;
mod running;
mod signal;
mod size;
mod snapshot;
mod source;
mod stats;
mod stdio;
mod table;
mod template;
mod thaw;
mod timeout;
mod timings;
mod top;
pub mod ui;
mod unknown_flag;
mod values;
mod wait;

pub use about::{InfoArguments, VersionArguments};
pub use attach::AttachArguments;
pub use completion::CompletionArguments;
pub use container_arguments::ContainerArguments;
pub use cp::CopyArguments;
pub use debug::DebugCommand;
pub use events::EventsArguments;
pub use exec::ExecArguments;
pub use format::Format;
pub use image::{ImageCommand, ImagesArguments, PullArguments, RemoveArguments};
pub use inspect::InspectArguments;
pub use install::InstallArguments;
pub use logs::LogsArguments;
pub use man::ManArguments;
pub use names::NameArguments;
pub use network::{ChangeArguments, NetworkArguments};
pub use port::PortArguments;
pub use ps::PsArguments;
pub use rate_limits::{ChangeRateLimits, RateLimitArguments};
pub use ready::ReadyArguments;
pub use running::{FreezeArguments, PauseArguments};
pub use signal::{KillArguments, RestartArguments, StopArguments};
pub use size::{ByteSize, CpuLimit};
pub use snapshot::SnapshotCommand;
pub use source::SourceArguments;
pub use stats::StatsArguments;
pub use template::TemplateCommand;
pub use thaw::{ForkArguments, ThawArguments};
pub use timeout::TimeoutArguments;
pub use top::TopArguments;
pub use values::{NetworkMode, Pull, RootServing};
pub use wait::WaitArguments;

/// Runs each container in a microVM of its own.
#[derive(Debug, Parser)]
#[command(name = "thaw", version, after_help = environment_help(), max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Progress, results and errors as JSON, one object per line
    #[arg(long, global = true)]
    pub json: bool,
    /// Print only errors
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// What to log to stderr: error, warn, info, debug, trace, or target=level,...
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        default_value = "warn",
        env = "THAW_LOG",
        hide_env_values = true
    )]
    pub log_level: String,
    /// Die at this failpoint, like thawd's flag of this name; for tests of recovery
    #[arg(long, global = true, value_name = "NAME", hide = true)]
    pub failpoint: Option<String>,
    /// This process is the child that `-d` starts
    #[arg(long, global = true, hide = true)]
    pub keeper: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in a new container, in a new microVM
    Run(Box<RunArguments>),
    /// Run another command in a running sandbox
    Exec(Box<ExecArguments>),
    /// Copy files and directories between this host and a running sandbox
    Cp(CopyArguments),
    /// List running sandboxes; with --quiet, only their ids
    Ps(PsArguments),
    /// Show all that is known of sandboxes or images, as JSON
    Inspect(InspectArguments),
    /// List the published ports of a sandbox, with the ports of the host
    Port(PortArguments),
    /// Show the output of a detached container
    Logs(LogsArguments),
    /// Wait until containers end, and print their exit statuses
    Wait(WaitArguments),
    /// Attach to the process of a detached container
    Attach(AttachArguments),
    /// Show the resource usage of running sandboxes, refreshed
    Top(TopArguments),
    /// Show the resource usage of running sandboxes, with docker's columns
    Stats(StatsArguments),
    /// Stop containers: send their stop signal, and SIGKILL after a time
    Stop(StopArguments),
    /// Stop the programs of detached containers and start them again, in the same machines
    Restart(RestartArguments),
    /// Send a signal to the processes of containers
    Kill(KillArguments),
    /// Show what happens to sandboxes, as it happens
    Events(EventsArguments),
    /// Stop a sandbox's CPUs, or write it to disk and release its memory
    Pause(PauseArguments),
    /// Let a paused sandbox run again
    #[command(after_help = "Example:\n  thaw resume web")]
    Resume {
        /// The sandbox
        sandbox: String,
    },
    /// Write a snapshot of a running sandbox, with memory and disk, to thaw it later
    Freeze(FreezeArguments),
    /// Thaw a new sandbox from a snapshot; its processes continue
    Thaw(ThawArguments),
    /// Make detached clones of a running sandbox, and print their ids
    Fork(ForkArguments),
    /// Change where a running sandbox may connect to
    Network(ChangeArguments),
    /// Change the rate limits of a running sandbox's disks and network
    Limit(ChangeRateLimits),
    /// Change how long a running sandbox may run, and what happens then
    Timeout(TimeoutArguments),
    /// End sandboxes, and remove what is left of failed ones
    #[command(after_help = "Examples:\n  thaw rm web\n  thaw rm $(thaw ps -q)")]
    Rm {
        /// The sandboxes: ids, names, or beginnings of ids
        #[arg(required = true, value_name = "SANDBOX")]
        sandboxes: Vec<String>,
        /// Accepted for compatibility with docker: running sandboxes are always ended
        #[arg(short, long)]
        force: bool,
    },
    /// Pull, list, check, convert and remove images
    #[command(subcommand)]
    Image(ImageCommand),
    /// List images: `thaw image ls`; with --quiet, only digests
    #[command(after_help = "Example:\n  thaw images\n  thaw images -q")]
    Images(ImagesArguments),
    /// Pull an image: `thaw image pull`
    #[command(after_help = "Example:\n  thaw pull registry.example/python:3")]
    Pull(PullArguments),
    /// Remove images: `thaw image rm`
    #[command(after_help = "Example:\n  thaw rmi registry.example/python:3")]
    Rmi(RemoveArguments),
    /// List, name, check and remove the snapshots that the node stores
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Build, list, check and remove the templates sandboxes are thawed from
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Make Thaw a runtime of this host's containerd, for `ctr` and Kubernetes; a repetition changes nothing
    Install {
        #[command(flatten)]
        arguments: InstallArguments,
        /// Only print what would be added to its configuration
        #[arg(long)]
        print: bool,
    },
    /// Undo `thaw install` completely
    Uninstall(InstallArguments),
    /// Check this host: what it has, what it lacks, what that costs, and the fix
    #[command(after_help = "Exits with 1 when something essential is missing.\n\nExample:\n  thaw doctor")]
    Doctor,
    /// Print a script with which a shell completes commands, flags and names
    Completion(CompletionArguments),
    /// Print what may complete the last word
    #[command(name = "__complete", hide = true)]
    Complete {
        /// The words after `thaw`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Write the manual pages
    #[command(hide = true)]
    Man(ManArguments),
    /// Collect diagnostics
    #[command(subcommand)]
    Debug(DebugCommand),
    /// Show this node: thawd, sandboxes, images, pools and the host
    Info(InfoArguments),
    /// Print the versions of thaw, thawd and the kernel, and whether KVM can be used
    Version(VersionArguments),
}

const RUN_EXAMPLES: &str = "\
IMAGE is one of
  oci:DIR[:TAG]                an OCI image layout
  docker-archive:FILE          what `docker save` wrote
  [REGISTRY/]NAME[:TAG|@DIGEST]  from a registry; credentials are read from ~/.docker/config.json

Examples:
  thaw run oci:./busybox echo hello
  thaw run -it registry.example/python:3 python3
  echo data | thaw run -i -e MODE=fast --memory 1g --cpus 2 oci:./app
  thaw run --timings --network none docker-archive:app.tar /bin/true
  thaw run -p 8080:80 --egress allow=192.0.2.0/24:443 --egress default=deny oci:./web
  thaw run -d --ready-http 80/healthz oci:./web
  thaw run --disk-bps 20m --disk-iops 500 --net-out-bps 1m:8m oci:./web
  thaw run --privileged -m 2g --mount type=volume,target=/var/lib/docker docker:dind

Exit codes are the container's own, 125, 126, 127 and 137 as under `docker run`, and 59 to 124 for what is wrong
with the host, the image or the registry: see docs/exit-codes.md.";

#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES, disable_help_flag = true, override_usage = "thaw run [OPTIONS] IMAGE [COMMAND [ARGUMENT]...]")]
pub struct RunArguments {
    /// With --detach: keep nothing after the container's end. Without --detach, nothing is kept anyway
    #[arg(long)]
    pub rm: bool,
    #[command(flatten)]
    pub process: ProcessArguments,
    /// vCPUs, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub cpus: u8,
    /// Limit the CPU time, in CPUs: a decimal number from 0.01 to 64, such as 0.5 [default: only the vCPUs limit it]
    #[arg(long, value_name = "CPUS")]
    pub cpu_limit: Option<CpuLimit>,
    /// Memory of the microVM, kernel included: bytes, or with k, m, g; at least 64m
    #[arg(short, long, value_name = "SIZE", default_value = "512m")]
    pub memory: ByteSize,
    /// Size of the writable layer: bytes, or with k, m, g, t; 64m to 1t. The host stores only what is written
    #[arg(long, value_name = "SIZE", default_value = "8g")]
    pub disk: ByteSize,
    /// Mount the container's root filesystem read-only
    #[arg(long)]
    pub read_only: bool,
    /// Run an init as PID 1, which forwards signals to the command and reaps orphaned processes
    #[arg(long)]
    pub init: bool,
    /// Replace the image's entry point, and ignore its command. Empty for none
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// The container's host name [default: the sandbox's id]
    #[arg(short = 'h', long, value_name = "NAME")]
    pub hostname: Option<String>,
    /// A name for the sandbox, for commands such as `thaw exec`
    #[arg(long, value_name = "NAME", value_parser = values::parse_name)]
    pub name: Option<String>,
    /// `private`: a network of its own, with access to the outside; `none`: loopback only
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    pub network: NetworkMode,
    #[command(flatten)]
    pub through: NetworkArguments,
    #[command(flatten)]
    pub names: NameArguments,
    #[command(flatten)]
    pub limits: RateLimitArguments,
    /// Share a directory or file of this host: HOST:GUEST, HOST:GUEST:ro. It must exist; a sandbox with volumes cannot be
    /// frozen or forked
    #[arg(short, long, value_name = "HOST:GUEST[:ro]", value_parser = thaw_sandbox::container::parse_volume)]
    pub volume: Vec<Volume>,
    #[command(flatten)]
    pub container: ContainerArguments,
    #[command(flatten)]
    pub ready: ReadyArguments,
    #[command(flatten)]
    pub source: SourceArguments,
    /// How the image is served: `virtiofs`: as files; `erofs`: as a disk that the guest mounts
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    pub root: RootServing,
    /// Record what the run reads of the image, in the order of first reads: later starts read it ahead. With a FILE, write
    /// it there too
    #[arg(long, value_name = "FILE", require_equals = true)]
    pub record: Option<Option<std::path::PathBuf>>,
    /// Read nothing ahead
    #[arg(long)]
    pub no_prefetch: bool,
    /// Boot a kernel instead of thawing a template
    #[arg(long)]
    pub cold: bool,
    #[arg(long, value_name = "MODE", value_parser = memory_mode::parse_memory_mode, help = MEMORY_MODE_HELP)]
    pub memory_mode: Option<MemoryMode>,
    /// Print the sandbox's id once its container runs, and leave it running. Its output is kept for `thaw logs`, also after its end,
    /// with its exit status, until `thaw rm`, unless --rm is given. With -i its stdin stays open for `thaw attach`
    #[arg(short, long)]
    pub detach: bool,
    /// At the end, show how long each step of the start took
    #[arg(long)]
    pub timings: bool,
    /// The image, and a command instead of its own; flags after the image belong to the command
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "IMAGE [COMMAND]"
    )]
    pub image_and_command: Vec<String>,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    pub help: Option<bool>,
}

impl RunArguments {
    /// The volumes of the flags, validated.
    fn volumes(&self) -> Result<Vec<Volume>, Error> {
        let volumes: Vec<Volume> = self
            .volume
            .iter()
            .cloned()
            .chain(self.container.volumes())
            .collect();
        let checked = thaw_sandbox::container::check_volumes(&volumes);
        checked.map_err(|why| Error::new(ErrorKind::Runtime, format!("-v: {why}")))?;
        Ok(volumes)
    }
}

const MEMORY_MODE_HELP: &str = "How a thawed guest gets its memory: `cow`: mapped, pages come as they are touched; \
    `populate`: all of it in advance; `uffd`: filled by this process, each part compared first \
    [default: $THAW_MEMORY_MODE, else cow]";

/// Options of a process.
#[derive(Debug, Args)]
pub struct ProcessArguments {
    /// Pass stdin to the process
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the process a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Set an environment variable; NAME alone takes the value from this environment
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Read environment variables from a file, one per line
    #[arg(long, value_name = "FILE")]
    pub env_file: Vec<std::path::PathBuf>,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Run as USER[:GROUP], names or numbers
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
}

fn environment_help() -> String {
    let variables: Vec<String> = VARIABLES
        .iter()
        .map(|(name, what)| format!("  {name:<17} {what}"))
        .collect();
    format!(
        "Environment:\n{}\n  NO_COLOR          no colour, even on a terminal",
        variables.join("\n")
    )
}

/// Runs the command line of this process. Returns its exit status.
pub fn main() -> u8 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version are no errors; wrong usage exits with 125, like docker.
            let _ = e.print();
            return if e.use_stderr() {
                exit(ErrorKind::Runtime).number
            } else {
                0
            };
        }
    };
    logging::start(&cli.global.log_level, cli.global.json);
    let ui = Ui::new(cli.global.json, cli.global.quiet);
    let armed = match &cli.global.failpoint {
        Some(place) => thaw_failpoint::arm(place).map_err(|e| Error::new(ErrorKind::Runtime, e.to_string())),
        None => Ok(()),
    };
    match armed.and_then(|()| dispatch(&cli, &ui)) {
        Ok(status) => status,
        Err(failure) => {
            ui.failure(&failure);
            exit(failure.kind).number
        }
    }
}

fn dispatch(cli: &Cli, ui: &Ui) -> Result<u8, Error> {
    match &cli.command {
        Command::Run(arguments) => in_runtime(run::run(arguments, cli.global.keeper, ui)),
        Command::Exec(arguments) => in_runtime(exec::exec(arguments)),
        Command::Cp(arguments) => in_runtime(cp::copy(arguments)),
        Command::Ps(arguments) => ps::ps(arguments, ui),
        Command::Inspect(arguments) => in_runtime(inspect::inspect(arguments, &cli.global)),
        Command::Port(arguments) => port::port(arguments, &cli.global),
        Command::Stats(arguments) => in_runtime(stats::stats(arguments, &cli.global)),
        Command::Stop(arguments) => in_runtime(signal::stop(arguments)),
        Command::Restart(arguments) => in_runtime(signal::restart(arguments)),
        Command::Events(arguments) => in_runtime(events::events(arguments, &cli.global)),
        Command::Kill(arguments) => in_runtime(signal::kill(arguments)),
        Command::Top(arguments) => in_runtime(top::top(arguments, cli.global.json)),
        Command::Pause(arguments) => in_runtime(running::pause(arguments)),
        Command::Resume { sandbox } => in_runtime(running::resume(sandbox)),
        Command::Network(arguments) => in_runtime(network::change(arguments)),
        Command::Logs(arguments) => in_runtime(logs::logs(arguments)),
        Command::Wait(arguments) => in_runtime(wait::wait(arguments)),
        Command::Attach(arguments) => in_runtime(attach::attach(arguments, ui)),
        Command::Limit(arguments) => in_runtime(rate_limits::change(arguments)),
        Command::Timeout(arguments) => in_runtime(timeout::change(arguments)),
        Command::Freeze(arguments) => in_runtime(running::freeze(arguments, cli.global.json)),
        Command::Thaw(arguments) => in_runtime(thaw::thaw(arguments, cli.global.keeper, ui)),
        Command::Fork(arguments) => in_runtime(thaw::fork(arguments, ui)),
        Command::Rm { sandboxes, .. } => in_runtime(running::remove(sandboxes)),
        Command::Image(command) => in_runtime(image::image(command, ui, cli.global.json)),
        Command::Images(arguments) => image::list(arguments, ui),
        Command::Pull(arguments) => in_runtime(image::pull(arguments, ui, cli.global.json)),
        Command::Rmi(arguments) => image::remove(arguments, cli.global.json),
        Command::Snapshot(command) => in_runtime(snapshot::snapshot(command, ui, cli.global.json)),
        Command::Template(command) => in_runtime(template::template(command, ui, cli.global.json)),
        Command::Install { arguments, print } => install::install(arguments, *print, ui, cli.global.json),
        Command::Uninstall(arguments) => install::uninstall(arguments, ui, cli.global.json),
        Command::Debug(command) => debug::debug(command),
        Command::Doctor => Ok(doctor::doctor(ui, cli.global.json)),
        Command::Completion(arguments) => Ok(completion::print_script(arguments)),
        Command::Complete { words } => Ok(completion::print_candidates(words)),
        Command::Man(arguments) => man::write_pages(arguments),
        Command::Info(arguments) => in_runtime(about::info(arguments, &cli.global)),
        Command::Version(arguments) => in_runtime(about::version(arguments, &cli.global)),
    }
}

/// Prints a line of a command's own output. A closed stdout is no error.
fn print(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

#[cfg(test)]
#[path = "cli_test.rs"]
mod tests;

#[cfg(test)]
#[path = "from_docker_test.rs"]
mod from_docker;
