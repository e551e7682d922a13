//! The guest under thaw-vmm, driven over its control socket as `thawd` does.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::SocketType;
use thaw_network::GUEST_MAC;
use thaw_pools::share::{self, Serving};
use thaw_pools::vmm;
use thaw_protocol::control::{Backend, Command, DeviceId};
use thaw_protocol::share::{Serve, Share};

use super::setting::{MEMORY_MIB, Setting};
use super::{VOLUME, collect, transfer};
use crate::Report;
use crate::boot::cmdline;
use crate::boot::thaw::dial;
use crate::vmm::{Vmm, open_kvm};

/// The VMM's name in rows.
pub const NAME: &str = "thaw";

/// Boots the guest, and takes what it measures.
pub fn measure(setting: &Setting, rounds: usize, report: &mut Report) -> io::Result<()> {
    setting.order(rounds, true)?;
    let (console, said) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let log: OwnedFd = File::create(setting.directory.join("thaw-vmm.log"))?.into();
    let (kvm, kernel) = (open_kvm()?, File::open(&setting.kernel)?);
    let mut machine = Vmm::spawn(&setting.directory, &log)?;
    machine.create(&kvm, 1, MEMORY_MIB)?;
    machine.attach(DeviceId::Console, Backend::Console, said.as_fd())?;
    drop(said);
    let guest_image = File::open(&setting.guest_image)?;
    machine.attach(DeviceId::Pmem0, Backend::Pmem, guest_image.as_fd())?;
    let disk = File::options().read(true).write(true).open(&setting.disk)?;
    let writable = Backend::Disk { read_only: false };
    machine.attach(DeviceId::Blk0, writable, disk.as_fd())?;
    let tap = Backend::Tap {
        mac: GUEST_MAC,
        prepared: true,
    };
    machine.attach(DeviceId::Net, tap, setting.thaw.tap.as_fd())?;
    let serving = serve(setting)?;
    machine.attach(DeviceId::Shared, Backend::Share, serving.relay.as_fd())?;
    let socket = setting.directory.join("vsock");
    // The guest before left it.
    let _ = std::fs::remove_file(&socket);
    let vsock = vmm::listen(&socket, SocketType::STREAM).map_err(io::Error::other)?;
    machine.attach(DeviceId::Vsock, Backend::Vsock, vsock.as_fd())?;
    machine.settle()?;
    let cmdline = cmdline("root=/dev/pmem0 rootflags=dax");
    machine.call(Command::Boot { cmdline }, &[kernel.as_fd()])?;
    transfer::call(move || dial(&socket));
    collect(File::from(console), NAME, report)
}

/// Starts a thaw-share of the volume.
fn serve(setting: &Setting) -> io::Result<Serving> {
    let program = share::find().map_err(io::Error::other)?;
    let log: OwnedFd = File::create(setting.directory.join("thaw-share.log"))?.into();
    let volume = File::open(setting.shared.join(VOLUME))?;
    let serve = Serve {
        shares: vec![Share {
            name: VOLUME.into(),
            read_only: false,
        }],
        slots: 0,
        devices: false,
    };
    share::start(&program, &log, &serve, &[volume.as_fd()], None).map_err(io::Error::other)
}
