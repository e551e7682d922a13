//! The floor of any VM that waits in another process: what is added to it when the claim comes over a socket, and the
//! guest's first byte goes back over one. These two wake-ups no pool of processes is without.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use thaw_protocol::packet::{receive, send};

use super::floor::{Depth, Frozen};
use crate::clock::{monotonic_ns, us_since};

/// First argument of the bench program when it shall be such a process.
pub const ARGUMENT: &str = "pooled-floor";

/// The claimer's end.
pub struct PooledFloor {
    process: Child,
    socket: OwnedFd,
}

impl PooledFloor {
    /// Starts the process, which maps `memory` into each machine.
    pub fn spawn(memory: &File) -> io::Result<PooledFloor> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let process = Command::new(std::env::current_exe()?)
            .arg(ARGUMENT)
            .stdin(Stdio::from(theirs))
            .spawn()?;
        send(&ours, &b't', &[memory.as_fd()]).map_err(io::Error::other)?;
        Ok(PooledFloor {
            process,
            socket: ours,
        })
    }

    /// Claim to first byte, in microseconds.
    pub fn claim(&self) -> io::Result<f64> {
        byte_from(&self.socket)?;
        let start = monotonic_ns();
        rustix::io::write(&self.socket, b"c")?;
        byte_from(&self.socket)?;
        let taken = us_since(start);
        rustix::io::write(&self.socket, b"d")?;
        Ok(taken)
    }
}

impl Drop for PooledFloor {
    fn drop(&mut self) {
        // It may be within a machine; its end is the kernel's to clean up.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The process: a new machine for each claim, with everything set, until the claimer is gone.
pub fn serve() -> io::Result<()> {
    let socket = std::io::stdin();
    let (_, descriptors) = receive::<u8>(&socket).map_err(io::Error::other)?;
    let memory = descriptors
        .into_iter()
        .next()
        .ok_or(io::Error::other("no template came"))?;
    let frozen = Frozen::new(memory.into())?;
    loop {
        let mut machine = frozen.shell()?;
        frozen.restore(&machine, Depth::Whole)?;
        rustix::io::write(&socket, b"r")?;
        if byte_from(&socket).is_err() {
            return Ok(());
        }
        machine.run()?;
        rustix::io::write(&socket, b"g")?;
        // Taking the machine apart would keep the claimer from its processor.
        byte_from(&socket)?;
    }
}

fn byte_from(socket: impl AsFd) -> io::Result<()> {
    let socket: BorrowedFd<'_> = socket.as_fd();
    let mut byte = [0u8; 1];
    match rustix::io::retry_on_intr(|| rustix::io::read(socket, &mut byte))? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}
