//! One cold boot under thaw-vmm, driven over its control socket as `thawd` does.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::SocketType;
use thaw_pools::vmm;
use thaw_protocol::control::{
    Backend, CONTROL_VERSION, Command, DeviceId, Event, FromVmm, MachineSpec, Request, Response, StartTimes,
};
use thaw_protocol::handshake::HANDSHAKE_PORT;
use thaw_protocol::packet::{receive, send};

use super::{Boot, MEMORY_MIB, agent_span, cmdline, monotonic_ns};

/// A connection to one VMM.
struct Control {
    socket: OwnedFd,
    next: u32,
}

impl Control {
    fn call(&mut self, command: Command, fds: &[BorrowedFd<'_>]) -> io::Result<Response> {
        self.next += 1;
        let id = self.next;
        send(&self.socket, &Request { id, command }, fds).map_err(io::Error::other)?;
        loop {
            match receive::<FromVmm>(&self.socket).map_err(io::Error::other)?.0 {
                FromVmm::Reply { id: answered, result } if answered == id => {
                    return result.map_err(io::Error::other);
                }
                FromVmm::Event(Event::Exited(reason)) => return Err(io::Error::other(format!("{reason:?}"))),
                _ => {}
            }
        }
    }

    fn doorbell(&self) -> io::Result<u64> {
        loop {
            match receive::<FromVmm>(&self.socket).map_err(io::Error::other)?.0 {
                FromVmm::Event(Event::Doorbell { at }) => return Ok(at),
                FromVmm::Event(Event::Exited(reason)) => return Err(io::Error::other(format!("{reason:?}"))),
                FromVmm::Reply { .. } => {}
            }
        }
    }
}

/// Boots once.
pub fn boot(kernel: &Path, guest_image: &Path, directory: &Path) -> io::Result<Boot> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    let kernel = File::open(kernel)?;
    let guest_image = File::open(guest_image)?;
    let log: OwnedFd = File::create(directory.join("thaw-vmm.log"))?.into();
    let program = vmm::find().map_err(io::Error::other)?;
    let (control_path, vsock_path) = (directory.join("control"), directory.join("vsock"));

    let spawned = monotonic_ns();
    let listener = vmm::listen(&control_path, SocketType::SEQPACKET).map_err(io::Error::other)?;
    let mut control = Control {
        socket: vmm::connect(&control_path, SocketType::SEQPACKET).map_err(io::Error::other)?,
        next: 0,
    };
    let process = vmm::spawn(&program, &listener, &log).map_err(io::Error::other)?;
    let machine = MachineSpec {
        vcpus: 1,
        memory_mib: MEMORY_MIB,
        tethered: true,
    };
    control.call(
        Command::Create {
            version: CONTROL_VERSION,
            machine,
        },
        &[kvm.as_fd()],
    )?;
    let vsock = vmm::listen(&vsock_path, SocketType::STREAM).map_err(io::Error::other)?;
    control.call(
        Command::Attach {
            device: DeviceId::Vsock,
            backend: Backend::Vsock,
        },
        &[vsock.as_fd()],
    )?;
    control.call(
        Command::Attach {
            device: DeviceId::Pmem0,
            backend: Backend::Pmem,
        },
        &[guest_image.as_fd()],
    )?;
    control.call(
        Command::Boot {
            cmdline: cmdline("root=/dev/pmem0 rootflags=dax"),
        },
        &[kernel.as_fd()],
    )?;
    let doorbell = control.doorbell()?;

    let Response::Status { times, .. } = control.call(Command::Status, &[])? else {
        return Err(io::Error::other(
            "the VMM answered a status request with no status",
        ));
    };
    let agent = agent_span(dial(&vsock_path)?)?;
    let _ = control.call(Command::Shutdown, &[]);
    drop(process);
    for path in [control_path, vsock_path] {
        std::fs::remove_file(path)?;
    }
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
fn dial(vsock: &Path) -> io::Result<UnixStream> {
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
