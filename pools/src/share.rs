//! A `thaw-share` process: it serves directories of this host to one guest ([`thaw_protocol::share`]).
//!
//! It ends by itself when the VMM at the other end of its relay ends, whichever process started them. So its starter keeps no copy of the
//! relay's other end: if we are killed before the VMM has it, thaw-share ends too.
//!
//! [`attach()`] and [`detach`] add and remove shares while it runs.

mod attach;
mod error;
mod mount;
mod source;

pub use attach::{attach, detach};
pub use error::AttachError;
pub use source::{FsOption, Source, SourceError, Tree};

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_protocol::packet::{self, PacketError};
use thaw_protocol::share::Serve;

use crate::Error;
use crate::vmm::{self, Jail, VmmProcess};

/// Environment variable that names the binary.
pub const SHARE_VARIABLE: &str = "THAW_SHARE";
/// Bytes that the relay's buffers hold each way: the largest message.
const BUFFER: usize = 2 << 20;

/// The path of the binary: `$THAW_SHARE`, or else in the directory of the running program.
pub fn find() -> Result<PathBuf, Error> {
    vmm::find_program(SHARE_VARIABLE, "thaw-share", |looked| Error::ShareMissing {
        looked,
    })
}

/// A thaw-share that serves, and the end of its relay for the VMM (`Backend::Share`).
#[derive(Debug)]
pub struct Serving {
    pub process: VmmProcess,
    pub relay: OwnedFd,
}

/// State that a guest's next thaw-share takes over from the one before.
#[derive(Clone, Copy, Debug)]
pub struct Lasting<'a> {
    /// A read-write file that records which file each node id of the guest refers to.
    pub ledger: BorrowedFd<'a>,
    /// The mounts of the one before ([`mounts`]), which the next serves as they are.
    pub mounts: Option<BorrowedFd<'a>>,
}

/// The mount namespace of a thaw-share. Its shares stay mounted while this descriptor is open.
///
/// # Errors
/// If the caller lacks the right to it, or the process has ended.
pub fn mounts(process: &VmmProcess) -> io::Result<OwnedFd> {
    let record = process.record();
    let namespace = File::open(format!("/proc/{}/ns/mnt", record.pid))?;
    // Another process may have the pid by now.
    match record.lives() {
        true => Ok(namespace.into()),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Starts `program`, which logs to `log`, and makes it serve `files`, one for each share of `serve`. Blocks until it serves.
///
/// # Errors
/// [`Error::Share`] with its reason if it refuses.
pub fn start(
    program: &Path,
    log: &OwnedFd,
    serve: &Serve,
    files: &[BorrowedFd<'_>],
    lasting: Option<Lasting<'_>>,
) -> Result<Serving, Error> {
    let pair = |kind| {
        let made = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        made.map_err(|e| Error::system("make sockets")(e.into()))
    };
    let (ours, theirs) = pair(SocketType::SEQPACKET)?;
    let (relay, far_end) = pair(SocketType::STREAM)?;
    for end in [&relay, &far_end] {
        // To exceed the host's limit needs CAP_NET_ADMIN; smaller buffers only cost more system calls for large messages.
        if rustix::net::sockopt::set_socket_send_buffer_size_force(end, BUFFER).is_err() {
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(end, BUFFER);
        }
    }
    // It starts only with its whole jail. Its root has files, so it makes namespaces of its own.
    let process = vmm::start(program, &theirs, log, Jail::Whole, None)?;
    drop(theirs);
    let descriptors: Vec<BorrowedFd<'_>> = [far_end.as_fd()]
        .into_iter()
        .chain(files.iter().copied())
        .chain(lasting.map(|lasting| lasting.ledger))
        .chain(lasting.and_then(|lasting| lasting.mounts))
        .collect();
    let said =
        packet::send(&ours, serve, &descriptors).and_then(|()| packet::receive::<Result<(), String>>(&ours));
    drop(far_end);
    match said {
        Ok((Ok(()), _)) => Ok(Serving { process, relay }),
        Ok((Err(why), _)) => Err(Error::Share { why }),
        Err(PacketError::Closed) => Err(Error::Share {
            why: "it ended before it served".into(),
        }),
        Err(e) => Err(Error::Share { why: e.to_string() }),
    }
}
