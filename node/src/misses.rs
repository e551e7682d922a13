//! Answering one VMM's chunk misses: fill the cache file, then say so.
//!
//! Invariant: at most [`AT_ONCE`] fills run for one VMM and no more of its questions are read meanwhile, so a guest
//! cannot make the host queue without end.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use thaw_protocol::miss::{Filled, Miss};
use thaw_protocol::packet::{self, PacketError};
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;

use crate::images::Images;
use crate::readiness::{BOTH, register};

/// Fills at once for one VMM.
const AT_ONCE: usize = 8;

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
            let result = images.fill(miss.blob, miss.offset, miss.length).await;
            if let Err(reason) = &result {
                tracing::warn!(
                    offset = miss.offset,
                    length = miss.length,
                    "cannot fill a miss: {reason}"
                );
            }
            if let Err(e) = answer(&socket, &Filled { id: miss.id, result }).await {
                tracing::debug!("cannot answer a miss: {e}");
            }
            drop(permit);
        });
    }
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
