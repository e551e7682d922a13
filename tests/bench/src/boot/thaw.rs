//! One cold boot under thaw-vmm, driven over its control socket as `thawd` does.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::SocketType;
use thaw_pools::vmm;
use thaw_protocol::control::{Backend, Command, DeviceId, StartTimes};
use thaw_protocol::handshake::HANDSHAKE_PORT;

use super::{Boot, MEMORY_MIB, agent_span, cmdline};
use crate::clock::monotonic_ns;
use crate::vmm::{Vmm, open_kvm};

/// Boots once.
pub fn boot(kernel: &Path, guest_image: &Path, directory: &Path) -> io::Result<Boot> {
    let kvm = open_kvm()?;
    let kernel = File::open(kernel)?;
    let guest_image = File::open(guest_image)?;
    let log: OwnedFd = File::create(directory.join("thaw-vmm.log"))?.into();
    let vsock_path = directory.join("vsock");

    let spawned = monotonic_ns();
    let mut vmm = Vmm::spawn(directory, &log)?;
    vmm.create(&kvm, 1, MEMORY_MIB)?;
    vmm.settle()?;
    let vsock = vmm::listen(&vsock_path, SocketType::STREAM).map_err(io::Error::other)?;
    vmm.attach(DeviceId::Vsock, Backend::Vsock, vsock.as_fd())?;
    vmm.attach(DeviceId::Pmem0, Backend::Pmem, guest_image.as_fd())?;
    let boot = Command::Boot {
        cmdline: cmdline("root=/dev/pmem0 rootflags=dax"),
    };
    vmm.call(boot, &[kernel.as_fd()])?;
    let doorbell = vmm.doorbell()?;

    let (times, _) = vmm.status()?;
    let agent = agent_span(dial(&vsock_path)?)?;
    let _ = vmm.call(Command::Shutdown, &[]);
    std::fs::remove_file(vsock_path)?;
    Ok(split(spawned, times, doorbell, agent))
}

fn split(spawned: u64, times: StartTimes, doorbell: u64, agent: f64) -> Boot {
    let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    let vmm = ms(spawned, times.entered);
    let total = ms(spawned, doorbell);
    Boot {
        vmm: Some(vmm),
        kernel: Some(total - vmm - agent),
        agent,
        total,
    }
}

/// A connection to the agent's handshake port.
pub fn dial(vsock: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::from(vmm::connect(vsock, SocketType::STREAM).map_err(io::Error::other)?);
    stream.write_all(format!("CONNECT {HANDSHAKE_PORT}\n").as_bytes())?;
    // The agent speaks only when spoken to, so nothing beyond the line can be in the buffer.
    let mut line = String::new();
    BufReader::new(stream.try_clone()?).read_line(&mut line)?;
    match line.starts_with("OK ") {
        true => Ok(stream),
        false => Err(io::Error::other(format!("the VMM answered {line:?}"))),
    }
}
