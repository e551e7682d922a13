//! Answers one VMM's chunk misses: fills the cache file, then replies.
//!
//! Invariants: a VMM gets only bytes of images it was given ([`Given`]). At most [`AT_ONCE`] misses of a socket are in progress,
//! and at most [`IN_PERIOD`] start in each [`PERIOD`]. No further misses are read meanwhile, so neither a guest nor a hostile VMM
//! can make the host queue or work without limit. Nothing is lost if this process dies: the VMM keeps its misses until they are
//! answered, and sends them again to the process that hands it the next socket.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use thaw_imagefs::digest::Digest;
use thaw_log::LogLimit;
use thaw_protocol::miss::{Filled, Miss};
use thaw_protocol::packet::{self, PacketError, Receiver};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::images::Images;
use crate::miss_counts::Refusal;
use crate::readiness::{BOTH, register};

mod given;

pub use given::Given;

/// Maximum number of misses of one socket in progress.
const AT_ONCE: usize = 16;
/// Maximum number of misses taken from one socket in a [`PERIOD`]: 10,000 a second, more than 1 GB/s of chunks.
const IN_PERIOD: u32 = 1000;
const PERIOD: Duration = Duration::from_millis(100);
/// How long a refused miss keeps its place among [`AT_ONCE`] before it is answered. A VMM that sends only refused misses gets 1,600 answers
/// a second.
const REFUSAL_PAUSE: Duration = Duration::from_millis(10);

/// Serves until it is dropped or the VMM closes its end.
#[derive(Debug)]
pub struct MissServer {
    task: tokio::task::JoinHandle<()>,
}

impl MissServer {
    /// Starts a server for the images `given` to a VMM, and returns the other end, for the VMM. Must be called within a tokio runtime.
    pub fn start(images: Images, given: Given) -> std::io::Result<(MissServer, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let server = Arc::new(Server {
            socket: register(ours, BOTH)?,
            images,
            given,
            log: LogLimit::default(),
        });
        Ok((
            MissServer {
                task: tokio::spawn(serve(server)),
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

struct Server {
    socket: AsyncFd<OwnedFd>,
    images: Images,
    given: Given,
    log: LogLimit,
}

async fn serve(server: Arc<Server>) {
    let mut receiver = Receiver::default();
    let mut pace = Pace::new();
    // Answers end with the server; the VMM repeats requests without an answer.
    let mut answers = JoinSet::new();
    loop {
        while answers.len() >= AT_ONCE {
            answers.join_next().await;
        }
        if pace.next().await {
            server.images.miss_counts().hold_back();
        }
        let miss = match receive(&server.socket, &mut receiver).await {
            Ok(miss) => miss,
            Err(PacketError::Closed) => return,
            Err(e) => {
                if !matches!(e, PacketError::Io(_)) {
                    server.images.miss_counts().count(Refusal::Malformed);
                }
                tracing::warn!("a VMM's miss socket is closed: {e}");
                return;
            }
        };
        let server = server.clone();
        answers.spawn(async move {
            let result = server.fill(&miss).await;
            if let Err(e) = server.answer(&Filled { id: miss.id, result }).await {
                tracing::debug!("cannot answer a miss: {e}");
            }
        });
    }
}

impl Server {
    async fn fill(&self, miss: &Miss) -> Result<(), String> {
        let blob = Digest::from(miss.blob);
        let (offset, length) = (miss.offset, miss.length);
        tracing::trace!(%blob, offset, length, "a miss");
        if let Err(why) = self.given.check(miss) {
            self.images.miss_counts().count(why);
            let answer = why.sentence(miss);
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(dropped, "a VMM's miss is refused: {answer}");
            }
            tokio::time::sleep(REFUSAL_PAUSE).await;
            return Err(answer);
        }
        let filled = self.images.fill(&blob, offset, length.into()).await;
        // Logged with all details: the guest sees only EIO.
        filled.map_err(|error| {
            if let Some(dropped) = self.log.pass() {
                let code = error.code();
                tracing::error!(%blob, offset, length, code, dropped, "a guest's read fails: {error}");
            }
            error.to_string()
        })
    }

    async fn answer(&self, filled: &Filled) -> Result<(), PacketError> {
        loop {
            let mut ready = self.socket.writable().await?;
            match packet::send(self.socket.get_ref().as_fd(), filled, &[]) {
                Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => ready.clear_ready(),
                result => return result,
            }
        }
    }
}

async fn receive(socket: &AsyncFd<OwnedFd>, receiver: &mut Receiver) -> Result<Miss, PacketError> {
    loop {
        // A socket that always has another packet never makes its task wait.
        tokio::task::consume_budget().await;
        let mut ready = socket.readable().await?;
        match receiver.receive::<Miss>(socket.get_ref().as_fd()) {
            Ok((miss, _)) => return Ok(miss),
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => ready.clear_ready(),
            Err(e) => return Err(e),
        }
    }
}

/// The rate at which misses are taken.
struct Pace {
    since: Instant,
    taken: u32,
}

impl Pace {
    fn new() -> Pace {
        Pace {
            since: Instant::now(),
            taken: 0,
        }
    }

    /// Waits until the next miss may be taken. Returns whether it had to wait.
    async fn next(&mut self) -> bool {
        let end = self.since + PERIOD;
        let full = self.taken == IN_PERIOD && Instant::now() < end;
        if full {
            tokio::time::sleep_until(end).await;
        }
        if Instant::now() >= end {
            *self = Pace::new();
        }
        self.taken += 1;
        full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn flood_of_misses_is_held_to_its_pace() {
        let (begin, mut pace, mut held) = (Instant::now(), Pace::new(), 0);
        for _ in 0..10 * IN_PERIOD {
            held += u32::from(pace.next().await);
        }
        assert_eq!(held, 9);
        let took = begin.elapsed();
        assert!((9 * PERIOD..10 * PERIOD).contains(&took), "{took:?}");
        // A VMM that asks slowly never waits.
        pace = Pace::new();
        for _ in 0..3 * IN_PERIOD {
            tokio::time::advance(PERIOD / 100).await;
            assert!(!pace.next().await);
        }
    }
}
