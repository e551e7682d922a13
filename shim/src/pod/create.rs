//! Creates a task: with the pod's first task also the microVM, then the container in the guest.
//!
//! Invariant: everything that can be refused is refused before a microVM is created, and a task whose
//! creation fails leaves nothing behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::shim::mount::Mount;
use thaw_protocol::shim::task::CreateTaskRequest;
use thaw_protocol::shim::task_events::TaskCreate;
use thaw_protocol::shim::{Any, MessageField, StringValue};

use super::{Entry, Pod, ends_machine, hook_state, restore, task_io};
use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::hooks;
use crate::host_resource::HostResource;
use crate::kata::{self, Settings};
use crate::machine::{Machine, PodOf};
use crate::options::Options;
use crate::role::Role;
use crate::rootfs::{self, Rootfs};
use crate::share::Used;
use crate::spec::config::Spec;
use crate::spec::{self, Guest};
use crate::stdio::{Stdio, StreamOwner, Streams, Targets};
use crate::thawed::Wanted;
use crate::warning;

/// A container for the guest, with everything that is known before the guest exists.
struct Prepared {
    rootfs: Rootfs,
    guest: Guest,
}

/// What to create in the guest.
enum Creation {
    /// No container, but the storages that the pod's containers share.
    Pod(Vec<Storage>),
    Container(Box<Prepared>),
    /// Nothing: the container was restored with the machine.
    Restored,
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
            (_, Some(_)) => Creation::Restored,
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
        if let Creation::Restored = creation {
            return self.connect_restored(machine, container).await;
        }
        let state = hook_state(container, machine, "creating");
        let hooks = &container.hooks;
        hooks::run(&hooks.prestart, state).await?;
        hooks::run(&hooks.create_runtime, state).await?;
        let prepared = match creation {
            Creation::Container(prepared) => *prepared,
            Creation::Pod(storages) if !storages.is_empty() => {
                return machine.agent.mount_pod_storages(storages).await;
            }
            Creation::Pod(_) | Creation::Restored => return Ok(()),
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

    /// Asks thawd to give the microVM the host files and devices that the container needs. `used` lists those that were given, also after
    /// an error.
    async fn supply(
        &self,
        machine: &Machine,
        id: &str,
        prepared: Prepared,
        used: &mut Vec<Used>,
    ) -> Result<Guest> {
        let Prepared { rootfs, mut guest } = prepared;
        let mut storages = Vec::new();
        if matches!(rootfs, Rootfs::Host(_)) || !guest.shared_mounts.is_empty() {
            storages.push(layout::shared());
        }
        match rootfs {
            Rootfs::Image { digest } => {
                let image = self.thawd.show(&machine.sandbox, &digest).await?;
                storages.extend(rootfs::storages(id, &image));
            }
            Rootfs::Host(source) => {
                let share = self.acquire(machine, HostResource::Files(source)).await?;
                storages.push(layout::share(&share.name));
                guest.spec.Root.mut_or_insert_default().Path = layout::share_path(&share.name);
                used.push(share);
            }
        }
        for mounted in std::mem::take(&mut guest.shared_mounts) {
            let shared = self.acquire(machine, HostResource::Files(mounted.source)).await;
            let destination = &guest.spec.Mounts[mounted.mount].destination;
            let share = shared.map_err(|e| e.about(format!("the mount at {destination}")))?;
            storages.push(layout::share(&share.name));
            guest.spec.Mounts[mounted.mount].source = layout::share_path(&share.name);
            used.push(share);
        }
        self.show(machine, &mut guest, &mut storages).await?;
        guest.storages.splice(0..0, storages);
        for disk in std::mem::take(&mut guest.disks) {
            let given = self.acquire(machine, HostResource::Disk(disk.device)).await;
            let given = given.map_err(|e| e.about(format!("the device {}", disk.path)))?;
            let device = layout::host_disk(&given.name, &disk.path, disk.device.read_only);
            guest.devices.push(device);
            used.push(given);
        }
        Ok(guest)
    }

    /// Asks thawd to show the images that are mounts of the container.
    async fn show(&self, machine: &Machine, guest: &mut Guest, storages: &mut Vec<Storage>) -> Result<()> {
        for mounted in std::mem::take(&mut guest.image_mounts) {
            let mount = &mut guest.spec.Mounts[mounted.mount];
            let image = self.thawd.show(&machine.sandbox, &mounted.image.digest).await;
            let image = image.map_err(|e| e.about(format!("the mount at {}", mount.destination)))?;
            mount.source = format!("{}/{image}{}", layout::IMAGES, mounted.image.path);
            let device = layout::images();
            if !storages.contains(&device) {
                storages.push(device);
            }
        }
        Ok(())
    }

    async fn acquire(&self, machine: &Machine, resource: HostResource) -> Result<Used> {
        self.shares
            .acquire(&self.thawd, &machine.sandbox, &resource)
            .await
    }

    /// Releases host files and devices, and removes those that no other container uses.
    pub(super) async fn release(&self, machine: &Machine, used: Vec<Used>) {
        for share in used {
            self.shares.release(&self.thawd, &machine.sandbox, share).await;
        }
    }
}

async fn prepare(id: &str, bundle: &Path, spec: &Spec, mounts: &[Mount]) -> Result<Prepared> {
    let root = spec
        .root
        .as_ref()
        .map(|root| root.path.as_str())
        .unwrap_or_default();
    let rootfs = Rootfs::of(mounts, &bundle.join(root))?;
    let (id, bundle, spec) = (id.to_owned(), bundle.to_owned(), spec.clone());
    // Reads the host's files, which may block.
    let guest = tokio::task::spawn_blocking(move || spec::guest(&id, &bundle, &spec, layout::root_path(&id)));
    let guest = guest
        .await
        .unwrap_or_else(|e| Err(Error::State(format!("looking at the container's mounts: {e}"))))?;
    Ok(Prepared { rootfs, guest })
}
