//! Making a task: the pod's microVM with the first, then what the guest is to have of it.
//!
//! Whatever can be refused is, before a microVM is made; a task that could not be made leaves nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_protocol::agent::layout;
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::mount::Mount;
use thaw_protocol::shim::task::CreateTaskRequest;
use thaw_protocol::shim::task_events::TaskCreate;

use super::{Pod, Slot, is_the_last, task_io};
use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::grouping::Role;
use crate::hooks::{self, State};
use crate::machine::Machine;
use crate::rootfs::{self, Rootfs};
use crate::spec::config::Spec;
use crate::spec::{self, Guest};
use crate::stdio::{Stdio, Streams, Targets, Whose};

/// What the guest is to have, as far as it is known without one.
struct Wanted {
    rootfs: Rootfs,
    guest: Guest,
}

impl Pod {
    /// Makes a task. The process id containerd is told.
    pub async fn create(self: &Arc<Pod>, r: CreateTaskRequest) -> Result<u32> {
        if !r.checkpoint.is_empty() {
            return Err(Error::Unsupported(
                "a task cannot be made from a checkpoint: thaw the snapshot with `thaw thaw`".into(),
            ));
        }
        let bundle = PathBuf::from(&r.bundle);
        let spec = spec::read(&bundle.join("config.json"))?;
        let role = Role::of(&r.id, &spec.annotations)?;
        let reservation = self.reserve(&r.id)?;
        hooks::check(&spec.hooks)?;
        let wanted = match role {
            Role::Pod => None,
            Role::Single | Role::Member { .. } => Some(wanted(&r.id, &spec, &r.rootfs)?),
        };
        let stdio = Stdio {
            stdin: r.stdin.clone(),
            stdout: r.stdout.clone(),
            stderr: r.stderr.clone(),
            terminal: r.terminal,
        };
        let container = Container::new(&r.id, bundle, role.clone(), spec.hooks.clone(), stdio);
        let machine = self.machine_for(&container, &spec).await?;
        let container = Arc::new(container);
        if let Err(e) = self.make(&machine, &container, wanted).await {
            if is_the_last(&role) {
                self.end_machine();
                self.ended().await;
            }
            return Err(e);
        }
        self.table().insert(r.id.clone(), Slot::Made(container.clone()));
        drop(reservation);
        self.events.publish(&Event::Create(TaskCreate {
            container_id: r.id.clone(),
            bundle: r.bundle,
            rootfs: r.rootfs,
            io: MessageField::some(task_io(&container.init)),
            pid: self.pid(),
            ..Default::default()
        }));
        if container.is_in_guest() {
            self.attend(&machine, &r.id, &container.init);
        }
        Ok(self.pid())
    }

    /// The pod's microVM, made now if the container brings the pod.
    async fn machine_for(self: &Arc<Pod>, container: &Container, spec: &Spec) -> Result<Arc<Machine>> {
        let (id, bundle) = (&container.id, &container.bundle);
        if let Role::Member { pod } = &container.role {
            let none = || Error::State(format!("container {id}: pod {pod} has no microVM"));
            let machine = self.machine.get().ok_or_else(none)?;
            machine.note().write(bundle)?;
            return Ok(machine.clone());
        }
        let make = || async {
            let machine = Arc::new(Machine::make(&self.thawd, &self.namespace, id, bundle, spec).await?);
            self.attend_machine(&machine);
            Ok::<_, Error>(machine)
        };
        self.machine.get_or_try_init(make).await.cloned()
    }

    /// Has the guest make it. A failure leaves nothing of it there.
    async fn make(
        &self,
        machine: &Machine,
        container: &Arc<Container>,
        wanted: Option<Wanted>,
    ) -> Result<()> {
        let state = hook_state(container, machine, "creating");
        let hooks = &container.hooks;
        hooks::run(&hooks.prestart, state).await?;
        hooks::run(&hooks.create_runtime, state).await?;
        let Some(Wanted { rootfs, mut guest }) = wanted else {
            return Ok(());
        };
        let whose = Whose {
            namespace: self.namespace.clone(),
            container: container.id.clone(),
        };
        let init = &container.init;
        let targets = Targets::open(&init.stdio, &whose).await?;
        let Rootfs::Image { digest } = rootfs;
        let image = self.thawd.show(&machine.sandbox, &digest).await?;
        guest
            .storages
            .splice(0..0, rootfs::storages(&container.id, &image));
        machine.agent.create(&container.id, guest).await?;
        *init.streams() = Some(Streams::start(&machine.agent, &init.id, &init.stdio, targets));
        Ok(())
    }
}

/// What a hook is told of a container.
pub(super) fn hook_state<'a>(container: &'a Container, machine: &Machine, status: &'a str) -> State<'a> {
    State {
        id: &container.id,
        status,
        pid: machine.vmm,
        bundle: &container.bundle,
    }
}

fn wanted(id: &str, spec: &Spec, mounts: &[Mount]) -> Result<Wanted> {
    let root = spec
        .root
        .as_ref()
        .map(|root| root.path.as_str())
        .unwrap_or_default();
    let rootfs = Rootfs::of(mounts).map_err(|e| match (mounts, e) {
        ([], Error::Unsupported(what)) => {
            Error::Unsupported(format!("{}: {what}", Path::new(root).display()))
        }
        (_, e) => e,
    })?;
    let guest = spec::guest(id, spec, layout::root_path(id))?;
    Ok(Wanted { rootfs, guest })
}
