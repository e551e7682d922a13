//! What stands behind a machine's devices: said for every one of them, sent without waiting in between.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use thaw_protocol::control::{Backend, Command, DeviceId};

use crate::console::Console;
use crate::control_client::ControlClient;
use crate::exit::Failure;
use crate::images::Exported;
use crate::misses::MissServer;

/// Devices whose backend is handed in; that of the others is the VMM itself.
const SWAPPABLE: [DeviceId; 11] = [
    DeviceId::Root,
    DeviceId::Shared,
    DeviceId::Blk0,
    DeviceId::Blk1,
    DeviceId::Blk2,
    DeviceId::Blk3,
    DeviceId::Net,
    DeviceId::Vsock,
    DeviceId::Pmem0,
    DeviceId::Pmem1,
    DeviceId::Console,
];

/// What is to be attached, in order.
#[derive(Debug, Default)]
pub(super) struct Backends<'a> {
    requests: Vec<(Command, Vec<BorrowedFd<'a>>)>,
    spoken_of: Vec<DeviceId>,
}

impl<'a> Backends<'a> {
    /// An image in a slot of the root device.
    pub(super) fn image(&mut self, slot: u16, image: &'a Exported) {
        let fds = image.descriptors.iter().map(|f| f.as_fd()).collect();
        let image = image.spec.clone();
        self.requests.push((Command::AddImage { slot, image }, fds));
        self.spoken_of.push(DeviceId::Root);
    }

    /// A backend that is one descriptor.
    pub(super) fn attach(&mut self, device: DeviceId, backend: Backend, fd: &'a OwnedFd) {
        self.requests
            .push((Command::Attach { device, backend }, vec![fd.as_fd()]));
        self.spoken_of.push(device);
    }

    /// Says of every device not spoken of that it is to have none: a thaw wants an answer for each.
    pub(super) fn rest_is_empty(&mut self) {
        for device in SWAPPABLE {
            if !self.spoken_of.contains(&device) {
                let backend = Backend::Empty;
                self.requests
                    .push((Command::Attach { device, backend }, Vec::new()));
                self.spoken_of.push(device);
            }
        }
    }

    /// Sends all, then waits for the answers: the first refusal is the error.
    pub(super) async fn send(self, control: &ControlClient) -> Result<(), Failure> {
        let mut pending = Vec::with_capacity(self.requests.len());
        for (command, fds) in self.requests {
            let device = match &command {
                Command::Attach { device, .. } => format!("{device:?}").to_lowercase(),
                _ => "image".into(),
            };
            pending.push((device, control.request(command, &fds).await?));
        }
        for (device, pending) in pending {
            pending.answer().await.map_err(|e| {
                let failure = Failure::from(e);
                let what = format!("{device}: {}", failure.what);
                Failure { what, ..failure }
            })?;
        }
        Ok(())
    }
}

/// The ends of a machine's miss socket and console that are ours, and those to be attached.
#[derive(Debug)]
pub(super) struct Ends {
    pub misses: MissServer,
    pub miss_socket: OwnedFd,
    pub console: Console,
    pub console_pipe: OwnedFd,
}

impl Ends {
    pub(super) fn make(images: crate::images::Images) -> Result<Ends, Failure> {
        let (misses, miss_socket) =
            MissServer::start(images).map_err(|e| Failure::system("cannot make a miss socket", &e))?;
        let (console, console_pipe) =
            Console::new().map_err(|e| Failure::system("cannot make a console pipe", &e))?;
        Ok(Ends {
            misses,
            miss_socket,
            console,
            console_pipe,
        })
    }

    pub(super) fn attach<'a>(&'a self, backends: &mut Backends<'a>) {
        backends.attach(DeviceId::Root, Backend::Misses, &self.miss_socket);
        backends.attach(DeviceId::Console, Backend::Console, &self.console_pipe);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use thaw_protocol::control::{ControlError, ErrorCode, FromVmm, Request, Response};
    use thaw_protocol::packet;

    #[tokio::test]
    async fn every_device_is_spoken_of_once_without_waiting_and_the_first_refusal_is_told() {
        let kind = SocketType::SEQPACKET;
        let (ours, vmm) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let control = ControlClient::new(ours).unwrap();
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let mut backends = Backends::default();
        backends.attach(DeviceId::Blk0, Backend::Disk { read_only: false }, &file);
        backends.attach(DeviceId::Console, Backend::Console, &file);
        backends.rest_is_empty();
        let vmm = std::thread::spawn(move || {
            // All are read before any is answered.
            let requests: Vec<_> = (0..SWAPPABLE.len())
                .map(|_| packet::receive::<Request>(&vmm).unwrap())
                .collect();
            for (request, _) in requests.iter().rev() {
                let refused = matches!(
                    &request.command,
                    Command::Attach {
                        device: DeviceId::Blk0 | DeviceId::Net,
                        ..
                    }
                );
                let error = ControlError {
                    code: ErrorCode::Invalid,
                    message: "no".into(),
                };
                let result = if refused { Err(error) } else { Ok(Response::Done) };
                packet::send(
                    &vmm,
                    &FromVmm::Reply {
                        id: request.id,
                        result,
                    },
                    &[],
                )
                .unwrap();
            }
            requests
        });
        let refusal = backends.send(&control).await.unwrap_err();
        assert_eq!(refusal.what, "blk0: no");
        let mut devices = Vec::new();
        for (request, fds) in vmm.join().unwrap() {
            let Command::Attach { device, backend } = request.command else {
                panic!("not an attach")
            };
            assert_eq!(fds.is_empty(), backend == Backend::Empty, "{device:?}");
            devices.push(device);
        }
        devices.sort();
        let mut expected = SWAPPABLE.to_vec();
        expected.sort();
        assert_eq!(devices, expected);
    }
}
