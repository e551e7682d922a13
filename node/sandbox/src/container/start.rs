//! Creates and starts the container of a sandbox, for `thaw run` and for thawd's API, and starts its program again.

use std::path::Path;

use oci_spec::image::ImageConfiguration;
use thaw_protocol::agent::agent::CreateContainerRequest;
use thaw_protocol::agent::{Message, MessageField, layout};
use ttrpc::Code;

use super::{Life, Options, Running, hooks, running, spec, storages};
use crate::agent_client::{AgentClient, start_failure};
use crate::container::RootServing;
use crate::error::{Error, ErrorKind};

/// The file in a sandbox's directory with the request that created its container, to create it again.
pub(crate) const REQUEST_FILE: &str = "container.request";

/// Creates the container `id` of the sandbox with this directory, up to the point of executing its program.
///
/// # Errors
/// [`Runtime`](crate::error::ErrorKind::Runtime) if neither the image nor the options name a command; those of the agent.
pub async fn create(
    agent: &AgentClient,
    id: &str,
    config: &ImageConfiguration,
    options: &Options,
    root: RootServing,
    directory: &Path,
) -> Result<Running, Error> {
    let spec = spec(id, config, options)?;
    let mut running = running(id, &spec);
    running.life = Some(Life::of(config, &options.life));
    running.health = options.health.clone();
    running.hooks = hooks::of(config, &options.hooks)?;
    running.readiness = options.readiness.clone();
    let mut storages = storages(id, root, &options.settings.anonymous_volumes);
    if !options.volumes.is_empty() {
        storages.push(layout::shared());
    }
    let request = CreateContainerRequest {
        container_id: id.into(),
        exec_id: id.into(),
        storages,
        OCI: MessageField::some(spec),
        ..Default::default()
    };
    note_request(&request, directory)?;
    let created = agent.create(&request).await.map_err(start_failure);
    created.map_err(|error| options.settings.explain(error))?;
    Ok(running)
}

/// Starts it, and writes to its sandbox's directory what other processes need to know.
pub async fn start(agent: &AgentClient, running: &Running, directory: &Path) -> Result<(), Error> {
    agent.start(&running.container_id).await.map_err(start_failure)?;
    running.write(directory)
}

/// Removes a container whose process has ended, creates it again with the same layer, mounts and settings, and starts its program.
///
/// # Errors
/// Those of the agent.
pub async fn start_again(agent: &AgentClient, running: &Running, directory: &Path) -> Result<(), Error> {
    let request = read_request(directory)?;
    let id = &running.container_id;
    // The sandbox uses the mounts below the root too, so that the removal does not unmount the image and the disk.
    let below: Vec<_> = request
        .storages
        .iter()
        .filter(|s| s.mount_point != layout::root_path(id))
        .cloned()
        .collect();
    agent.create_sandbox(below).await.map_err(start_failure)?;
    match agent.remove(id).await {
        Err(ttrpc::Error::RpcStatus(status)) if status.code() == Code::NOT_FOUND => {}
        removed => removed.map_err(start_failure)?,
    }
    agent.create(&request).await.map_err(start_failure)?;
    agent.start(id).await.map_err(start_failure)?;
    if !running.life().open_stdin && !running.tty {
        let closed = agent.close_stdin(&running.process()).await;
        closed.map_err(|e| Error::new(ErrorKind::AgentFailed, format!("cannot end its input: {e}")))?;
    }
    Ok(())
}

/// Whether the container of the sandbox with this directory can be started again: that of a thawed snapshot cannot.
pub fn can_start_again(directory: &Path) -> bool {
    directory.join(REQUEST_FILE).exists()
}

fn note_request(request: &CreateContainerRequest, directory: &Path) -> Result<(), Error> {
    let path = directory.join(REQUEST_FILE);
    let bytes = request
        .write_to_bytes()
        .map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?;
    std::fs::write(&path, bytes).map_err(|e| Error::system(format!("cannot write {}", path.display()), &e))
}

fn read_request(directory: &Path) -> Result<CreateContainerRequest, Error> {
    let path = directory.join(REQUEST_FILE);
    let bytes =
        std::fs::read(&path).map_err(|e| Error::system(format!("cannot read {}", path.display()), &e))?;
    CreateContainerRequest::parse_from_bytes(&bytes)
        .map_err(|e| Error::new(ErrorKind::Runtime, format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_of_a_container_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!can_start_again(directory.path()));
        let request = CreateContainerRequest {
            container_id: "a1".into(),
            storages: storages("a1", RootServing::Virtiofs, &[]),
            ..Default::default()
        };
        note_request(&request, directory.path()).unwrap();
        assert!(can_start_again(directory.path()));
        assert_eq!(read_request(directory.path()).unwrap(), request);
    }
}
