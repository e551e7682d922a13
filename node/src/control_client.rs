//! Our end of one VMM's control socket.
//!
//! Requests may overlap: each reply finds its request by number. What the VMM says unasked is kept as a state
//! ([`Life`]) rather than a queue, so nothing can grow and whoever looks late still sees it.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::SocketType;
use thaw_protocol::control::{
    Command, ControlError, ErrorCode, Event, ExitReason, FromVmm, Request, Response,
};
use thaw_protocol::packet::{self, PacketError, Receiver};
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};

use crate::exit::{ExitCode, Failure};
use crate::readiness::{BOTH, register};

/// What the VMM has told unasked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// When the agent rang, CLOCK_MONOTONIC nanoseconds.
    pub doorbell: Option<u64>,
    /// The machine ended, and why.
    pub exited: Option<ExitReason>,
    /// The connection is gone.
    pub closed: bool,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The VMM refused.
    #[error(transparent)]
    Refused(#[from] ControlError),
    /// The connection is gone: the VMM ended.
    #[error("thaw-vmm closed its control connection")]
    Closed,
    /// The request could not be sent.
    #[error("cannot send to thaw-vmm: {0}")]
    Send(PacketError),
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Failure {
        let code = match &error {
            CallError::Refused(refusal) => match refusal.code {
                ErrorCode::Kvm => ExitCode::KvmInadequate,
                ErrorCode::NotPvh => ExitCode::KernelNotPvh,
                ErrorCode::MemoryTooSmall => ExitCode::MemoryTooSmall,
                ErrorCode::Snapshot => ExitCode::SnapshotDamaged,
                ErrorCode::Incompatible => ExitCode::SnapshotIncompatible,
                ErrorCode::Shared => ExitCode::Shared,
                ErrorCode::WrongState | ErrorCode::Invalid | ErrorCode::Unswapped | ErrorCode::System => {
                    ExitCode::VmmFailed
                }
            },
            CallError::Closed | CallError::Send(_) => ExitCode::VmmFailed,
        };
        let failure = Failure::new(code, error.to_string());
        match error {
            CallError::Closed => failure.lost(),
            CallError::Refused(_) | CallError::Send(_) => failure,
        }
    }
}

type Reply = Result<(Response, Vec<OwnedFd>), ControlError>;

#[derive(Debug)]
struct Shared {
    socket: AsyncFd<OwnedFd>,
    /// Who waits for which number. Taken away when the connection ends: nobody waits for ever.
    pending: Mutex<Option<HashMap<u32, oneshot::Sender<Reply>>>>,
    life: watch::Sender<Life>,
}

/// A connection. Dropping it closes it, which ends a tethered VMM.
#[derive(Debug)]
pub struct ControlClient {
    shared: Arc<Shared>,
    next: AtomicU32,
    reader: tokio::task::JoinHandle<()>,
}

impl ControlClient {
    /// Connects to a VMM's socket by path. Within a tokio runtime.
    pub fn connect(path: &Path) -> Result<ControlClient, Failure> {
        Ok(ControlClient::new(thaw_pools::vmm::connect(
            path,
            SocketType::SEQPACKET,
        )?)?)
    }

    /// Over a connected SEQPACKET socket. Within a tokio runtime.
    pub fn new(socket: OwnedFd) -> Result<ControlClient, CallError> {
        let io = |e: std::io::Error| CallError::Send(PacketError::Io(e));
        rustix::io::ioctl_fionbio(&socket, true).map_err(|e| io(e.into()))?;
        let shared = Arc::new(Shared {
            socket: register(socket, BOTH).map_err(io)?,
            pending: Mutex::new(Some(HashMap::new())),
            life: watch::Sender::new(Life::default()),
        });
        let reader = tokio::spawn(read_all(shared.clone()));
        Ok(ControlClient {
            shared,
            next: AtomicU32::new(1),
            reader,
        })
    }

    /// Asks, with descriptors beside the request, and waits for the answer. A request on an idle connection is sent by
    /// the first poll, so that several, polled in turn, arrive in that order.
    pub async fn call(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<Response, CallError> {
        Ok(self.call_for_descriptors(command, fds).await?.0)
    }

    /// As [`ControlClient::call`], with the descriptors that came beside the answer.
    pub async fn call_for_descriptors(
        &self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Response, Vec<OwnedFd>), CallError> {
        self.request(command, fds).await?.answer().await
    }

    /// Sends a request; its answer may be waited for later. The VMM takes requests in the order they were sent.
    pub async fn request(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<Pending, CallError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        match self.shared.waiting().as_mut() {
            Some(pending) => pending.insert(id, sender),
            None => return Err(CallError::Closed),
        };
        if let Err(e) = self.send(&Request { id, command }, fds).await {
            if let Some(pending) = self.shared.waiting().as_mut() {
                pending.remove(&id);
            }
            return Err(e);
        }
        Ok(Pending(receiver))
    }

    async fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), CallError> {
        // Tried before it is waited for: a request on an idle connection is sent by the first poll.
        if let Some(result) = self.try_send(request, fds) {
            return result;
        }
        loop {
            let mut ready = self
                .shared
                .socket
                .writable()
                .await
                .map_err(|e| CallError::Send(e.into()))?;
            match self.try_send(request, fds) {
                Some(result) => return result,
                None => ready.clear_ready(),
            }
        }
    }

    /// None when the socket has no room.
    fn try_send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Option<Result<(), CallError>> {
        match packet::send(self.shared.socket.get_ref().as_fd(), request, fds) {
            Ok(()) => Some(Ok(())),
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(PacketError::Io(e))
                if matches!(
                    e.kind(),
                    std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset
                ) =>
            {
                Some(Err(CallError::Closed))
            }
            Err(e) => Some(Err(CallError::Send(e))),
        }
    }

    /// What has been told unasked, now and as it changes.
    pub fn life(&self) -> watch::Receiver<Life> {
        self.shared.life.subscribe()
    }
}

/// A request that was sent.
#[derive(Debug)]
#[must_use = "a refusal is in the answer"]
pub struct Pending(oneshot::Receiver<Reply>);

impl Pending {
    /// Waits for the answer.
    pub async fn answer(self) -> Result<(Response, Vec<OwnedFd>), CallError> {
        match self.0.await {
            Ok(reply) => Ok(reply?),
            Err(_) => Err(CallError::Closed),
        }
    }
}

impl Drop for ControlClient {
    fn drop(&mut self) {
        self.reader.abort();
        // The reader's share of the socket goes when the runtime gets to it; the VMM must see the end now.
        let _ = rustix::net::shutdown(self.shared.socket.get_ref(), rustix::net::Shutdown::Both);
    }
}

async fn read_all(shared: Arc<Shared>) {
    let mut receiver = Receiver::default();
    let end = loop {
        let mut ready = match shared.socket.readable().await {
            Ok(ready) => ready,
            Err(e) => break PacketError::Io(e),
        };
        match receiver.receive::<FromVmm>(shared.socket.get_ref().as_fd()) {
            Ok((message, descriptors)) => shared.take(message, descriptors),
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => ready.clear_ready(),
            Err(e) => break e,
        }
    };
    tracing::debug!("control connection ended: {end}");
    *shared.waiting() = None;
    shared.life.send_modify(|life| life.closed = true);
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u32, oneshot::Sender<Reply>>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, message: FromVmm, descriptors: Vec<OwnedFd>) {
        match message {
            FromVmm::Reply { id, result } => {
                let waiting = self.waiting().as_mut().and_then(|pending| pending.remove(&id));
                match waiting {
                    Some(sender) => drop(sender.send(result.map(|r| (r, descriptors)))),
                    None => tracing::warn!(id, "thaw-vmm answered what was not asked"),
                }
            }
            FromVmm::Event(Event::Doorbell { at }) => self.life.send_modify(|life| life.doorbell = Some(at)),
            FromVmm::Event(Event::Exited(reason)) => self.life.send_modify(|life| life.exited = Some(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, socketpair};
    use thaw_protocol::control::{MachineState, StartTimes};

    fn pair() -> (ControlClient, OwnedFd) {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        (ControlClient::new(ours).unwrap(), theirs)
    }

    #[tokio::test]
    async fn replies_find_their_requests_in_any_order() {
        let (client, vmm) = pair();
        let vmm = std::thread::spawn(move || {
            let (first, fds) = packet::receive::<Request>(&vmm).unwrap();
            let (second, _) = packet::receive::<Request>(&vmm).unwrap();
            assert_eq!(fds.len(), 1);
            let status = Response::Status {
                state: MachineState::Running,
                times: StartTimes::default(),
                faults: 0,
            };
            let refusal = ControlError {
                code: ErrorCode::NotPvh,
                message: "no note".into(),
            };
            packet::send(
                &vmm,
                &FromVmm::Reply {
                    id: 999,
                    result: Ok(Response::Done),
                },
                &[],
            )
            .unwrap();
            packet::send(
                &vmm,
                &FromVmm::Reply {
                    id: second.id,
                    result: Ok(status),
                },
                &[],
            )
            .unwrap();
            packet::send(
                &vmm,
                &FromVmm::Reply {
                    id: first.id,
                    result: Err(refusal),
                },
                &[],
            )
            .unwrap();
            vmm
        });
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = [file.as_fd()];
        let boot = client.call(Command::Boot { cmdline: "x".into() }, &fds);
        let status = client.call(Command::Status, &[]);
        let (boot, status) = tokio::join!(boot, status);
        assert_eq!(Failure::from(boot.unwrap_err()).code, ExitCode::KernelNotPvh);
        assert!(matches!(
            status.unwrap(),
            Response::Status {
                state: MachineState::Running,
                ..
            }
        ));
        drop(vmm.join().unwrap());
    }

    #[tokio::test]
    async fn events_hold_and_an_end_reaches_everyone_waiting() {
        let (client, vmm) = pair();
        let mut life = client.life();
        packet::send(&vmm, &FromVmm::Event(Event::Doorbell { at: 7 }), &[]).unwrap();
        life.wait_for(|l| l.doorbell == Some(7)).await.unwrap();
        let waiting = client.call(Command::Status, &[]);
        let end = async {
            packet::send(&vmm, &FromVmm::Event(Event::Exited(ExitReason::Reset)), &[]).unwrap();
            life.wait_for(|l| l.exited.is_some()).await.unwrap();
            drop(vmm);
        };
        let (answer, ()) = tokio::join!(waiting, end);
        assert!(matches!(answer, Err(CallError::Closed)));
        let late = client.life().wait_for(|l| l.closed).await.unwrap().clone();
        assert_eq!(
            late,
            Life {
                doorbell: Some(7),
                exited: Some(ExitReason::Reset),
                closed: true
            }
        );
        assert!(matches!(
            client.call(Command::Status, &[]).await,
            Err(CallError::Closed)
        ));
    }

    #[tokio::test]
    async fn dropping_it_closes_the_connection_at_once() {
        let (client, vmm) = pair();
        drop(client);
        assert!(matches!(
            packet::receive::<Request>(&vmm),
            Err(PacketError::Closed)
        ));
    }
}
