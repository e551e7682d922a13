//! `thaw inspect`: all that is known of sandboxes and images, as JSON.

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::RunDirectory;

use super::format::Format;
use super::image::{self, described};
use super::running::Owner;
use super::{Global, print, ps};

#[derive(Debug, Args)]
#[command(after_help = "\
Prints a JSON array. Its fields are those of Thaw's API (docs/api.md), not docker's. A name is first looked up among running
sandboxes, then among ended ones, then among images.

Examples:
  thaw inspect web
  thaw inspect --format '{{.state}} {{.network.address}}' web
  thaw inspect --type image python:3")]
pub struct InspectArguments {
    /// `json`: an object per line; or a Go template with {{.Field}}, {{.Field.Field}} and {{json .Field}}
    #[arg(short, long, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Look only among these
    #[arg(long = "type", value_name = "KIND", value_enum)]
    pub kind: Option<Kind>,
    /// Sandboxes (ids, names, or beginnings of ids) or images (references or digests)
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

/// What is inspected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    #[value(alias = "container")]
    Sandbox,
    Image,
}

pub(super) async fn inspect(arguments: &InspectArguments, global: &Global) -> Result<u8, Error> {
    let mut found = Vec::new();
    for name in &arguments.names {
        found.push(look_up(name, arguments.kind).await?);
    }
    let array = || print(&array(&found, global.json));
    match &arguments.format {
        Some(format) => format.print(&found, array)?,
        None => array(),
    }
    Ok(0)
}

fn array(found: &[Value], compact: bool) -> String {
    match compact {
        true => json!(found).to_string(),
        false => format!("{:#}", json!(found)),
    }
}

async fn look_up(name: &str, kind: Option<Kind>) -> Result<Value, Error> {
    let not_found = match kind {
        Some(Kind::Image) => None,
        _ => match sandbox(name).await {
            Err(e) if e.kind == ErrorKind::SandboxNotFound => Some(e),
            found => return found,
        },
    };
    match (not_found, kind) {
        (Some(e), Some(_)) => Err(e),
        (Some(e), None) => image(name).map_err(|other| match other.kind {
            ErrorKind::ImageNotStored | ErrorKind::BadReference => {
                let what = format!("no image in the store is {name}, and {}", e.what);
                Error::new(ErrorKind::SandboxNotFound, what)
                    .remedy("`thaw ps -a` lists sandboxes, `thaw images` images")
            }
            _ => other,
        }),
        (None, _) => image(name),
    }
}

/// A sandbox: as its owner describes it, or as its record does if the owner does not answer.
async fn sandbox(name: &str) -> Result<Value, Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let failure = match Owner::find(name) {
        Ok(owner) => match owner.client.get(&owner.id).await {
            Ok(sandbox) => return Ok(json!(sandbox)),
            Err(e) => e,
        },
        Err(e) => e,
    };
    if failure.kind == ErrorKind::DaemonUnreachable {
        return Ok(ps::describe(&run, &run.find(name)?));
    }
    match run.find_ended(name)? {
        Some(ended) => Ok(json!(ended)),
        None => Err(failure),
    }
}

fn image(name: &str) -> Result<Value, Error> {
    let images = image::open()?;
    described(&images, &images.named(name)?)
}
