//! Making a task: the pod's microVM with the first, then what the guest is to have of it.
//!
//! Whatever can be refused is, before a microVM is made; a task that could not be made leaves nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::shim::mount::Mount;
use thaw_protocol::shim::task::CreateTaskRequest;
use thaw_protocol::shim::task_events::TaskCreate;
use thaw_protocol::shim::{Any, MessageField, StringValue};

use super::{Pod, Slot, is_the_last, restore, task_io};
use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::grouping::Role;
use crate::hooks::{self, State};
use crate::kata::{self, Settings};
use crate::machine::Machine;
use crate::options::Options;
use crate::rootfs::{self, Rootfs};
use crate::share::{OfTheHost, Used};
use crate::spec::config::Spec;
use crate::spec::{self, Guest};
use crate::stdio::{Stdio, Streams, Targets, Whose};
use crate::warning;

/// What the guest is to have of a container, as far as it is known without one.
struct Wanted {
    rootfs: Rootfs,
    guest: Guest,
}

/// What there is to be done in the guest.
enum Making {
    /// No container: what those of the pod are to find there, and the pod keeps.
    Pod(Vec<Storage>),
    Container(Box<Wanted>),
    /// Nothing: it is there.
    Restored,
}

impl Pod {
    /// Makes a task. The process id containerd is told.
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
        let making = match (&role, &checkpoint) {
            (Role::Pod, _) => Making::Pod(spec::pod_storages(&spec)),
            (_, Some(_)) => Making::Restored,
            (Role::Single | Role::Member { .. }, None) => {
                Making::Container(Box::new(wanted(&r.id, &bundle, &spec, &r.rootfs).await?))
            }
        };
        let stdio = Stdio {
            stdin: r.stdin.clone(),
            stdout: r.stdout.clone(),
            stderr: r.stderr.clone(),
            terminal: r.terminal,
        };
        let container = Container::new(&r.id, bundle, role.clone(), &spec, stdio, checkpoint.as_ref());
        let machine = match checkpoint {
            Some(_) => self.thaw_machine(&container, &spec, kata, &r.checkpoint).await?,
            None => self.machine_for(&container, &spec, kata).await?,
        };
        let container = Arc::new(container);
        if let Err(e) = self.make(&machine, &container, making).await {
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
            self.tell_ignored(&r.id, &spec);
            self.attend(&machine, &container, &container.init);
        }
        Ok(self.pid())
    }

    /// Kata's settings: they are read with the container that brings the pod, and hold for the others.
    fn kata(&self, role: &Role, spec: &Spec, options: Option<&Any>, bundle: &Path) -> Result<Settings> {
        match role {
            Role::Single | Role::Pod => {
                Ok(kata::settings(&spec.annotations, &Options::of(options, bundle)?)?)
            }
            Role::Member { .. } => Ok(self.machine.get().map(|m| m.kata.clone()).unwrap_or_default()),
        }
    }

    /// Tells what of a specification no guest can have, and its container does without.
    fn tell_ignored(&self, id: &str, spec: &Spec) {
        let Some(process) = &spec.process else { return };
        let labels = [
            ("apparmorProfile", &process.apparmor_profile),
            ("selinuxLabel", &process.selinux_label),
        ];
        for (field, label) in labels {
            if !label.is_empty() && label != "unconfined" {
                let text = format!(
                    "container {id}: {field} {label:?} is left out: the guest's kernel has no such module"
                );
                warning!("{text}");
                self.events.publish(&Event::Ignored(StringValue {
                    value: text,
                    ..Default::default()
                }));
            }
        }
    }

    /// The pod's microVM, made now if the container brings the pod.
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

    /// The microVM of the pod that container or sandbox `id` brings.
    pub(super) async fn machine_of(
        self: &Arc<Pod>,
        id: &str,
        bundle: &Path,
        spec: &Spec,
        kata: Settings,
    ) -> Result<&Arc<Machine>> {
        let make = || async {
            let made = Machine::make(&self.thawd, &self.namespace, id, bundle, spec, kata).await?;
            let machine = Arc::new(made);
            self.attend_machine(&machine);
            Ok::<_, Error>(machine)
        };
        self.machine.get_or_try_init(make).await
    }

    /// Has the guest make it. A failure leaves nothing of it there.
    async fn make(&self, machine: &Machine, container: &Arc<Container>, making: Making) -> Result<()> {
        if let Making::Restored = making {
            return self.take_up(machine, container).await;
        }
        let state = hook_state(container, machine, "creating");
        let hooks = &container.hooks;
        hooks::run(&hooks.prestart, state).await?;
        hooks::run(&hooks.create_runtime, state).await?;
        let wanted = match making {
            Making::Container(wanted) => *wanted,
            Making::Pod(storages) if !storages.is_empty() => return machine.agent.keep(storages).await,
            Making::Pod(_) | Making::Restored => return Ok(()),
        };
        let whose = Whose {
            namespace: self.namespace.clone(),
            container: container.id.clone(),
        };
        let init = &container.init;
        let targets = Targets::open(&init.stdio, &whose).await?;
        let mut used = Vec::new();
        let made = async {
            let guest = self.supply(machine, &container.id, wanted, &mut used).await?;
            let limit = machine.kata.create_timeout;
            machine.agent.create_within(limit, &container.id, guest).await
        };
        let made = made.await;
        if let Err(e) = made {
            self.let_go(machine, used).await;
            return Err(e);
        }
        *container.shares() = used;
        *init.streams() = Some(Streams::start(&machine.agent, &init.id, &init.stdio, targets));
        Ok(())
    }

    /// Has thawd give the microVM what the container wants of the host: what is shared for it is in `used`, whatever fails.
    async fn supply(
        &self,
        machine: &Machine,
        id: &str,
        wanted: Wanted,
        used: &mut Vec<Used>,
    ) -> Result<Guest> {
        let Wanted { rootfs, mut guest } = wanted;
        let mut storages = Vec::new();
        if matches!(rootfs, Rootfs::Host(_)) || !guest.bound.is_empty() {
            storages.push(layout::shared());
        }
        match rootfs {
            Rootfs::Image { digest } => {
                let image = self.thawd.show(&machine.sandbox, &digest).await?;
                storages.extend(rootfs::storages(id, &image));
            }
            Rootfs::Host(source) => {
                let share = self.have(machine, OfTheHost::Files(source)).await?;
                storages.push(layout::share(&share.name));
                guest.spec.Root.mut_or_insert_default().Path = layout::share_path(&share.name);
                used.push(share);
            }
        }
        for bound in std::mem::take(&mut guest.bound) {
            let shared = self.have(machine, OfTheHost::Files(bound.source)).await;
            let destination = &guest.spec.Mounts[bound.mount].destination;
            let share = shared.map_err(|e| e.of(format!("the mount at {destination}")))?;
            storages.push(layout::share(&share.name));
            guest.spec.Mounts[bound.mount].source = layout::share_path(&share.name);
            used.push(share);
        }
        self.show(machine, &mut guest, &mut storages).await?;
        guest.storages.splice(0..0, storages);
        for disk in std::mem::take(&mut guest.disks) {
            let given = self.have(machine, OfTheHost::Disk(disk.device)).await;
            let given = given.map_err(|e| e.of(format!("the device {}", disk.path)))?;
            let device = layout::host_disk(&given.name, &disk.path, disk.device.read_only);
            guest.devices.push(device);
            used.push(given);
        }
        Ok(guest)
    }

    /// Has thawd show the images that are mounts of the container.
    async fn show(&self, machine: &Machine, guest: &mut Guest, storages: &mut Vec<Storage>) -> Result<()> {
        for shown in std::mem::take(&mut guest.shown) {
            let mount = &mut guest.spec.Mounts[shown.mount];
            let image = self.thawd.show(&machine.sandbox, &shown.of.digest).await;
            let image = image.map_err(|e| e.of(format!("the mount at {}", mount.destination)))?;
            mount.source = format!("{}/{image}{}", layout::IMAGES, shown.of.path);
            let device = layout::images();
            if !storages.contains(&device) {
                storages.push(device);
            }
        }
        Ok(())
    }

    async fn have(&self, machine: &Machine, wanted: OfTheHost) -> Result<Used> {
        self.shares.take(&self.thawd, &machine.sandbox, &wanted).await
    }

    /// Takes away what of the host nobody else has.
    pub(super) async fn let_go(&self, machine: &Machine, used: Vec<Used>) {
        for share in used {
            self.shares.let_go(&self.thawd, &machine.sandbox, share).await;
        }
    }
}

/// What a hook is told of a container.
pub(super) fn hook_state<'a>(container: &'a Container, machine: &Machine, status: &'a str) -> State<'a> {
    State {
        oci_version: &container.oci_version,
        id: &container.id,
        status,
        pid: machine.vmm,
        bundle: &container.bundle,
        annotations: &container.annotations,
    }
}

async fn wanted(id: &str, bundle: &Path, spec: &Spec, mounts: &[Mount]) -> Result<Wanted> {
    let root = spec
        .root
        .as_ref()
        .map(|root| root.path.as_str())
        .unwrap_or_default();
    let rootfs = Rootfs::of(mounts, &bundle.join(root))?;
    let (id, bundle, spec) = (id.to_owned(), bundle.to_owned(), spec.clone());
    // It looks at the host's files, and a file system may take its time to answer.
    let guest = tokio::task::spawn_blocking(move || spec::guest(&id, &bundle, &spec, layout::root_path(&id)));
    let guest = guest
        .await
        .unwrap_or_else(|e| Err(Error::State(format!("looking at the container's mounts: {e}"))))?;
    Ok(Wanted { rootfs, guest })
}
