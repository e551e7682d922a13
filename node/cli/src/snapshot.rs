//! `thaw snapshot`: the snapshots that the node stores, through thawd if it runs, otherwise in this process.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Subcommand;
use serde_json::json;
use thaw_daemon::api::client::Client;
use thaw_daemon::api::factory::StoredSnapshots;
use thaw_protocol::api::{ChangeSnapshot, Hooks, Snapshot, SnapshotManifest, VerifiedSnapshot};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::{Node, Tenants};

use super::container_arguments::labels_of;
use super::running::absolute;
use super::{print, values};
use crate::ps::age;
use crate::table::{Table, printable};
use crate::ui::{Mode, Ui};

mod transfer;

use transfer::{PullArguments, PushArguments};

/// Stored snapshots: frozen sandboxes, from which others are thawed.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// List the stored snapshots; with --quiet, only their ids
    #[command(after_help = "Example:\n  thaw snapshot ls\n  thaw snapshot rm $(thaw snapshot ls -q)")]
    Ls,
    /// Show what a snapshot is of, and what it needs
    #[command(after_help = "Example:\n  thaw snapshot inspect web-ready")]
    Inspect {
        /// Its id, its name, or the beginning of its id
        snapshot: String,
    },
    /// Remove snapshots on which no other lies, and from which no sandbox was thawed
    #[command(after_help = "Example:\n  thaw snapshot rm web-ready")]
    Rm {
        /// Their ids, names, or beginnings of ids
        #[arg(required = true, value_name = "SNAPSHOT")]
        snapshots: Vec<String>,
        /// Also those from which a sandbox was thawed. It runs on, but cannot be frozen as a delta
        #[arg(short, long)]
        force: bool,
    },
    /// Change the name and the labels of a snapshot
    #[command(
        after_help = "Examples:\n  thaw snapshot tag 46a542 --name web-ready --label tier=front\n  thaw snapshot tag web-ready --no-name --no-label tier"
    )]
    Tag {
        /// Its id, its name, or the beginning of its id
        snapshot: String,
        /// Its new name
        #[arg(long, value_name = "NAME", value_parser = values::parse_name)]
        name: Option<String>,
        /// Remove its name
        #[arg(long, conflicts_with = "name")]
        no_name: bool,
        /// Set a label
        #[arg(long, value_name = "NAME[=VALUE]")]
        label: Vec<String>,
        /// Remove a label
        #[arg(long, value_name = "NAME")]
        no_label: Vec<String>,
    },
    /// Push a snapshot to a registry; what the registry has is not sent again
    #[command(
        after_help = "Prints the digest of what was pushed. Whoever can pull it has all that was in the sandbox's memory: docs/snapshots.md.\n\nExample:\n  thaw snapshot push web-ready registry.example/web:ready"
    )]
    Push(PushArguments),
    /// Pull a snapshot from a registry, with the images that it needs; print its id
    #[command(
        after_help = "Fails before it fetches much if this host lacks a feature of the processor that the snapshot was frozen on.\n\nExamples:\n  thaw snapshot pull registry.example/web:ready --name web-ready\n  thaw thaw -d $(thaw snapshot pull registry.example/web:ready)"
    )]
    Pull(PullArguments),
    /// Compare every byte of snapshots with the hashes in their manifests
    #[command(after_help = "Exits with 96 if one is damaged.\n\nExample:\n  thaw snapshot verify web-ready")]
    Verify {
        /// Their ids, names, or beginnings of ids
        #[arg(required = true, value_name = "SNAPSHOT")]
        snapshots: Vec<String>,
    },
}

/// The stored snapshots of this node.
enum Stored {
    Daemon(Client),
    ThisProcess(Box<Tenants>),
}

impl Stored {
    fn open() -> Result<Stored, Error> {
        let paths = Paths::from_env();
        match Client::connect(&paths.daemon_socket()) {
            Some(client) => Ok(Stored::Daemon(client)),
            None => Ok(Stored::ThisProcess(Box::new(Tenants::open(Node::open(paths)?)))),
        }
    }

    async fn list(&self) -> Result<Vec<Snapshot>, Error> {
        match self {
            Stored::Daemon(client) => client.snapshots().await,
            Stored::ThisProcess(tenants) => tenants.snapshots(Viewer::node()).await,
        }
    }

    async fn get(&self, wanted: &str) -> Result<Snapshot, Error> {
        match self {
            Stored::Daemon(client) => client.snapshot(wanted).await,
            Stored::ThisProcess(tenants) => tenants.snapshot(wanted.to_owned(), Viewer::node()).await,
        }
    }

    async fn change(&self, wanted: &str, change: ChangeSnapshot) -> Result<Snapshot, Error> {
        match self {
            Stored::Daemon(client) => client.change_snapshot(wanted, &change).await,
            Stored::ThisProcess(tenants) => {
                tenants
                    .change_snapshot(wanted.to_owned(), Viewer::node(), change)
                    .await
            }
        }
    }

    async fn verify(&self, wanted: &str) -> Result<VerifiedSnapshot, Error> {
        match self {
            Stored::Daemon(client) => client.verify_snapshot(wanted).await,
            Stored::ThisProcess(tenants) => tenants.verify_snapshot(wanted.to_owned(), Viewer::node()).await,
        }
    }

    async fn remove(&self, wanted: &str, force: bool) -> Result<(), Error> {
        match self {
            Stored::Daemon(client) => client.remove_snapshot(wanted, force).await,
            Stored::ThisProcess(tenants) => {
                tenants
                    .remove_snapshot(wanted.to_owned(), Viewer::node(), force)
                    .await
            }
        }
    }
}

pub(super) async fn snapshot(command: &SnapshotCommand, ui: &Ui, json: bool) -> Result<u8, Error> {
    let stored = Stored::open()?;
    match command {
        SnapshotCommand::Ls => list(&stored.list().await?, ui, json),
        SnapshotCommand::Inspect { snapshot } => inspect(&stored.get(snapshot).await?, json),
        SnapshotCommand::Rm { snapshots, force } => {
            for wanted in snapshots {
                let id = stored.get(wanted).await?.id;
                stored.remove(&id, *force).await?;
                print(&match json {
                    true => json!({"removed": id}).to_string(),
                    false => id,
                });
            }
        }
        SnapshotCommand::Tag {
            snapshot,
            name,
            no_name,
            label,
            no_label,
        } => {
            let set = labels_of(label)?
                .into_iter()
                .map(|(key, value)| (key, Some(value)));
            let removed = no_label.iter().map(|key| (key.clone(), None));
            let change = ChangeSnapshot {
                name: match (name, no_name) {
                    (Some(name), _) => Some(Some(name.clone())),
                    (None, true) => Some(None),
                    (None, false) => None,
                },
                labels: Some(Some(set.chain(removed).collect())),
            };
            let changed = stored.change(snapshot, change).await?;
            print(&match json {
                true => json!(changed).to_string(),
                false => changed.id,
            });
        }
        SnapshotCommand::Push(arguments) => return transfer::push(&stored, arguments, ui, json).await,
        SnapshotCommand::Pull(arguments) => return transfer::pull(&stored, arguments, ui, json).await,
        SnapshotCommand::Verify { snapshots } => {
            for wanted in snapshots {
                verified(&stored.verify(wanted).await?, json)?;
            }
        }
    }
    Ok(0)
}

fn verified(found: &VerifiedSnapshot, json: bool) -> Result<(), Error> {
    if json {
        print(&json!(found).to_string());
    }
    if !found.damaged.is_empty() {
        let what = format!("snapshot {} is damaged: {}", found.id, found.damaged.join(", "));
        let error = Error::new(ErrorKind::SnapshotDamaged, what);
        return Err(error.remedy("thaw another copy of it; without one, what was frozen there is lost"));
    }
    if !json {
        print(&format!("{} is whole", found.id));
    }
    Ok(())
}

fn list(all: &[Snapshot], ui: &Ui, json: bool) {
    match (json, ui.mode()) {
        (true, _) => return print(&json!(all).to_string()),
        (false, Mode::Quiet) => return all.iter().for_each(|snapshot| print(&snapshot.id)),
        _ => {}
    }
    let mut table = Table::new(&["ID", "NAME", "IMAGE", "CREATED", "LAST USED", "DISK", "STATE"]);
    for snapshot in all {
        table.row([
            snapshot.id.clone(),
            printable(snapshot.name.as_deref().unwrap_or_default()),
            image(snapshot),
            ago(snapshot.created),
            ago(snapshot.last_used),
            HumanBytes(snapshot.disk_bytes).to_string(),
            state(snapshot),
        ]);
    }
    table.print();
}

/// How long ago a moment was, in seconds since the Unix epoch.
fn ago(moment: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    age(now.map_or(0, |now| now.as_secs().saturating_sub(moment)))
}

fn image(snapshot: &Snapshot) -> String {
    let manifest = snapshot.manifest.as_ref();
    printable(manifest.map_or("-", |manifest| manifest.image.as_str()))
}

fn state(snapshot: &Snapshot) -> String {
    match (&snapshot.error, &snapshot.manifest) {
        (Some(error), _) => printable(error),
        (None, Some(SnapshotManifest { base: Some(base), .. })) => {
            let on = base.snapshot.as_deref().unwrap_or("a template");
            format!("delta on {on}")
        }
        (None, _) => "whole".into(),
    }
}

fn inspect(snapshot: &Snapshot, json: bool) {
    if json {
        return print(&json!(snapshot).to_string());
    }
    let or_none = |text: &Option<String>| printable(text.as_deref().unwrap_or("-"));
    let labels = snapshot
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"));
    let mut lines = vec![
        ("id", snapshot.id.clone()),
        ("name", or_none(&snapshot.name)),
        ("labels", labels.collect::<Vec<_>>().join(" ")),
        ("tenant", or_none(&snapshot.tenant)),
        ("sandbox", snapshot.sandbox.clone()),
        ("thawed from", or_none(&snapshot.parent)),
        ("created", ago(snapshot.created)),
        ("last used", ago(snapshot.last_used)),
        ("on disk", HumanBytes(snapshot.disk_bytes).to_string()),
        ("state", state(snapshot)),
    ];
    if let Some(manifest) = &snapshot.manifest {
        lines.extend([
            ("made by", format!("thaw {}", manifest.thaw)),
            ("image", printable(&manifest.image)),
            ("command", printable(&manifest.command.join(" "))),
            ("hooks", hooks(&manifest.hooks)),
            ("images", manifest.images.join(" ")),
            ("cpus", manifest.cpus.to_string()),
            ("memory", format!("{} MiB", manifest.memory_mib)),
            ("memory data", HumanBytes(manifest.memory_data_bytes).to_string()),
            ("disk data", HumanBytes(manifest.disk_data_bytes).to_string()),
            ("baseline", manifest.baseline.clone()),
            ("made on", printable(&manifest.processor)),
            ("thaw-vmm", or_none(&manifest.vmm)),
            ("kernel", or_none(&manifest.kernel)),
            ("guest image", or_none(&manifest.guest_image)),
            ("manifest", manifest.hash.clone()),
        ]);
    }
    for (name, value) in lines {
        print(format!("{name:<13} {value}").trim_end());
    }
}

fn hooks(hooks: &Hooks) -> String {
    let named = [
        hooks.before_freeze.as_ref().map(|_| "before_freeze"),
        hooks.after_thaw.as_ref().map(|_| "after_thaw"),
    ];
    match named.into_iter().flatten().collect::<Vec<_>>().as_slice() {
        [] => "-".into(),
        named => named.join(" "),
    }
}

/// What `thaw thaw` names: without a slash, a stored snapshot; with one, a directory, or a reference of a registry if there is no such
/// directory and its first component is a host's name.
pub(super) fn reference(named: &Path) -> Result<(Option<PathBuf>, Option<String>), Error> {
    let stored = |text: &&str| !text.contains('/') || is_of_registry(text) && !named.is_dir();
    match named.to_str().filter(stored) {
        Some(text) => Ok((None, Some(text.to_owned()))),
        None => Ok((Some(absolute(named)?), None)),
    }
}

/// Whether the first component of a reference is a registry, as image references have it: with a dot or a port, or `localhost`.
fn is_of_registry(text: &str) -> bool {
    let host = text.split('/').next().unwrap_or_default();
    let is_relative = matches!(host, "." | "..");
    !is_relative && (host == "localhost" || host.contains(['.', ':'])) && !host.starts_with("oci:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_with_a_slash_is_a_directory_or_of_a_registry() {
        for directory in ["./web", "../web", "/web", "a/b", "web/"] {
            let (found, stored) = reference(Path::new(directory)).unwrap();
            assert!(found.unwrap().is_absolute() && stored.is_none(), "{directory}");
        }
        for stored in [
            "web",
            "registry.example/web:ready",
            "localhost/web",
            "10.0.0.1:5000/a/web",
        ] {
            let found = reference(Path::new(stored)).unwrap();
            assert_eq!(found, (None, Some(stored.into())));
        }
    }

    #[test]
    fn state_names_damage_before_a_base() {
        let mut snapshot = Snapshot {
            manifest: Some(SnapshotManifest::default()),
            ..Snapshot::default()
        };
        assert_eq!(state(&snapshot), "whole");
        let base = thaw_protocol::api::SnapshotBase {
            hash: "00".into(),
            snapshot: Some("0123456789ab".into()),
        };
        snapshot.manifest.as_mut().unwrap().base = Some(base);
        assert_eq!(state(&snapshot), "delta on 0123456789ab");
        snapshot.error = Some("memory\nis wrong".into());
        assert_eq!(state(&snapshot), "memory?is wrong");
    }

    #[test]
    fn damaged_snapshot_ends_with_its_error() {
        let found = |damaged: &[&str]| VerifiedSnapshot {
            id: "0123456789ab".into(),
            damaged: damaged.iter().map(|it| (*it).to_owned()).collect(),
        };
        verified(&found(&[]), false).unwrap();
        let error = verified(&found(&["state", "memory"]), true).unwrap_err();
        assert_eq!(error.kind, ErrorKind::SnapshotDamaged);
        assert!(error.what.contains("state, memory"), "{error}");
    }
}
