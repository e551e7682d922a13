//! Supplies containers with what is not in the guest: thawd shares the host's files and devices with the microVM, and shows images there.

use std::path::Path;

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::shim::mount::Mount;

use super::Pod;
use crate::error::{Error, Result};
use crate::host_resource::HostResource;
use crate::machine::Machine;
use crate::rootfs::{self, Rootfs};
use crate::share::Used;
use crate::spec::config::Spec;
use crate::spec::{self, Guest};

/// A container for the guest, with everything that is known before the guest exists.
pub(super) struct Prepared {
    /// `None`: it runs already.
    pub rootfs: Option<Rootfs>,
    pub guest: Guest,
}

impl Pod {
    /// Asks thawd to give the microVM the host files and devices that the container needs. `used` lists those that were given, also after
    /// an error.
    pub(super) async fn supply(
        &self,
        machine: &Machine,
        id: &str,
        prepared: Prepared,
        used: &mut Vec<Used>,
    ) -> Result<Guest> {
        let Prepared { rootfs, mut guest } = prepared;
        let mut storages = Vec::new();
        if matches!(rootfs, Some(Rootfs::Host(_))) || !guest.shared_mounts.is_empty() {
            storages.push(layout::shared());
        }
        match rootfs {
            None => {}
            Some(Rootfs::Image { digest }) => {
                let image = self.thawd.show(&machine.sandbox, &digest).await?;
                storages.extend(rootfs::storages(id, &image));
            }
            Some(Rootfs::Host(source)) => {
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

/// Converts a container that is to be created.
pub(super) async fn prepare(id: &str, bundle: &Path, spec: &Spec, mounts: &[Mount]) -> Result<Prepared> {
    let root = spec
        .root
        .as_ref()
        .map(|root| root.path.as_str())
        .unwrap_or_default();
    let rootfs = Some(Rootfs::of(mounts, &bundle.join(root))?);
    let (id, bundle, spec) = (id.to_owned(), bundle.to_owned(), spec.clone());
    let guest = converted(move || spec::guest(&id, &bundle, &spec, layout::root_path(&id))).await?;
    Ok(Prepared { rootfs, guest })
}

/// Runs a conversion, which reads the host's files and may block.
pub(super) async fn converted(convert: impl FnOnce() -> Result<Guest> + Send + 'static) -> Result<Guest> {
    let converted = tokio::task::spawn_blocking(convert).await;
    converted.unwrap_or_else(|e| Err(Error::State(format!("looking at the container's mounts: {e}"))))
}
