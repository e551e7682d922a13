//! The backends of a machine's devices: one message for every device, sent without waiting for replies in between.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use thaw_pools::disk::Disk;
use thaw_protocol::api::RateLimits;
use thaw_protocol::control::{Backend, Command, DeviceId};

use crate::console::Console;
use crate::control_client::{ControlClient, Pending};
use crate::error::Error;
use crate::images::Exported;
use crate::misses::{Given, MissServer};

use super::{Shown, rate_limits};
use crate::container::{IMAGE_DISK, IMAGE_DISK_SLOT};
use crate::vm::{MachineError, Vm};

/// Whether a device's backend is passed to the VMM. The VMM alone implements the others.
fn is_swappable(device: &DeviceId) -> bool {
    !matches!(device, DeviceId::Mem | DeviceId::Balloon | DeviceId::Rng)
}

/// The backends to attach, in order.
#[derive(Debug, Default)]
pub(super) struct Backends<'a> {
    requests: Vec<(Command, Vec<BorrowedFd<'a>>)>,
    addressed: Vec<DeviceId>,
}

/// The host's ends of the devices that every sandbox has, and that are the same for every request.
#[derive(Debug)]
pub(super) struct Devices<'a> {
    pub ends: &'a Ends,
    /// Listens.
    pub vsock: &'a OwnedFd,
    pub guest_image: &'a OwnedFd,
}

impl<'a> Backends<'a> {
    /// Those of a machine some of whose devices have a backend already.
    pub(super) fn beside(addressed: Vec<DeviceId>) -> Backends<'a> {
        Backends {
            requests: Vec::new(),
            addressed,
        }
    }

    /// The devices that are the same for every request.
    pub(super) fn attach_own(&mut self, devices: &Devices<'a>) {
        self.attach(DeviceId::Vsock, Backend::Vsock, devices.vsock);
        self.attach(DeviceId::Pmem0, Backend::Pmem, devices.guest_image);
        devices.ends.attach(self);
    }

    /// The disk, unless it has one.
    pub(super) fn attach_disk(&mut self, disk: &'a Disk) {
        let device = DeviceId::Blk0;
        if self.addressed.contains(&device) {
            return;
        }
        let (backend, fds) = match &disk.base {
            Some(base) => (Backend::LayeredDisk, vec![base.as_fd(), disk.file.as_fd()]),
            None => (Backend::Disk { read_only: false }, vec![disk.file.as_fd()]),
        };
        self.requests.push((Command::Attach { device, backend }, fds));
        self.addressed.push(device);
    }

    /// The tap of its network, unless it has one.
    pub(super) fn attach_tap(&mut self, tap: &'a OwnedFd, mac: [u8; 6]) {
        if !self.addressed.contains(&DeviceId::Net) {
            self.attach(DeviceId::Net, Backend::Tap { mac, prepared: true }, tap);
        }
    }

    /// Attaches them to a machine in which nothing has run. Blocks until all are attached. Returns their devices.
    ///
    /// # Errors
    /// The first refusal of the VMM.
    pub(super) fn attach_to(self, vm: &mut Vm) -> Result<Vec<DeviceId>, MachineError> {
        for (command, fds) in self.requests {
            vm.attach(command, &fds)?;
        }
        Ok(self.addressed)
    }

    /// An image in a slot of the root device.
    pub(super) fn image(&mut self, slot: u16, image: &'a Exported) {
        let fds = image.descriptors.iter().map(|f| f.as_fd()).collect();
        let image = image.spec.clone();
        self.requests.push((Command::AddImage { slot, image }, fds));
        self.addressed.push(DeviceId::Root);
    }

    /// An image attached as a disk. The VMM requests its missing bytes over `misses`.
    pub(super) fn disk_image(&mut self, device: DeviceId, image: &'a Exported, misses: &'a OwnedFd) {
        let blobs = image.spec.blobs.clone();
        let backend = Backend::Image { blobs };
        let fds = image
            .descriptors
            .iter()
            .chain([misses])
            .map(|f| f.as_fd())
            .collect();
        self.requests.push((Command::Attach { device, backend }, fds));
        self.addressed.push(device);
    }

    /// A backend that is one descriptor.
    pub(super) fn attach(&mut self, device: DeviceId, backend: Backend, fd: &'a OwnedFd) {
        self.requests
            .push((Command::Attach { device, backend }, vec![fd.as_fd()]));
        self.addressed.push(device);
    }

    /// Sets the rate limits of the machine's devices.
    pub(super) fn limit(&mut self, limits: &RateLimits, image_disk: bool) {
        let commands = rate_limits::commands(limits, image_disk);
        self.requests
            .extend(commands.into_iter().map(|command| (command, Vec::new())));
    }

    /// Sends every request, then waits for all answers. Returns the devices that got no backend, which the thaw must declare empty.
    ///
    /// # Errors
    /// The first refusal of the VMM.
    pub(super) async fn send(self, control: &ControlClient) -> Result<Vec<DeviceId>, Error> {
        let sent = self.begin(control).await?;
        sent.answered().await
    }

    /// Sends every request, and waits for no answer.
    pub(super) async fn begin(self, control: &ControlClient) -> Result<Sent, Error> {
        let is_left = |device: &DeviceId| is_swappable(device) && !self.addressed.contains(device);
        let empty = DeviceId::ALL.into_iter().filter(is_left).collect();
        let mut pending = Vec::with_capacity(self.requests.len());
        for (command, fds) in self.requests {
            let device = match &command {
                Command::Attach { device, .. } | Command::Limit { device, .. } => Some(*device),
                _ => None,
            };
            pending.push((device, control.request(command, &fds).await?));
        }
        Ok(Sent { pending, empty })
    }
}

/// Requests of backends that the VMM has not answered yet.
pub(super) struct Sent {
    /// `None` for an image.
    pending: Vec<(Option<DeviceId>, Pending)>,
    /// The devices that got no backend.
    pub empty: Vec<DeviceId>,
}

impl Sent {
    /// Waits for all answers. Returns the devices that got no backend.
    ///
    /// # Errors
    /// The first refusal of the VMM.
    pub(super) async fn answered(self) -> Result<Vec<DeviceId>, Error> {
        for (device, pending) in self.pending {
            pending.answer().await.map_err(|e| {
                let failure = Error::from(e);
                let device = device.map_or("image".into(), |device| format!("{device:?}").to_lowercase());
                let what = format!("{device}: {}", failure.what);
                Error { what, ..failure }
            })?;
        }
        Ok(self.empty)
    }
}

/// Whether one of the images is a disk.
pub(super) fn has_image_disk(images: &[Shown]) -> bool {
    images.iter().any(|shown| shown.slot == IMAGE_DISK_SLOT)
}

/// Both ends of a machine's miss sockets and console: those that thawd keeps, and those to attach.
#[derive(Debug)]
pub(super) struct Ends {
    /// The miss server of the root device, and one for the image disk, if there is an image disk.
    pub misses: Vec<MissServer>,
    root_misses: OwnedFd,
    disk_misses: Option<OwnedFd>,
    pub console: Console,
    pub console_pipe: OwnedFd,
}

impl Ends {
    /// `given` are the images that the VMM has, or is about to get.
    pub(super) fn make(images: crate::images::Images, given: &Given, with_disk: bool) -> Result<Ends, Error> {
        let (server, root_misses) = miss_server(images.clone(), given)?;
        let (console, console_pipe) =
            Console::new().map_err(|e| Error::system("cannot make a console pipe", &e))?;
        let mut ends = Ends {
            misses: vec![server],
            root_misses,
            disk_misses: None,
            console,
            console_pipe,
        };
        if with_disk {
            ends.add_disk(images, given)?;
        }
        Ok(ends)
    }

    /// Adds the miss server of an image disk.
    pub(super) fn add_disk(&mut self, images: crate::images::Images, given: &Given) -> Result<(), Error> {
        let (server, socket) = miss_server(images, given)?;
        self.misses.push(server);
        self.disk_misses = Some(socket);
        Ok(())
    }

    pub(super) fn attach<'a>(&'a self, backends: &mut Backends<'a>) {
        backends.attach(DeviceId::Root, Backend::Misses, &self.root_misses);
        backends.attach(DeviceId::Console, Backend::Console, &self.console_pipe);
    }

    /// Shows each image in its slot.
    pub(super) fn show<'a>(&'a self, images: &'a [(u16, Exported)], backends: &mut Backends<'a>) {
        for (slot, image) in images {
            match &self.disk_misses {
                Some(misses) if *slot == IMAGE_DISK_SLOT => backends.disk_image(IMAGE_DISK, image, misses),
                _ => backends.image(*slot, image),
            }
        }
    }

    /// Replaces the miss sockets and the console of a machine that runs already.
    pub(super) fn attach_again<'a>(&'a self, backends: &mut Backends<'a>) {
        self.attach(backends);
        if let Some(misses) = &self.disk_misses {
            backends.attach(IMAGE_DISK, Backend::Misses, misses);
        }
    }
}

fn miss_server(images: crate::images::Images, given: &Given) -> Result<(MissServer, OwnedFd), Error> {
    MissServer::start(images, given.clone()).map_err(|e| Error::system("cannot make a miss socket", &e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_client::Vmm;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use thaw_protocol::control::{ControlError, ErrorCode, FromVmm, Request, Response};
    use thaw_protocol::packet;

    /// Reads three requests, then answers them from the last to the first, refusing those of the named devices.
    fn vmm(socket: OwnedFd, refused: &'static [DeviceId]) -> std::thread::JoinHandle<Vec<DeviceId>> {
        std::thread::spawn(move || {
            let requests: Vec<_> = (0..3)
                .map(|_| packet::receive::<Request>(&socket).unwrap())
                .collect();
            let mut devices = Vec::new();
            for (Request { id, command }, fds) in requests.into_iter().rev() {
                let Command::Attach { device, .. } = command else {
                    panic!("not an attach")
                };
                assert_eq!(fds.len(), 1, "{device:?}");
                let error = ControlError {
                    code: ErrorCode::Invalid,
                    message: "no".into(),
                };
                let result = match refused.contains(&device) {
                    true => Err(error),
                    false => Ok(Response::Done),
                };
                packet::send(&socket, &FromVmm::Reply { id, result }, &[]).unwrap();
                devices.push(device);
            }
            devices
        })
    }

    #[tokio::test]
    async fn devices_are_attached_at_once_and_first_refusal_is_reported() {
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        for refused in [&[][..], &[DeviceId::Net, DeviceId::Blk0]] {
            let kind = SocketType::SEQPACKET;
            let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
            let control = ControlClient::new(ours, Vmm(1)).unwrap();
            let vmm = vmm(theirs, refused);
            let mut backends = Backends::default();
            backends.attach(DeviceId::Blk0, Backend::Disk { read_only: false }, &file);
            let tap = Backend::Tap {
                mac: [2; 6],
                prepared: true,
            };
            backends.attach(DeviceId::Net, tap, &file);
            backends.attach(DeviceId::Console, Backend::Console, &file);
            let sent = backends.send(&control).await;
            let attached = vmm.join().unwrap();
            match refused {
                [] => {
                    let mut devices = [attached, sent.unwrap()].concat();
                    devices.sort();
                    let swappable: Vec<_> = DeviceId::ALL.into_iter().filter(is_swappable).collect();
                    assert_eq!(devices, swappable, "which is in slot order");
                }
                _ => assert_eq!(sent.unwrap_err().what, "blk0: no"),
            }
        }
    }
}
