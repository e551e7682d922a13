//! `thaw kill`, `thaw stop` and `thaw restart`. The sandbox's owner sends the signals and starts the program again.

use std::time::Duration;

use clap::Args;
use thaw_protocol::api::{OnExit, StopContainer};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::signals::parse_signal;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{Record, RunDirectory};

use super::print;
use super::running::Owner;

/// How long a `thaw run` or the process of `-d` has to remove a sandbox whose container ended.
const REMOVAL: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
#[command(after_help = "\
The signal goes to the container's first process. As process 1, it ignores signals for which it has no handler, except KILL.
Once it ends, the sandbox ends: see `thaw stop`. KILL and the container's stop signal also end its restart policy.

Example:
  thaw kill -s HUP web")]
pub struct KillArguments {
    /// The signal: a name, with or without SIG, or a number
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL", value_parser = parse_signal)]
    pub signal: u8,
    /// The sandboxes: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Sends the container's stop signal (of --stop-signal, or its image's, or SIGTERM) and after the time SIGKILL. Its restart policy no
longer applies. Then the sandbox ends. Unlike docker's containers it cannot be started again. What `-d` started stays in `thaw ps -a` as exited, with its output, until `thaw rm`.

Example:
  thaw stop -t 30 db")]
pub struct StopArguments {
    #[command(flatten)]
    pub how: HowToStop,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Stops the container's processes as `thaw stop` does, and starts its program again in the same machine: with the same layer, mounts,
ports and settings, and an empty tmpfs. Only what `-d` or the API started can be restarted, and only before it has ended. A
restart policy applies again, and its count begins at 0.

Example:
  thaw restart -t 30 db")]
pub struct RestartArguments {
    #[command(flatten)]
    pub how: HowToStop,
}

/// How containers are stopped, and which.
#[derive(Debug, Args)]
pub struct HowToStop {
    /// Seconds until SIGKILL; -1: never [default: that of --stop-timeout, or 10]
    #[arg(short, long, visible_alias = "time", value_name = "SECONDS", allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1..=86_400))]
    pub timeout: Option<i32>,
    /// Send this signal instead of the container's
    #[arg(short, long, value_name = "SIGNAL", value_parser = parse_signal)]
    pub signal: Option<u8>,
    /// The sandboxes: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

impl HowToStop {
    fn request(&self) -> StopContainer {
        StopContainer {
            signal: self.signal,
            timeout_s: self.timeout,
        }
    }
}

pub(super) async fn kill(arguments: &KillArguments) -> Result<u8, Error> {
    for wanted in &arguments.sandboxes {
        let owner = Owner::find(wanted)?;
        owner.client.signal(&owner.id, arguments.signal).await?;
        print(wanted);
    }
    Ok(0)
}

pub(super) async fn stop(arguments: &StopArguments) -> Result<u8, Error> {
    let how = arguments.how.request();
    for wanted in &arguments.how.sandboxes {
        stop_one(wanted, &how).await?;
        print(wanted);
    }
    Ok(0)
}

pub(super) async fn restart(arguments: &RestartArguments) -> Result<u8, Error> {
    let how = arguments.how.request();
    for wanted in &arguments.how.sandboxes {
        let owner = Owner::find(wanted)?;
        owner.client.restart(&owner.id, &how).await?;
        print(wanted);
    }
    Ok(0)
}

async fn stop_one(wanted: &str, how: &StopContainer) -> Result<(), Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let record = run.find(wanted)?;
    let owner = Owner::find(wanted)?;
    match owner.client.stop(&owner.id, how).await {
        // Its owner may remove the sandbox before it answers.
        Err(e) if e.kind != ErrorKind::GuestEnded && run.find(&record.id).is_ok() => Err(e),
        _ => removed(run, &record).await,
    }
}

/// Waits until the owner has removed a sandbox that ends with its container. One that the API created may stay, as exited.
async fn removed(run: RunDirectory, record: &Record) -> Result<(), Error> {
    let ends = record.tethered || record.client.is_some() || record.terms.on_exit() != OnExit::Keep;
    if !ends {
        return Ok(());
    }
    let id = record.id.clone();
    let removed = blocking(move || run.wait_for_owner(&id));
    tokio::time::timeout(REMOVAL, removed).await.unwrap_or(Ok(()))
}
