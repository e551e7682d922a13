//! `thaw snapshot push` and `pull`: snapshots travel through a registry.

use clap::Args;
use serde_json::json;
use thaw_protocol::api::{PullSnapshot, PushSnapshot, PushedSnapshot};
use thaw_sandbox::Tenants;
use thaw_sandbox::error::Error;
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::image::destination;
use thaw_sandbox::snapshot::store::Viewer;

use super::super::container_arguments::labels_of;
use super::super::interrupt::interrupted;
use super::super::{print, values};
use super::Stored;
use crate::ui::Ui;

#[derive(Debug, Args)]
pub struct PushArguments {
    /// Its id, its name, or the beginning of its id
    pub snapshot: String,
    /// Where to push it: a registry's repository with a tag, or oci:DIR[:TAG]
    pub reference: String,
    /// Use HTTP without TLS for the registry
    #[arg(long)]
    pub plain_http: bool,
}

#[derive(Debug, Args)]
pub struct PullArguments {
    /// What it was pushed to, or the same with @sha256:DIGEST
    pub reference: String,
    /// A name for the stored snapshot
    #[arg(long, value_name = "NAME", value_parser = values::parse_name)]
    pub name: Option<String>,
    /// A label of the stored snapshot
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub label: Vec<String>,
    /// Use HTTP without TLS for the registry, and for those of the images
    #[arg(long)]
    pub plain_http: bool,
}

/// `thaw snapshot push`.
pub(super) async fn push(
    stored: &Stored,
    arguments: &PushArguments,
    ui: &Ui,
    json: bool,
) -> Result<u8, Error> {
    let request = PushSnapshot {
        reference: absolute(&arguments.reference)?,
        plain_http: arguments.plain_http,
    };
    let wanted = &arguments.snapshot;
    let work = async {
        match stored {
            Stored::Daemon(client) => client.push_snapshot(wanted, &request).await,
            Stored::ThisProcess(tenants) => {
                Tenants::push_snapshot(tenants, wanted, &Viewer::node(), &request, ui.pull()).await
            }
        }
    };
    tokio::select! {
        done = work => show(&done?, ui, json),
        status = interrupted() => return Ok(status),
    }
    Ok(0)
}

/// `thaw snapshot pull`.
pub(super) async fn pull(
    stored: &Stored,
    arguments: &PullArguments,
    ui: &Ui,
    json: bool,
) -> Result<u8, Error> {
    let request = PullSnapshot {
        reference: absolute(&arguments.reference)?,
        name: arguments.name.clone(),
        labels: labels_of(&arguments.label)?,
        plain_http: arguments.plain_http,
    };
    let work = async {
        match stored {
            Stored::Daemon(client) => Ok(client.pull_snapshot(&request).await?.id),
            Stored::ThisProcess(tenants) => {
                let pulled = Tenants::pull_snapshot(tenants, &Viewer::node(), &request, ui.pull()).await;
                Ok(pulled?.1.object.id.clone())
            }
        }
    };
    let id: Result<String, Error> = tokio::select! {
        done = work => done,
        status = interrupted() => return Ok(status),
    };
    let id = id?;
    print(&match json {
        true => json!({"snapshot": id}).to_string(),
        false => id,
    });
    Ok(0)
}

/// A reference that means the same to thawd, whose working directory is another.
fn absolute(reference: &str) -> Result<String, Error> {
    Ok(destination::parse(reference)?.to_string())
}

fn show(pushed: &PushedSnapshot, ui: &Ui, json: bool) {
    if json {
        return print(&json!(pushed).to_string());
    }
    let (sent, present) = (HumanBytes(pushed.sent_bytes), HumanBytes(pushed.present_bytes));
    let told = format!("{}: {sent} sent, {present} there already", pushed.reference);
    ui.note("pushed", &told);
    print(&pushed.digest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_of_a_directory_is_made_absolute() {
        assert!(absolute("oci:web:1").unwrap().starts_with("oci:/"));
        let of_registry = "registry.example/web:1";
        assert_eq!(absolute(of_registry).unwrap(), of_registry);
        assert!(absolute("Not A Reference").is_err());
    }
}
