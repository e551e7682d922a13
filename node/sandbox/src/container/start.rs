//! Creates and starts the container of a sandbox, for `thaw run` and for thawd's API.

use std::path::Path;

use oci_spec::image::ImageConfiguration;
use thaw_protocol::agent::agent::CreateContainerRequest;
use thaw_protocol::agent::{MessageField, layout};

use super::{Options, Running, running, spec, storages};
use crate::agent_client::{AgentClient, start_failure};
use crate::container::RootServing;
use crate::error::Error;

/// Creates the container `id`, up to the point of executing its program.
///
/// # Errors
/// [`Runtime`](crate::error::ErrorKind::Runtime) if neither the image nor the options name a command; those of the agent.
pub async fn create(
    agent: &AgentClient,
    id: &str,
    config: &ImageConfiguration,
    options: &Options,
    root: RootServing,
) -> Result<Running, Error> {
    let spec = spec(id, config, options)?;
    let running = running(id, &spec);
    let mut storages = storages(id, root);
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
    let created = agent.create(&request).await.map_err(start_failure);
    created.map_err(|error| options.settings.explain(error))?;
    Ok(running)
}

/// Starts it, and writes to its sandbox's directory what other processes need to know.
pub async fn start(agent: &AgentClient, running: &Running, directory: &Path) -> Result<(), Error> {
    agent.start(&running.container_id).await.map_err(start_failure)?;
    running.write(directory)
}
