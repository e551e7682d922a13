//! Answering one VMM's chunk misses: fill the cache file, then say so.
//!
//! Invariants: at most [`AT_ONCE`] fills run for one VMM and no more of its questions are read meanwhile, so a guest
//! cannot make the host queue without end. Nothing is kept here that a death of this process could lose: the VMM holds
//! its questions until they are answered, and asks whoever hands it a socket next.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use thaw_protocol::miss::{Filled, Miss};
use thaw_protocol::packet::{self, PacketError};
use thaw_rootfs::digest::Digest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;

use crate::images::Images;
use crate::readiness::{BOTH, register};

/// No miss is of more bytes.
const MAX_LENGTH: u32 = 1 << 20;
/// Fills at once for one VMM.
const AT_ONCE: usize = 16;

/// Serves until it is dropped or the VMM closes its end.
#[derive(Debug)]
pub struct MissServer {
    task: tokio::task::JoinHandle<()>,
}

impl MissServer {
    /// A server, and the end to hand to the VMM. Within a tokio runtime.
    pub fn start(images: Images) -> std::io::Result<(MissServer, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let socket = Arc::new(register(ours, BOTH)?);
        Ok((
            MissServer {
                task: tokio::spawn(serve(socket, images)),
            },
            theirs,
        ))
    }
}

impl Drop for MissServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(socket: Arc<AsyncFd<OwnedFd>>, images: Images) {
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else {
            return;
        };
        let miss = match receive(&socket).await {
            Ok(miss) => miss,
            Err(PacketError::Closed) => return,
            Err(e) => {
                tracing::warn!("a VMM's miss socket broke: {e}");
                return;
            }
        };
        let (socket, images) = (socket.clone(), images.clone());
        tokio::spawn(async move {
            let result = fill(&images, &miss).await;
            if let Err(e) = answer(&socket, &Filled { id: miss.id, result }).await {
                tracing::debug!("cannot answer a miss: {e}");
            }
            drop(permit);
        });
    }
}

/// What is refused is logged, with all that is known of it: the guest sees EIO and no more.
async fn fill(images: &Images, miss: &Miss) -> Result<(), String> {
    let blob = Digest::from(miss.blob);
    let (offset, length) = (miss.offset, miss.length);
    tracing::trace!(%blob, offset, length, "a miss");
    let filled = match length <= MAX_LENGTH {
        true => images.fill(&blob, offset, length.into()).await,
        false => return Err(format!("a miss of {length} bytes is more than {MAX_LENGTH}")),
    };
    filled.map_err(|error| {
        tracing::error!(%blob, offset, length, code = error.code(), "a guest's read fails: {error}");
        error.to_string()
    })
}

async fn receive(socket: &AsyncFd<OwnedFd>) -> Result<Miss, PacketError> {
    loop {
        let mut ready = socket.readable().await?;
        match packet::receive::<Miss>(socket.get_ref().as_fd()) {
            Ok((miss, _)) => return Ok(miss),
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => ready.clear_ready(),
            Err(e) => return Err(e),
        }
    }
}

async fn answer(socket: &AsyncFd<OwnedFd>, filled: &Filled) -> Result<(), PacketError> {
    loop {
        let mut ready = socket.writable().await?;
        match packet::send(socket.get_ref().as_fd(), filled, &[]) {
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => ready.clear_ready(),
            result => return result,
        }
    }
}
