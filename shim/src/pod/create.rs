//! Creates a task: with the pod's first task also the microVM, then the container in the guest.
//!
//! Invariant: everything that can be refused is refused before a microVM is created, and a task whose
//! creation fails leaves nothing behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::shim::task::CreateTaskRequest;
use thaw_protocol::shim::task_events::TaskCreate;
use thaw_protocol::shim::{Any, MessageField, StringValue};

use super::supply::{Prepared, prepare};
use super::{Entry, Pod, ends_machine, hook_state, restore, task_io};
use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::hooks;
use crate::kata::{self, Settings};
use crate::machine::{Machine, PodOf};
use crate::options::Options;
use crate::role::Role;
use crate::spec;
use crate::spec::config::{Mount, Spec};
use crate::stdio::{Stdio, StreamOwner, Streams, Targets};
use crate::thawed::{self, Wanted};
use crate::warning;

/// What to create in the guest.
enum Creation {
    /// No container, but the storages that the pod's containers share.
    Pod(Vec<Storage>),
    Container(Box<Prepared>),
    /// Nothing but these mounts: the container was restored with the machine.
    Restored(Vec<Mount>),
}

impl Pod {
    /// Creates a task. Returns the process id for containerd.
    pub async fn create(self: &Arc<Pod>, r: CreateTaskRequest) -> Result<u32> {
        let bundle = PathBuf::from(&r.bundle);
        let mut spec = spec::read(&bundle.join("config.json"))?;
        let role = self.role(&r.id, &spec, &bundle)?;
        self.complete(&mut spec);
        let kata = self.kata(&role, &spec, r.options.as_ref(), &bundle)?;
        if kata.disable_guest_seccomp == Some(true) {
            spec.linux.seccomp = None;
        }
        let reservation = self.reserve(&r.id)?;
        hooks::check(&spec.hooks)?;
        let checkpoint = restore::read(&r.id, &role, &r.checkpoint)?;
        self.share(&r.id, &role, &mut spec)?;
        let from = match &checkpoint {
            Some(checkpoint) => Some(checkpoint.clone()),
            None => self.thawed(&r, &role, &spec).await?,
        };
        let creation = match (&role, &from) {
            (Role::Pod, _) => Creation::Pod(spec::pod_storages(&spec)),
            (Role::Single, Some(_)) => Creation::Restored(Vec::new()),
            (Role::Member { .. }, Some(_)) => Creation::Restored(thawed::volumes(&spec)),
            (Role::Single | Role::Member { .. }, None) => {
                Creation::Container(Box::new(prepare(&r.id, &bundle, &spec, &r.rootfs).await?))
            }
        };
        let stdio = Stdio {
            stdin: r.stdin.clone(),
            stdout: r.stdout.clone(),
            stderr: r.stderr.clone(),
            terminal: r.terminal,
        };
        let container = Container::new(&r.id, bundle, role.clone(), &spec, stdio, from.as_ref());
        let machine = match checkpoint {
            Some(_) => self.thaw_machine(&container, &spec, kata, &r.checkpoint).await?,
            None => self.machine_for(&container, &spec, kata).await?,
        };
        let container = Arc::new(container);
        if let Err(e) = self.make(&machine, &container, creation).await {
            if let Some(thawed) = machine.thawed.as_ref().filter(|_| container.restored) {
                thawed.give_back();
            }
            if ends_machine(&role) {
                self.end_machine();
                self.ended().await;
            }
            return Err(e);
        }
        self.table()
            .insert(r.id.clone(), Entry::Created(container.clone()));
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
            self.report_ignored(&r.id, &spec);
            self.watch_process(&machine, &container, &container.init);
        }
        Ok(self.pid())
    }

    /// Kata's settings. They are read with the container that creates the pod and hold for the others.
    fn kata(&self, role: &Role, spec: &Spec, options: Option<&Any>, bundle: &Path) -> Result<Settings> {
        match role {
            Role::Single | Role::Pod => {
                Ok(kata::settings(&spec.annotations, &Options::of(options, bundle)?)?)
            }
            Role::Member { .. } => Ok(self.machine.get().map(|m| m.kata.clone()).unwrap_or_default()),
        }
    }

    /// Reports which parts of a specification no guest supports and its container therefore lacks.
    fn report_ignored(&self, id: &str, spec: &Spec) {
        let Some(process) = &spec.process else { return };
        let labels = [
            ("apparmorProfile", &process.apparmor_profile),
            ("selinuxLabel", &process.selinux_label),
        ];
        for (field, label) in labels {
            if !label.is_empty() && label != "unconfined" {
                let text = format!(
                    "container {id}: {field} {label:?} is ignored: the guest's kernel has no such security module"
                );
                warning!("{text}");
                self.events.publish(&Event::Ignored(StringValue {
                    value: text,
                    ..Default::default()
                }));
            }
        }
    }

    /// Returns the pod's microVM, and creates it if the container creates the pod.
    async fn machine_for(
        self: &Arc<Pod>,
        container: &Container,
        spec: &Spec,
        kata: Settings,
    ) -> Result<Arc<Machine>> {
        let (id, bundle) = (&container.id, &container.bundle);
        if let Role::Member { pod } = &container.role {
            let none = || Error::State(format!("container {id}: pod {pod} has no microVM"));
            let machine = self.machine.get().ok_or_else(none)?;
            machine.note().write(bundle)?;
            return Ok(machine.clone());
        }
        self.machine_of(id, bundle, spec, kata).await.cloned()
    }

    /// Creates the microVM of a pod for container or sandbox `id`.
    pub(super) async fn machine_of(
        self: &Arc<Pod>,
        id: &str,
        bundle: &Path,
        spec: &Spec,
        kata: Settings,
    ) -> Result<&Arc<Machine>> {
        let make = || async {
            let pod = PodOf {
                namespace: &self.namespace,
                id,
                bundle,
                spec,
            };
            let made = match Wanted::of(&spec.annotations)? {
                Some(wanted) => Machine::thaw_stored(&self.thawd, pod, kata, wanted).await?,
                None => Machine::make(&self.thawd, pod, kata).await?,
            };
            let machine = Arc::new(made);
            self.watch_machine(&machine);
            Ok::<_, Error>(machine)
        };
        self.machine.get_or_try_init(make).await
    }

    /// Creates the container in the guest. A failure leaves nothing there.
    async fn make(&self, machine: &Machine, container: &Arc<Container>, creation: Creation) -> Result<()> {
        let creation = match creation {
            Creation::Restored(mounts) => return self.connect_restored(machine, container, mounts).await,
            creation => creation,
        };
        let state = hook_state(container, machine, "creating");
        let hooks = &container.hooks;
        hooks::run(&hooks.prestart, state).await?;
        hooks::run(&hooks.create_runtime, state).await?;
        let prepared = match creation {
            Creation::Container(prepared) => *prepared,
            Creation::Pod(storages) if !storages.is_empty() => {
                return machine.agent.mount_pod_storages(storages).await;
            }
            Creation::Pod(_) | Creation::Restored(_) => return Ok(()),
        };
        let owner = StreamOwner {
            namespace: self.namespace.clone(),
            container: container.id.clone(),
        };
        let init = &container.init;
        let targets = Targets::open(&init.stdio, &owner).await?;
        let mut used = Vec::new();
        let made = async {
            let guest = self.supply(machine, &container.id, prepared, &mut used).await?;
            let limit = machine.kata.create_timeout;
            machine.agent.create_within(limit, &container.id, guest).await
        };
        let made = made.await;
        if let Err(e) = made {
            self.release(machine, used).await;
            return Err(e);
        }
        *container.shares() = used;
        *init.streams() = Some(Streams::start(&machine.agent, &init.id, &init.stdio, targets));
        Ok(())
    }
}
