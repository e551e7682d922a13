//! Making a task out of a checkpoint: its microVM is thawed with the container in it, which is held until it is started.

use std::path::Path;
use std::sync::Arc;

use super::Pod;
use super::create::hook_state;
use crate::checkpoint::{self, Checkpoint};
use crate::container::Container;
use crate::error::{Error, Result};
use crate::grouping::Role;
use crate::hooks;
use crate::kata::Settings;
use crate::machine::Machine;
use crate::spec::config::Spec;
use crate::stdio::{Streams, Targets, Whose};

/// What a checkpoint holds, where a container with this role can come out of one.
pub(super) fn read(id: &str, role: &Role, directory: &str) -> Result<Option<Checkpoint>> {
    match (directory, role) {
        ("", _) => Ok(None),
        (directory, Role::Single) => Checkpoint::read(Path::new(directory)).map(Some),
        (_, Role::Pod | Role::Member { .. }) => Err(Error::Unsupported(format!(
            "container {id} is of a pod, and a checkpoint is that of a whole microVM: only a container that has one of its \
             own can be made from it"
        ))),
    }
}

impl Pod {
    /// Thaws the microVM of a checkpoint, its container held.
    pub(super) async fn thaw_machine(
        self: &Arc<Pod>,
        container: &Container,
        spec: &Spec,
        kata: Settings,
        directory: &str,
    ) -> Result<Arc<Machine>> {
        let (id, bundle) = (&container.id, &container.bundle);
        checkpoint::unpack(Path::new(directory)).await?;
        let snapshot = checkpoint::snapshot(Path::new(directory));
        let thaw = || async {
            let thawed =
                Machine::thaw(&self.thawd, &self.namespace, id, bundle, spec, kata, &snapshot).await?;
            let machine = Arc::new(thawed);
            self.attend_machine(&machine);
            Ok::<_, Error>(machine)
        };
        self.machine.get_or_try_init(thaw).await.cloned()
    }

    /// Takes up the container that came with the machine.
    pub(super) async fn take_up(&self, machine: &Machine, container: &Arc<Container>) -> Result<()> {
        let state = hook_state(container, machine, "creating");
        hooks::run(&container.hooks.prestart, state).await?;
        hooks::run(&container.hooks.create_runtime, state).await?;
        let whose = Whose {
            namespace: self.namespace.clone(),
            container: container.id.clone(),
        };
        let init = &container.init;
        let targets = Targets::open(&init.stdio, &whose).await?;
        // Most were frozen so: containerd pauses what it has a checkpoint made of.
        machine.agent.pause(container.guest_id(), true).await?;
        *init.streams() = Some(Streams::start(&machine.agent, &init.id, &init.stdio, targets));
        Ok(())
    }
}
