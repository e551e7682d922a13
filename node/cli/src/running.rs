//! `thaw pause`, `resume`, `freeze`, `rm`: requests to the owner of the sandbox, thawd or a `thaw run`.

use std::path::{Path, PathBuf};

use clap::Args;
use thaw_daemon::api::client::Client;
use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::{FreezeSandbox, PauseSandbox, PausedMemory, Sandbox};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{PausedSandboxes, Record, RunDirectory, owner_socket};

use super::container_arguments::labels_of;
use super::{print, values};

#[derive(Debug, Args)]
#[command(
    after_help = "Without a directory, the node stores the snapshot and the command prints its id: see thaw snapshot.\n\nExamples:\n  thaw freeze web --name web-ready && thaw thaw -d web-ready\n  thaw freeze web ./web-frozen && thaw thaw -d ./web-frozen"
)]
pub struct FreezeArguments {
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    /// A directory for the snapshot, which must not exist [default: the node stores the snapshot]
    pub directory: Option<PathBuf>,
    /// A name for the stored snapshot
    #[arg(long, value_name = "NAME", value_parser = values::parse_name, conflicts_with = "directory")]
    pub name: Option<String>,
    /// A label of the stored snapshot
    #[arg(long, value_name = "NAME[=VALUE]", conflicts_with = "directory")]
    pub label: Vec<String>,
    /// Write only the memory that changed since it was thawed; the snapshot then needs the one it was thawed from
    #[arg(long)]
    pub delta: bool,
    /// End the sandbox once it is frozen
    #[arg(long)]
    pub stop: bool,
    /// Sign it with this Ed25519 key: PEM, as `openssl genpkey -algorithm ed25519` writes it
    #[arg(long, value_name = "FILE")]
    pub sign: Option<PathBuf>,
    /// Fail unless the sandbox has a hook for what is thawed from it: thaw run --after-thaw
    #[arg(long)]
    pub require_hook: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw pause --release-memory web && thaw resume web")]
pub struct PauseArguments {
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    /// Also write its memory and its disk to the node's disk, and end its machine. Only thawd does this
    #[arg(long)]
    pub release_memory: bool,
}

/// The owner of a running sandbox.
pub(super) struct Owner {
    pub id: String,
    pub client: Client,
    /// Set if the owner is a `thaw run` that owns only this sandbox.
    tethered: Option<RunDirectory>,
}

impl Owner {
    /// Finds the owner of a sandbox by id, name, or prefix of an id.
    pub(super) fn find(wanted: &str) -> Result<Owner, Error> {
        let paths = Paths::from_env();
        let run = RunDirectory::open(&paths.run)?;
        let record = find(&run, &paths, wanted)?;
        let socket = match record.tethered {
            true => owner_socket(&run.directory(&record.id)),
            false => paths.daemon_socket(),
        };
        let client = Client::connect(&socket).ok_or_else(|| {
            let what = format!(
                "the owner of sandbox {} does not answer: {}",
                record.id,
                socket.display()
            );
            Error::new(ErrorKind::DaemonUnreachable, what)
                .remedy("it is being made or ended, or thawd must be started again")
        })?;
        Ok(Owner {
            id: record.id,
            client,
            tethered: record.tethered.then_some(run),
        })
    }

    /// Deletes the sandbox, and waits until it is completely removed, so that its name is free.
    async fn delete(&self) -> Result<(), Error> {
        self.client.delete(&self.id).await?;
        // A `thaw run` answers before it removes the sandbox.
        self.tethered
            .as_ref()
            .map_or(Ok(()), |run| run.wait_for_owner(&self.id))
    }
}

/// The record of a running sandbox, or of one whose memory is released.
fn find(run: &RunDirectory, paths: &Paths, wanted: &str) -> Result<Record, Error> {
    let found = run.find(wanted);
    match found {
        Err(e) if e.kind == ErrorKind::SandboxNotFound => {
            let paused = PausedSandboxes::under(&paths.data).find(wanted);
            paused.map(|paused| paused.record().clone()).ok_or(e)
        }
        found => found,
    }
}

pub(super) async fn pause(arguments: &PauseArguments) -> Result<u8, Error> {
    let owner = Owner::find(&arguments.sandbox)?;
    let memory = match arguments.release_memory {
        true => PausedMemory::Release,
        false => PausedMemory::Keep,
    };
    owner.client.pause_as(&owner.id, &PauseSandbox { memory }).await?;
    Ok(0)
}

pub(super) async fn resume(wanted: &str) -> Result<u8, Error> {
    let owner = Owner::find(wanted)?;
    // Of a sandbox whose CPUs only stopped, the hook has not run again.
    let is_thawed = owner.client.get(&owner.id).await?.memory_released;
    owner.client.resume(&owner.id).await?;
    if is_thawed {
        warn_of_hook(&owner.client.get(&owner.id).await?);
    }
    Ok(0)
}

/// Warns if the hook of a thawed sandbox's container failed, which only its owner has logged.
pub(super) fn warn_of_hook(sandbox: &Sandbox) {
    let Some(hook) = &sandbox.after_thaw else { return };
    if let Some(why) = &hook.failure {
        tracing::warn!("the after_thaw hook of sandbox {} failed: {why}", sandbox.id);
        for line in hook.output.lines() {
            tracing::warn!("  | {line}");
        }
    }
}

pub(super) async fn remove(wanted: &[String]) -> Result<u8, Error> {
    for wanted in wanted {
        print(&remove_one(wanted).await?);
    }
    Ok(0)
}

/// Ends a sandbox through its owner, or directly if it has none, or removes the record of a failed one. Returns its id.
async fn remove_one(wanted: &str) -> Result<String, Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let failure = match Owner::find(wanted) {
        Ok(owner) => match owner.delete().await {
            Ok(()) => return Ok(owner.id),
            Err(e) => e,
        },
        Err(e) => e,
    };
    let has_no_owner = matches!(
        failure.kind,
        ErrorKind::SandboxNotFound | ErrorKind::DaemonUnreachable
    );
    let id = match has_no_owner {
        true => run.find_unowned(wanted),
        false => None,
    };
    // If another process holds its lock, it is not ended here, and the first error says more.
    match id.filter(|id| run.end(id, &Hierarchy::detect())) {
        Some(id) => Ok(id),
        None if failure.kind == ErrorKind::SandboxNotFound => remove_failed(&run, wanted, failure).await,
        None => Err(failure),
    }
}

/// Removes the record of a failed sandbox, and returns its id. Fails with `not_found` if there is none.
async fn remove_failed(run: &RunDirectory, wanted: &str, not_found: Error) -> Result<String, Error> {
    let id = run.find_ended(wanted)?.ok_or(not_found)?.id;
    if let Some(client) = Client::connect(&Paths::from_env().daemon_socket()) {
        match client.delete(&id).await {
            // thawd never owned it.
            Err(e) if e.kind == ErrorKind::SandboxNotFound => {}
            done => done?,
        }
    }
    run.forget_ended(&id);
    Ok(id)
}

pub(super) async fn freeze(arguments: &FreezeArguments, json: bool) -> Result<u8, Error> {
    let owner = Owner::find(&arguments.sandbox)?;
    let directory = arguments.directory.as_deref().map(absolute).transpose()?;
    let request = FreezeSandbox {
        directory: directory.clone(),
        name: arguments.name.clone(),
        labels: labels_of(&arguments.label)?,
        delta: arguments.delta,
        stop: arguments.stop,
        sign: arguments.sign.as_deref().map(absolute).transpose()?,
        require_hook: arguments.require_hook,
    };
    let frozen = owner.client.freeze(&owner.id, &request).await?;
    if arguments.stop {
        owner.delete().await?;
    }
    let snapshot = match (&directory, &frozen.snapshot) {
        (Some(directory), _) => directory.display().to_string(),
        (None, Some(id)) => id.clone(),
        (None, None) => String::new(),
    };
    print(&match json {
        true => serde_json::json!({
            "snapshot": snapshot,
            "memory_bytes": frozen.memory_bytes,
            "paused_ns": frozen.paused_ns,
            "stopped_ns": frozen.stopped_ns,
        })
        .to_string(),
        // For `thaw thaw $(thaw freeze web)`.
        false if directory.is_none() => snapshot,
        false => format!(
            "{snapshot}: {:.1} MiB of memory, paused for {:.1} ms",
            frozen.memory_bytes as f64 / f64::from(1 << 20),
            frozen.paused_ns as f64 / 1e6,
        ),
    });
    Ok(0)
}

/// A path as another process sees it.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|e| Error::system("cannot tell the current directory", &e))
}
