//! Templates: what a sandbox is made from, by the name in a request. The names in the configuration come first; then the stored snapshots
//! of the caller's tenant, by id or name.

use std::collections::BTreeMap;

use serde_json::json;
use thaw_protocol::api::{CreateSandbox, DEFAULT_DISK_MIB, OnExit, Snapshot, StartContainer};
use thaw_sandbox::config::e2b::{E2bConfig, E2bTemplate};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::snapshot::store::Viewer;

use super::failure::Failure;
use crate::api::check;
use crate::api::daemon::Daemon;

/// CPUs of a sandbox whose template names no number, as in E2B's own templates.
const CPUS: u8 = 2;
/// Its memory, MiB.
const MEMORY_MIB: u32 = 512;
/// What its container runs. E2B's sandboxes wait for commands likewise.
const COMMAND: [&str; 2] = ["sleep", "infinity"];
/// Longest name, bytes.
pub const MAX_NAME: usize = 128;

/// The label of the sandbox of a build, and of the snapshot that it becomes; its value is the id of the build.
pub const BUILD_LABEL: &str = "e2b.thaw/build";

/// What a sandbox is made from.
#[derive(Clone, Debug)]
pub enum Source {
    /// An image.
    Image(Box<CreateSandbox>),
    /// A stored snapshot, by id or name, and who can see it.
    Snapshot(String, Viewer),
}

/// The templates of the configuration, by name.
#[derive(Clone, Debug, Default)]
pub struct Templates(BTreeMap<String, Source>);

impl Templates {
    /// Reads the configuration.
    ///
    /// # Errors
    /// `config-invalid`: a template is incomplete, or no sandbox can be made from it.
    pub fn read(config: &E2bConfig) -> Result<Templates, Error> {
        let read = config.templates.iter().map(|(name, template)| {
            let invalid = |why: String| {
                let what = format!("[e2b.templates.{name}]: {why}");
                Error::new(ErrorKind::ConfigInvalid, what)
            };
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
            if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_plain) {
                return Err(invalid(format!(
                    "a name has 1 to {MAX_NAME} of A-Z a-z 0-9 - _ . / :"
                )));
            }
            Ok((name.clone(), source(template).map_err(invalid)?))
        });
        Ok(Templates(read.collect::<Result<_, _>>()?))
    }

    /// The template of the configuration with this name.
    pub fn get(&self, name: &str) -> Option<&Source> {
        self.0.get(name)
    }

    /// All templates of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Source)> {
        self.0.iter()
    }
}

fn source(template: &E2bTemplate) -> Result<Source, String> {
    match (&template.image, &template.snapshot) {
        (Some(image), None) => of_image(image, template),
        (None, Some(snapshot)) => {
            let of_snapshot = E2bTemplate {
                snapshot: Some(snapshot.clone()),
                ..E2bTemplate::default()
            };
            match *template == of_snapshot {
                true => Ok(Source::Snapshot(snapshot.clone(), Viewer::node())),
                false => Err("a snapshot has its cpus, memory_mib, disk_mib and command already".into()),
            }
        }
        _ => Err("it has either an image or a snapshot".into()),
    }
}

/// A sandbox of an image, whose container waits for commands.
///
/// # Errors
/// No sandbox can be made from it.
pub fn of_image(image: &str, template: &E2bTemplate) -> Result<Source, String> {
    let request = serde_json::from_value(json!({
        "image": image,
        "cpus": template.cpus.unwrap_or(CPUS),
        "memory_mib": template.memory_mib.unwrap_or(MEMORY_MIB),
        "disk_mib": template.disk_mib.unwrap_or(DEFAULT_DISK_MIB),
    }));
    let mut request: CreateSandbox = request.map_err(|e| e.to_string())?;
    let command = template.command.clone();
    let mut container = StartContainer {
        // The image's entry point might not run the command.
        entrypoint: Some(String::new()),
        command: command.unwrap_or_else(|| COMMAND.map(str::to_owned).into()),
        on_exit: OnExit::Delete,
        ..StartContainer::default()
    };
    if container.command.is_empty() {
        return Err("command is a program and its arguments".into());
    }
    // What commands leave running has a parent that reaps it.
    container.settings.init = true;
    request.container = Some(container);
    check::create(&request).map_err(|refusal| refusal.to_string())?;
    Ok(Source::Image(Box::new(request)))
}

/// A stored snapshot of the caller by its whole id or name. Those of templates that callers build are none: they belong to the templates.
///
/// # Errors
/// [`Failure::NotFound`]: there is none.
pub async fn stored(daemon: &Daemon, wanted: &str, viewer: Viewer) -> Result<Snapshot, Failure> {
    let none = || {
        Failure::NotFound(format!(
            "template {wanted:?} was not found: it is neither in the node's configuration, nor built, nor a snapshot"
        ))
    };
    let found = daemon.factory()?.snapshot(wanted.to_owned(), viewer).await;
    match found {
        Ok(found) if found.labels.contains_key(BUILD_LABEL) => Err(none()),
        // Not by the beginning of an id, which might mean another one tomorrow.
        Ok(found) if found.id == wanted || found.name.as_deref() == Some(wanted) => Ok(found),
        Ok(_) => Err(none()),
        Err(e) if e.kind == ErrorKind::SnapshotNotFound => Err(none()),
        Err(e) => Err(e.into()),
    }
}
