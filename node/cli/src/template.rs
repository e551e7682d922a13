//! `thaw template`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Subcommand;
use serde_json::{Value, json};
use thaw_protocol::control::{CpuBaseline, MEMORY_MIB};
use thaw_sandbox::config::Config;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::snapshot::{Hold, Signatures, SigningKey, SnapshotStore};
use thaw_sandbox::state::PausedSandboxes;
use thaw_sandbox::template::command_line::command_line;
use thaw_sandbox::template::{Entry, Progress, Shape, Step, Templates, baseline};
use thaw_sandbox::{BaseUsers, Node};

use super::ByteSize;
use crate::table::Table;
use crate::ui::Ui;

/// Templates: guests that were booted once, from which sandboxes are thawed.
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Boot a guest and freeze it, unless the template exists
    #[command(after_help = "Example:\n  thaw template build --cpus-max 8")]
    Build {
        /// Most vCPUs of a sandbox that is thawed from it, 1 to 16
        #[arg(long, value_name = "N", default_value_t = Shape::default().vcpus, value_parser = clap::value_parser!(u8).range(1..=16))]
        cpus_max: u8,
        /// Least memory of a sandbox that is thawed from it; more is plugged in
        #[arg(short, long, value_name = "SIZE", default_value = "128m")]
        memory: ByteSize,
        /// The features of its CPUs: host, x86-64-v2, x86-64-v3 or x86-64-v4
        #[arg(long, value_name = "LEVEL", default_value = "host", value_parser = parse_baseline)]
        baseline: CpuBaseline,
        /// Sign it with this Ed25519 key: PEM, as `openssl genpkey -algorithm ed25519` writes it
        #[arg(long, value_name = "FILE")]
        sign: Option<PathBuf>,
    },
    /// List the templates of this node
    #[command(after_help = "Example:\n  thaw template ls")]
    Ls,
    /// Show what a template was made of
    #[command(after_help = "Example:\n  thaw template inspect 46a542")]
    Inspect {
        /// Its key, or the beginning of it
        #[arg(value_name = "KEY")]
        template: String,
    },
    /// Compare every byte of templates with the hashes in their manifests
    #[command(after_help = "Example:\n  thaw template verify 46a542")]
    Verify {
        /// Their keys, or the beginnings of them
        #[arg(required = true, value_name = "KEY")]
        templates: Vec<String>,
    },
    /// Remove templates on which no stored delta and no sandbox with released memory lies; sandboxes that were thawed from them go on
    #[command(after_help = "Example:\n  thaw template rm 46a542")]
    Rm {
        /// Their keys, or the beginnings of them
        #[arg(required = true, value_name = "KEY")]
        templates: Vec<String>,
    },
}

fn parse_baseline(text: &str) -> Result<CpuBaseline, String> {
    match text {
        "host" => Ok(CpuBaseline::Host),
        "x86-64-v2" => Ok(CpuBaseline::V2),
        "x86-64-v3" => Ok(CpuBaseline::V3),
        "x86-64-v4" => Ok(CpuBaseline::V4),
        _ => Err("one of host, x86-64-v2, x86-64-v3, x86-64-v4".into()),
    }
}

pub(super) async fn template(command: &TemplateCommand, ui: &Ui, json: bool) -> Result<u8, Error> {
    let paths = Paths::from_env();
    let signatures = Signatures::of(&Config::from_env()?.snapshots);
    let store = Templates::open(&paths, Hold::Files, signatures)?;
    match command {
        TemplateCommand::Build {
            cpus_max,
            memory,
            baseline,
            sign,
        } => {
            let shape = Shape {
                vcpus: *cpus_max,
                memory_mib: memory_mib(*memory)?,
                cpu: *baseline,
            };
            let key = sign.as_deref().map(SigningKey::load).transpose()?;
            let node = Node::open(paths)?;
            let progress = progress(ui);
            let built = tokio::select! {
                built = store.get(&node, shape, key, &progress) => built?,
                status = super::interrupt::interrupted() => return Ok(status),
            };
            super::print(&match json {
                true => json!({"key": built.key.as_str(), "built": built.built, "manifest": built.registered.hash})
                    .to_string(),
                false => built.key.to_string(),
            });
        }
        TemplateCommand::Ls => list(&store.list(&command_line()), json),
        TemplateCommand::Inspect { template } => {
            inspect(store.entry(store.find(template)?, &command_line()), json)?;
        }
        TemplateCommand::Verify { templates } => {
            for wanted in templates {
                let key = store.find(wanted)?;
                let snapshot = store.verify(&key)?;
                super::print(&match json {
                    true => json!({"key": key.as_str(), "verified": true, "manifest": snapshot.hash()})
                        .to_string(),
                    false => format!("{key} is whole"),
                });
            }
        }
        TemplateCommand::Rm { templates } => {
            let users = BaseUsers {
                stored: SnapshotStore::open(&paths.data, store.registry().clone()),
                paused: PausedSandboxes::under(&paths.data),
            };
            for wanted in templates {
                let key = store.find(wanted)?;
                store.remove(&key, &|template| users.find(template))?;
                super::print(&match json {
                    true => json!({"removed": key.as_str()}).to_string(),
                    false => key.to_string(),
                });
            }
        }
    }
    Ok(0)
}

fn memory_mib(memory: ByteSize) -> Result<u32, Error> {
    let mib = memory.mebibytes();
    match MEMORY_MIB.contains(&mib) {
        true => Ok(mib),
        false => {
            let (least, most) = (MEMORY_MIB.start(), MEMORY_MIB.end());
            let what = format!("a template cannot have {mib} MiB of memory: {least} to {most}");
            Err(Error::new(ErrorKind::Runtime, what).remedy("choose another --memory"))
        }
    }
}

/// Reports the progress of a build.
pub(super) fn progress(ui: &Ui) -> Progress {
    let ui = ui.clone();
    Arc::new(move |step| {
        let text = match step {
            Step::Waiting => "another process builds the template: waiting for it",
            Step::Booting => "building the template: a guest boots, once",
            Step::Freezing => "building the template: its agent is ready, it is frozen",
            // The log has the details.
            Step::Again(_) => "building the template: once more",
            Step::Hashing => "building the template: hashing",
            Step::Ready => "building the template: done",
        };
        ui.note("template", text);
    })
}

fn list(entries: &[Entry], json: bool) {
    if json {
        let all: Vec<Value> = entries.iter().map(describe).collect();
        super::print(&json!(all).to_string());
        return;
    }
    let mut table = Table::new(&["KEY", "CPUS", "MEMORY", "BASELINE", "DISK", "STATE"]);
    for entry in entries {
        let (cpus, memory, baseline) = match &entry.manifest {
            Ok(manifest) => {
                let machine = manifest.subject.machine;
                let memory = format!("{} MiB", machine.memory_mib);
                (machine.vcpus.to_string(), memory, baseline(manifest))
            }
            Err(_) => ("-".into(), "-".into(), "-".into()),
        };
        let (key, disk) = (
            entry.key.short().to_owned(),
            HumanBytes(entry.disk_bytes).to_string(),
        );
        table.row([key, cpus, memory, baseline, disk, state(entry)]);
    }
    table.print();
}

fn state(entry: &Entry) -> String {
    match (&entry.damaged, &entry.manifest, &entry.stale) {
        (Some(what), ..) => format!("damaged: {what}"),
        (_, Err(e), _) => format!("unusable: {e}"),
        (_, _, Some(why)) => format!("stale: {why}"),
        (_, _, None) => "current".into(),
    }
}

/// A template as JSON.
fn describe(entry: &Entry) -> Value {
    let mut value = json!(thaw_sandbox::template::describe(entry));
    if let Some(fields) = value.as_object_mut() {
        let subject = entry.manifest.as_ref().ok().map(|manifest| &manifest.subject);
        fields.insert("subject".into(), json!(subject));
    }
    value
}

fn inspect(entry: Entry, json: bool) -> Result<(), Error> {
    if json {
        super::print(&describe(&entry).to_string());
        return Ok(());
    }
    let state = state(&entry);
    let manifest = entry.manifest?;
    let (subject, files) = (&manifest.subject, &manifest.files);
    let hash = |hash: Option<thaw_sandbox::snapshot::Hash>| hash.map_or("-".into(), |h| h.to_string());
    let working_set = match &files.working_set {
        Some(file) => HumanBytes(file.bytes).to_string(),
        None => "none".into(),
    };
    let lines = [
        ("key", entry.key.to_string()),
        ("state", state),
        ("made by", format!("thaw {}", manifest.thaw)),
        ("cpus", format!("up to {}", subject.machine.vcpus)),
        ("memory", format!("{} MiB and more", subject.machine.memory_mib)),
        ("baseline", baseline(&manifest)),
        ("made on", subject.cpu.host.clone()),
        ("kernel", hash(subject.kernel)),
        ("guest image", hash(subject.guest_image)),
        ("thaw-vmm", hash(subject.vmm)),
        ("command line", subject.command_line.clone().unwrap_or_default()),
        ("devices", subject.devices.join(" ")),
        (
            "memory data",
            format!(
                "{} of {}",
                HumanBytes(files.memory.data_bytes),
                HumanBytes(files.memory.bytes)
            ),
        ),
        ("state file", HumanBytes(files.state.bytes).to_string()),
        ("working set", working_set),
        ("on disk", HumanBytes(entry.disk_bytes).to_string()),
    ];
    for (name, value) in lines {
        super::print(&format!("{name:<13} {value}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baselines_are_spelled_as_they_are_shown() {
        for text in ["host", "x86-64-v2", "x86-64-v3", "x86-64-v4"] {
            let parsed = parse_baseline(text).unwrap();
            assert_eq!(json!(parsed), json!(text));
        }
        assert!(parse_baseline("x86-64-v5").is_err());
    }

    #[test]
    fn memory_no_machine_can_have_is_refused() {
        assert_eq!(memory_mib("64m".parse().unwrap()).unwrap(), 64);
        for bad in ["63m", "65g", "0"] {
            assert_eq!(
                memory_mib(bad.parse().unwrap()).unwrap_err().kind,
                ErrorKind::Runtime
            );
        }
    }
}
