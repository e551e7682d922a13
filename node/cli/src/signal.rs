//! `thaw kill` and `thaw stop`: signals to the process of a container. Their sender is the sandbox's owner.

use std::time::Duration;

use clap::Args;
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::Running;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{Record, RunDirectory, vsock_socket};

use super::running::Owner;
use super::wait::exit_status;
use super::{image, print};

/// How long a `thaw run` or the process of `-d` has to remove a sandbox whose container ended.
const REMOVAL: Duration = Duration::from_secs(30);

const KILL: u8 = libc::SIGKILL as u8;
const TERMINATE: u8 = libc::SIGTERM as u8;

/// The signals from 1, by name.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];
/// SIGRTMIN of Linux's C libraries, and SIGRTMAX.
const REAL_TIME: (u8, u8) = (34, 64);

#[derive(Debug, Args)]
#[command(after_help = "\
The signal goes to the container's first process. As process 1, it ignores signals for which it has no handler, except KILL.
Once it ends, the sandbox ends: see `thaw stop`.

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
Sends the image's stop signal, SIGTERM if it names none, and after the time SIGKILL. Then the sandbox ends. Unlike docker's
containers it cannot be started again. What `-d` started stays in `thaw ps -a` as exited, with its output, until `thaw rm`.

Example:
  thaw stop -t 30 db")]
pub struct StopArguments {
    /// Seconds until SIGKILL; -1: never
    #[arg(short, long, visible_alias = "time", value_name = "SECONDS", default_value_t = 10, allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1..=86_400))]
    pub timeout: i32,
    /// Send this signal instead of the image's
    #[arg(short, long, value_name = "SIGNAL", value_parser = parse_signal)]
    pub signal: Option<u8>,
    /// The sandboxes: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

/// Parses a signal's name or number.
fn parse_signal(text: &str) -> Result<u8, String> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let (least, most) = REAL_TIME;
    let numbered = |offset: Option<&str>| offset?.parse::<u8>().ok();
    let number = match name {
        "RTMIN" => Some(least),
        "RTMAX" => Some(most),
        "IOT" => Some(libc::SIGABRT as u8),
        "POLL" => Some(libc::SIGIO as u8),
        _ => numbered(name.strip_prefix("RTMIN+"))
            .and_then(|n| least.checked_add(n))
            .or_else(|| {
                numbered(name.strip_prefix("RTMAX-"))
                    .and_then(|n| most.checked_sub(n))
                    .filter(|n| *n >= least)
            })
            .or_else(|| NAMES.iter().position(|known| *known == name).map(|n| n as u8 + 1))
            .or_else(|| name.parse().ok()),
    };
    let known = number.filter(|n| (1..=most).contains(n));
    known.ok_or_else(|| "a signal such as TERM, SIGHUP, RTMIN+3 or 15".to_owned())
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
    let limit = u64::try_from(arguments.timeout).ok().map(Duration::from_secs);
    for wanted in &arguments.sandboxes {
        stop_one(wanted, arguments.signal, limit).await?;
        print(wanted);
    }
    Ok(0)
}

async fn stop_one(wanted: &str, signal: Option<u8>, limit: Option<Duration>) -> Result<(), Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let record = run.find(wanted)?;
    let owner = Owner::find(wanted)?;
    let directory = run.directory(&record.id);
    let running = Running::read(&directory)?;
    let agent = agent_client::connect(&vsock_socket(&directory), READY_LIMIT).await?;
    let signal = signal.unwrap_or_else(|| stop_signal(&record));
    owner.client.signal(&owner.id, signal).await?;
    let ended = exit_status(&agent, &running);
    tokio::pin!(ended);
    let in_time = match limit {
        Some(limit) => tokio::time::timeout(limit, &mut ended).await.ok(),
        None => Some((&mut ended).await),
    };
    let status = match in_time {
        Some(status) => status,
        None => {
            match owner.client.signal(&owner.id, KILL).await {
                // It may have ended just now.
                Err(e) if e.kind != ErrorKind::SandboxNotFound && e.kind != ErrorKind::AgentFailed => {
                    return Err(e);
                }
                _ => ended.await,
            }
        }
    };
    match status {
        // Its owner may remove the machine before it reports the end.
        Err(e) if e.kind != ErrorKind::GuestEnded => Err(e),
        _ => removed(run, &record).await,
    }
}

/// Waits until the owner has removed a sandbox that ends with its container. One that the API created may stay, as exited.
async fn removed(run: RunDirectory, record: &Record) -> Result<(), Error> {
    let ends = record.tethered || record.client.is_some() || record.terms.delete_on_exit;
    if !ends {
        return Ok(());
    }
    let id = record.id.clone();
    let removed = blocking(move || run.wait_for_owner(&id));
    tokio::time::timeout(REMOVAL, removed).await.unwrap_or(Ok(()))
}

/// The signal that the image names to stop its container, or SIGTERM.
fn stop_signal(record: &Record) -> u8 {
    let of_image = || -> Option<u8> {
        let images = image::open().ok()?;
        let image = images.by_digest(record.image_digest.as_deref()?).ok()??;
        let named = image.config.config().as_ref()?.stop_signal().clone()?;
        parse_signal(&named).ok()
    };
    of_image().unwrap_or(TERMINATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_names_or_numbers() {
        for (text, number) in [
            ("TERM", 15),
            ("SIGKILL", 9),
            ("sighup", 1),
            ("usr1", 10),
            ("SYS", 31),
            ("9", 9),
            ("64", 64),
            ("SIGRTMIN+3", 37),
            ("RTMAX-1", 63),
            ("RTMIN", 34),
        ] {
            assert_eq!(parse_signal(text), Ok(number), "{text}");
        }
        for wrong in [
            "", "0", "65", "SIG", "NOPE", "-1", "RTMIN+31", "RTMAX-64", "RTMIN+x",
        ] {
            assert!(parse_signal(wrong).is_err(), "{wrong}");
        }
    }
}
