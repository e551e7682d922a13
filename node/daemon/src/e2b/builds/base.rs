//! What a build begins with: a sandbox of an image, or one thawed from a snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;
use thaw_protocol::api::{CreateSandbox, CreatedSandbox, ThawSandbox};
use thaw_sandbox::state::Behalf;
use thaw_sandbox::tenant::Tenant;

use super::super::context::Context;
use super::super::template::{BUILD_LABEL, Source};
use super::record::Shape;
use crate::api::check;
use crate::api::daemon::Daemon;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Wanted;

/// What a build begins with.
#[derive(Clone, Debug)]
pub struct Base {
    pub source: Source,
    /// Of the template that it is, if it is one.
    pub context: Context,
}

/// The sandbox of a build.
#[derive(Debug)]
pub struct Begun {
    pub id: String,
    pub machine: Shape,
    /// What it was made from: the digest of an image, or the id of a snapshot. `None`: not known.
    pub identity: Option<String>,
}

impl Base {
    /// Makes the sandbox of a build. It is deleted after so many seconds, whatever becomes of thawd meanwhile.
    ///
    /// # Errors
    /// Those of a creation.
    pub async fn begin(
        &self,
        daemon: &Arc<Daemon>,
        tenant: Option<Tenant>,
        build: &str,
        timeout_s: u32,
    ) -> Result<Begun, Refusal> {
        let labels: BTreeMap<_, _> = [(BUILD_LABEL.to_owned(), build.to_owned())].into();
        let behalf = Behalf {
            tenant,
            ..Behalf::default()
        };
        match &self.source {
            Source::Image(request) => {
                let request = CreateSandbox {
                    labels,
                    timeout_s: Some(timeout_s),
                    ..CreateSandbox::clone(request)
                };
                check::create(&request)?;
                let disk_mib = Some(request.disk_mib);
                let created = daemon.create(request, behalf).await?;
                let digest = daemon.read_record(&created.sandbox.id, |record| record.image_digest.clone());
                Ok(Begun {
                    identity: digest.flatten(),
                    ..begun(created, disk_mib)
                })
            }
            Source::Snapshot(snapshot, viewer) => {
                let thaw = json!({"snapshot": snapshot, "timeout_s": timeout_s, "labels": labels});
                let broken = |e: serde_json::Error| Refusal::new(ApiCode::Broken, e);
                let thaw: ThawSandbox = serde_json::from_value(thaw).map_err(broken)?;
                check::thaw(&thaw)?;
                let found = daemon
                    .factory()?
                    .snapshot(snapshot.clone(), viewer.clone())
                    .await?;
                let created = daemon.thaw(thaw, behalf, viewer.clone()).await?;
                Ok(Begun {
                    identity: Some(found.id),
                    ..begun(created, None)
                })
            }
        }
    }
}

fn begun(created: CreatedSandbox, disk_mib: Option<u32>) -> Begun {
    let sandbox = created.sandbox;
    Begun {
        id: sandbox.id,
        machine: Shape {
            cpus: Some(sandbox.cpus),
            memory_mib: Some(sandbox.memory_mib),
            disk_mib,
        },
        identity: None,
    }
}

/// Deletes the sandbox of a build. One that is gone is no error.
pub async fn end(daemon: &Daemon, id: &str) {
    if let Err(e) = daemon.delete(&Wanted::on_node(id)).await {
        tracing::debug!(sandbox = id, "the sandbox of a build was gone: {e}");
    }
}
