//! Creates a task from a checkpoint: thaws the microVM with the container in it, paused until it is started.

use std::path::Path;
use std::sync::Arc;

use thaw_protocol::shim::task::CreateTaskRequest;

use super::supply::{Prepared, converted};
use super::{Pod, hook_state};
use crate::checkpoint::{self, Checkpoint};
use crate::container::Container;
use crate::error::{Error, Result};
use crate::hooks;
use crate::kata::Settings;
use crate::machine::{Machine, PodOf};
use crate::role::Role;
use crate::spec;
use crate::spec::config::{Mount, Spec};
use crate::stdio::{StreamOwner, Streams, Targets};
use crate::thawed;

/// Reads a checkpoint, if a container of this role can be restored from one.
pub(super) fn read(id: &str, role: &Role, directory: &str) -> Result<Option<Checkpoint>> {
    match (directory, role) {
        ("", _) => Ok(None),
        (directory, Role::Single) => Checkpoint::read(Path::new(directory)).map(Some),
        (_, Role::Pod | Role::Member { .. }) => Err(Error::Unsupported(format!(
            "container {id} is a member of a pod, and a checkpoint contains a whole microVM: only a container with a \
             microVM of its own can be restored from it"
        ))),
    }
}

impl Pod {
    /// Thaws the microVM of a checkpoint, with its container paused.
    pub(super) async fn thaw_machine(
        self: &Arc<Pod>,
        container: &Container,
        spec: &Spec,
        kata: Settings,
        directory: &str,
    ) -> Result<Arc<Machine>> {
        checkpoint::unpack(Path::new(directory)).await?;
        let snapshot = checkpoint::snapshot(Path::new(directory));
        let thaw = || async {
            let pod = PodOf {
                namespace: &self.namespace,
                id: &container.id,
                bundle: &container.bundle,
                spec,
            };
            let thawed = Machine::thaw(&self.thawd, pod, kata, &snapshot).await?;
            let machine = Arc::new(thawed);
            self.watch_machine(&machine);
            Ok::<_, Error>(machine)
        };
        self.machine.get_or_try_init(thaw).await.cloned()
    }

    /// The state from which a container continues that was thawed with its pod's microVM. `None` if the pod began as a new one.
    pub(super) async fn thawed(
        &self,
        r: &CreateTaskRequest,
        role: &Role,
        spec: &Spec,
    ) -> Result<Option<Checkpoint>> {
        if *role == Role::Single && spec.annotations.contains_key(thawed::ANNOTATION) {
            return Err(Error::Unsupported(format!(
                "container {}: annotation {} is of pods",
                r.id,
                thawed::ANNOTATION
            )));
        }
        let machine = self.machine.get().filter(|_| matches!(role, Role::Member { .. }));
        let Some((machine, thawed)) = machine.and_then(|machine| Some((machine, machine.thawed.as_ref()?)))
        else {
            return Ok(None);
        };
        let servers = spec.clone();
        let servers = tokio::task::spawn_blocking(move || thawed::name_servers(&servers)).await;
        let servers = servers.unwrap_or_else(|e| Err(Error::State(format!("name servers: {e}"))))?;
        let from = thawed.take(r, spec)?;
        if !servers.is_empty()
            && let Err(e) = machine.agent.set_name_servers(servers).await
        {
            thawed.give_back();
            return Err(e);
        }
        Ok(Some(from))
    }

    /// Connects to the container that was restored with the machine, and mounts its pod's volumes in it.
    pub(super) async fn connect_restored(
        &self,
        machine: &Machine,
        container: &Arc<Container>,
        volumes: Vec<Mount>,
    ) -> Result<()> {
        let state = hook_state(container, machine, "creating");
        hooks::run(&container.hooks.prestart, state).await?;
        hooks::run(&container.hooks.create_runtime, state).await?;
        let owner = StreamOwner {
            namespace: self.namespace.clone(),
            container: container.id.clone(),
        };
        let init = &container.init;
        let targets = Targets::open(&init.stdio, &owner).await?;
        // Most were frozen while paused, because containerd pauses a container before its checkpoint.
        machine.agent.pause(container.guest_id(), true).await?;
        if !volumes.is_empty() {
            self.add_volumes(machine, container, volumes).await?;
        }
        *init.streams() = Some(Streams::start(&machine.agent, &init.id, &init.stdio, targets));
        Ok(())
    }

    /// Shares the volumes with the microVM, and has the guest mount them in the container. A failure leaves nothing shared.
    async fn add_volumes(&self, machine: &Machine, container: &Container, volumes: Vec<Mount>) -> Result<()> {
        let (id, bundle) = (container.guest_id(), container.bundle.clone());
        let named = id.clone();
        let guest = converted(move || spec::only_mounts(&named, &bundle, &volumes)).await?;
        let prepared = Prepared { rootfs: None, guest };
        let mut used = Vec::new();
        let added = async {
            let guest = self.supply(machine, id, prepared, &mut used).await?;
            machine.agent.add_mounts(id, guest).await
        };
        let added = added.await;
        match added {
            Ok(()) => *container.shares() = used,
            Err(_) => self.release(machine, used).await,
        }
        added
    }
}
