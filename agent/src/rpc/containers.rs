//! Creates, starts and removes containers.

use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::agent::agent::{CreateContainerRequest, UpdateContainerRequest};
use thaw_protocol::agent::{layout, oci};

use super::{blocking, volumes};
use crate::container::Container;
use crate::error::{Error, Result};
use crate::names::Names;
use crate::sandbox::Sandbox;
use crate::warning;

/// The PID namespace's type in a specification.
const PIDS: &str = "pid";

pub async fn create(sandbox: &Arc<Sandbox>, mut request: CreateContainerRequest) -> Result<()> {
    let activity = sandbox.activity().await;
    let sandbox = sandbox.clone();
    blocking(move || {
        let _motion = activity;
        let storages = request
            .storages
            .iter()
            .map(volumes::storage)
            .collect::<Result<Vec<_>>>()?;
        share_pids(&sandbox, &mut request)?;
        let annotations = request.OCI.as_ref().map(|spec| &spec.Annotations);
        if let Some(names) = annotations.map_or(Ok(None), Names::of)? {
            super::etc::take_names(&sandbox, names)?;
        }
        sandbox.reserve(&request.container_id)?;
        let spec = request.OCI.mut_or_insert_default();
        let disks = sandbox.disks.take(&request.container_id, &request.devices, spec);
        let made = disks.and_then(|()| {
            Container::create(&request, &storages, &sandbox.storages, &sandbox.reaper)
                .inspect_err(|_| sandbox.disks.let_go(&request.container_id))
        });
        let made = made.inspect_err(|_| remove_files(&request.container_id));
        match made {
            Ok(container) => {
                sandbox.settle(&request.container_id, Some(container));
                Ok(())
            }
            Err(e) => {
                sandbox.settle(&request.container_id, None);
                Err(e)
            }
        }
    })
    .await
}

/// Removes the files that were copied for a container. Blocks.
fn remove_files(id: &str) {
    let files = layout::files_path(id);
    match std::fs::remove_dir_all(&files) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => warning!("container {id}: remove {files}: {e}"),
        _ => {}
    }
}

/// Sets the path of the PID namespace that a container joins: the sandbox's if the request says so, or another
/// container's if the specification names it as [`layout::pid_namespace_path`] does.
fn share_pids(sandbox: &Sandbox, request: &mut CreateContainerRequest) -> Result<()> {
    let Some(spec) = request.OCI.as_mut() else {
        return Ok(());
    };
    let namespaces = &mut spec.Linux.mut_or_insert_default().Namespaces;
    if request.sandbox_pidns {
        namespaces.retain(|namespace| namespace.Type != PIDS);
        namespaces.push(oci::LinuxNamespace {
            Type: PIDS.into(),
            Path: sandbox.pids.path(&sandbox.reaper)?.display().to_string(),
            ..Default::default()
        });
    }
    for namespace in namespaces.iter_mut().filter(|namespace| namespace.Type == PIDS) {
        if let Some(id) = layout::container_of_pid_namespace(&namespace.Path) {
            let target = sandbox.container(id)?;
            if target.init.exit_code().is_some() {
                return Err(Error::State(format!(
                    "container {id}, whose processes are to be shared, has ended"
                )));
            }
            namespace.Path = format!("/proc/{}/ns/pid", target.init.child.pid);
        }
    }
    Ok(())
}

pub async fn start(sandbox: &Arc<Sandbox>, id: &str) -> Result<()> {
    let activity = sandbox.activity().await;
    let container = sandbox.container(id)?;
    blocking(move || {
        let _motion = activity;
        container.start()
    })
    .await
}

/// `timeout` is in seconds; 0 means no limit.
pub async fn remove(sandbox: &Arc<Sandbox>, id: &str, timeout: u32) -> Result<()> {
    let activity = sandbox.activity().await;
    let container = sandbox.take(id)?;
    let sandbox = sandbox.clone();
    // Completes even if the caller disconnects, so that the id does not stay reserved.
    let removal = tokio::spawn(async move {
        let _motion = activity;
        let timeout = (timeout != 0).then(|| Duration::from_secs(u64::from(timeout)));
        if let Err(e) = container.kill(timeout).await {
            sandbox.put_back(container);
            return Err(e);
        }
        blocking(move || {
            container.remove(&sandbox.storages);
            sandbox.disks.let_go(&container.id);
            remove_files(&container.id);
            sandbox.settle(&container.id, None);
            Ok(())
        })
        .await
    });
    removal
        .await
        .unwrap_or_else(|e| Err(crate::error::Error::State(format!("the removal failed: {e}"))))
}

pub fn update(sandbox: &Sandbox, request: &UpdateContainerRequest) -> Result<()> {
    let container = sandbox.container(&request.container_id)?;
    match request.resources.as_ref() {
        Some(resources) => container.cgroup.apply(resources),
        None => Ok(()),
    }
}

pub async fn freeze(sandbox: &Sandbox, id: &str, frozen: bool) -> Result<()> {
    let _motion = sandbox.activity().await;
    sandbox.container(id)?.freeze(frozen).await
}
