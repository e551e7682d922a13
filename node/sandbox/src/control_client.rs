//! Client of one VMM's control socket.
//!
//! Requests may overlap: each reply has its request's number. Events of the VMM are kept as a state ([`Life`]) and not as a
//! queue, so nothing grows and a late reader still sees them.
//!
//! Invariant: the VMM is hostile. Whatever it sends or withholds, a request ends within its time limit, with a reply of the right kind or
//! an error that names the VMM. The VMM can cause only a bounded amount of work, log and open descriptors ([`reader`]).

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::SocketType;
use thaw_protocol::control::{Command, ControlError, ExitReason, MachineSpec, Request, Response};
use thaw_protocol::packet::{self, PacketError};
use thaw_protocol::tags::Tagged;
use thaw_protocol::versions::CONTROL;
use thaw_sys::lock::Lock;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::error::Error;
use crate::readiness::register;

mod error;
mod reader;

pub use error::{CallError, Misconduct};

/// Maximum number of requests without a reply. Further requests fail.
const MAX_PENDING: usize = 1024;

/// The state of the VMM from its events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// When the agent rang the doorbell, CLOCK_MONOTONIC nanoseconds.
    pub doorbell: Option<u64>,
    /// Why the machine ended, if it has.
    pub exited: Option<ExitReason>,
    /// Whether the connection is closed.
    pub closed: bool,
    /// The VMM's misconduct, if the connection was closed because of it.
    pub misconduct: Option<Misconduct>,
    /// Why the machine's memory cannot be had, if the connection was closed because of that.
    pub memory_lost: Option<String>,
}

impl Life {
    /// Why the connection is closed, in words.
    pub fn closed_because(&self) -> String {
        match (&self.memory_lost, &self.misconduct) {
            (Some(why), _) => format!("its memory cannot be fetched: {why}"),
            (None, Some(misconduct)) => format!("thaw-vmm broke the control protocol: {misconduct}"),
            (None, None) => "thaw-vmm ended".into(),
        }
    }
}

/// A VMM, as errors and the log identify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vmm(pub i32);

impl fmt::Display for Vmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thaw-vmm (pid {})", self.0)
    }
}

type Reply = Result<(Response, Vec<OwnedFd>), ControlError>;

#[derive(Debug)]
struct Shared {
    socket: AsyncFd<OwnedFd>,
    vmm: Vmm,
    /// Requests without a reply, by number. A caller that gave up keeps its entry, so that a late reply does not count as unrequested.
    /// `None` once the connection ends, so that no caller waits for ever.
    pending: Mutex<Option<HashMap<u32, oneshot::Sender<Reply>>>>,
    life: watch::Sender<Life>,
}

/// A connection. Dropping it closes it, which ends a tethered VMM.
#[derive(Debug)]
pub struct ControlClient {
    shared: Arc<Shared>,
    /// The protocol version that both sides speak.
    version: u32,
    next: AtomicU32,
    reader: tokio::task::JoinHandle<()>,
}

impl ControlClient {
    /// Connects to the VMM of a sandbox that another process made, and negotiates the version first. `recorded` is the version in the
    /// sandbox's record. A VMM of version 4 does not understand the greeting, so that version is taken from the record.
    ///
    /// # Errors
    /// The VMM is of a release that this one does not support, has ended, or does not answer.
    pub async fn adopt(path: &Path, vmm: Vmm, recorded: u32) -> Result<ControlClient, Error> {
        let foreign = |error| CallError::Version { vmm, error };
        CONTROL.agree(recorded).map_err(foreign)?;
        let socket = thaw_pools::vmm::connect(path, SocketType::SEQPACKET)?;
        let mut client = ControlClient::new(socket, vmm)?;
        client.version = recorded;
        let hello = Command::Hello {
            version: CONTROL.current,
        };
        if recorded >= hello.since()
            && let Response::Hello { version, release } = client.call(hello, &[]).await?
        {
            CONTROL.check(version).map_err(foreign)?;
            tracing::debug!("{vmm} of release {release:?} speaks version {version} with us");
            client.version = version;
        }
        Ok(client)
    }

    /// Uses a connected SEQPACKET socket to a VMM that this process started, whose machine it created with this version.
    pub fn made(socket: OwnedFd, vmm: Vmm, version: u32) -> Result<ControlClient, CallError> {
        let mut client = ControlClient::new(socket, vmm)?;
        client.version = version;
        Ok(client)
    }

    /// Creates the machine of a VMM that has none.
    ///
    /// # Errors
    /// The VMM's refusal, once no older protocol version is left to try.
    pub async fn create(&mut self, machine: MachineSpec, kvm: BorrowedFd<'_>) -> Result<(), CallError> {
        loop {
            let create = Command::Create {
                version: self.version,
                machine: machine.clone(),
            };
            match self.call(create, &[kvm]).await {
                Err(CallError::Refused(e)) => match e.older_version(self.version) {
                    Some(older) => self.version = older,
                    None => return Err(CallError::Refused(e)),
                },
                made => return made.map(drop),
            }
        }
    }

    /// The protocol version that both sides speak.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Uses a connected SEQPACKET socket to a VMM that this process started. Must be called within a tokio runtime.
    pub fn new(socket: OwnedFd, vmm: Vmm) -> Result<ControlClient, CallError> {
        let failed = |e: std::io::Error| CallError::Send {
            vmm,
            error: PacketError::Io(e),
        };
        rustix::io::ioctl_fionbio(&socket, true).map_err(|e| failed(e.into()))?;
        let shared = Arc::new(Shared {
            socket: register(socket, Interest::READABLE).map_err(failed)?,
            vmm,
            pending: Mutex::new(Some(HashMap::new())),
            life: watch::Sender::new(Life::default()),
        });
        let reader = tokio::spawn(reader::read_all(shared.clone()));
        Ok(ControlClient {
            shared,
            version: CONTROL.current,
            next: AtomicU32::new(1),
            reader,
        })
    }

    /// Sends a request with descriptors, and waits for the reply. On an idle connection the first poll sends the request, so several
    /// requests polled in turn arrive in that order.
    pub async fn call(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<Response, CallError> {
        Ok(self.call_for_descriptors(command, fds).await?.0)
    }

    /// As [`ControlClient::call`], and also returns the descriptors that came with the reply.
    pub async fn call_for_descriptors(
        &self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Response, Vec<OwnedFd>), CallError> {
        self.request(command, fds).await?.answer().await
    }

    /// Sends a request whose reply can be awaited later. The VMM handles requests in the order they were sent.
    pub async fn request(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<Pending, CallError> {
        let vmm = self.shared.vmm;
        let asked = Asked::of(&command);
        if command.since() > self.version {
            let (asked, speaks) = (asked.what, self.version);
            return Err(CallError::TooOld { vmm, asked, speaks });
        }
        let until = Instant::now() + asked.patience;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        match self.shared.waiting().as_mut() {
            Some(pending) if pending.len() >= MAX_PENDING => {
                return Err(CallError::Busy {
                    vmm,
                    asked: asked.what,
                });
            }
            Some(pending) => drop(pending.insert(id, sender)),
            None => return Err(self.shared.closed()),
        }
        let request = Request { id, command };
        let sent = tokio::time::timeout_at(until, self.send(&request, fds)).await;
        match sent.unwrap_or_else(|_| Err(asked.silent(vmm))) {
            Ok(()) => Ok(Pending {
                shared: self.shared.clone(),
                receiver,
                asked,
                until,
            }),
            Err(e) => {
                if let Some(pending) = self.shared.waiting().as_mut() {
                    pending.remove(&id);
                }
                Err(e)
            }
        }
    }

    async fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), CallError> {
        let vmm = self.shared.vmm;
        // Tried before waiting: on an idle connection the first poll sends the request.
        if let Some(result) = self.try_send(request, fds) {
            return result;
        }
        let failed = |e: std::io::Error| CallError::Send { vmm, error: e.into() };
        // Watched only now: the kernel would report each packet that the VMM takes, and so wake a thread in vain.
        let socket = self.shared.socket.get_ref().try_clone().map_err(failed)?;
        let socket = register(socket, Interest::WRITABLE).map_err(failed)?;
        loop {
            let mut ready = socket.writable().await.map_err(failed)?;
            match self.try_send(request, fds) {
                Some(result) => return result,
                None => ready.clear_ready(),
            }
        }
    }

    /// `None` if the socket's buffer is full.
    fn try_send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Option<Result<(), CallError>> {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset, WouldBlock};
        let vmm = self.shared.vmm;
        match packet::send(self.shared.socket.get_ref().as_fd(), request, fds) {
            Ok(()) => Some(Ok(())),
            Err(PacketError::Io(e)) if e.kind() == WouldBlock => None,
            Err(PacketError::Io(e)) if matches!(e.kind(), BrokenPipe | ConnectionReset) => {
                Some(Err(self.shared.closed()))
            }
            Err(error) => Some(Err(CallError::Send { vmm, error })),
        }
    }

    /// Closes the connection, because the machine waits for memory that cannot be had.
    pub fn lose_memory(&self, why: String) {
        let note = |life: &mut Life| life.memory_lost = life.memory_lost.take().or(Some(why));
        self.shared.life.send_modify(note);
        let _ = rustix::net::shutdown(self.shared.socket.get_ref(), rustix::net::Shutdown::Both);
    }

    /// The state from the VMM's events, now and as it changes.
    pub fn life(&self) -> watch::Receiver<Life> {
        self.shared.life.subscribe()
    }
}

/// What errors and checks need to know of a sent request.
#[derive(Clone, Copy, Debug)]
struct Asked {
    what: &'static str,
    patience: Duration,
    /// Whether a response can be its reply.
    answered: fn(&Response) -> bool,
}

impl Asked {
    fn of(command: &Command) -> Asked {
        Asked {
            what: command.variant(),
            patience: command.time_limit(),
            answered: command.is_answered_by(),
        }
    }

    fn silent(self, vmm: Vmm) -> CallError {
        CallError::Silent {
            vmm,
            asked: self.what,
            after: self.patience,
        }
    }
}

/// A request that was sent.
#[derive(Debug)]
#[must_use = "a refusal is in the answer"]
pub struct Pending {
    shared: Arc<Shared>,
    receiver: oneshot::Receiver<Reply>,
    asked: Asked,
    until: Instant,
}

impl Pending {
    /// Waits for the reply. Only [`Response::Restored`] comes with descriptors.
    pub async fn answer(self) -> Result<(Response, Vec<OwnedFd>), CallError> {
        let (vmm, asked) = (self.shared.vmm, self.asked);
        let reply = tokio::time::timeout_at(self.until, self.receiver).await;
        match reply.map_err(|_| asked.silent(vmm))? {
            Ok(Ok((response, _))) if !(asked.answered)(&response) => Err(CallError::Odd {
                vmm,
                asked: asked.what,
                answer: response.variant(),
            }),
            Ok(reply) => Ok(reply?),
            Err(_) => Err(self.shared.closed()),
        }
    }
}

impl Drop for ControlClient {
    fn drop(&mut self) {
        self.reader.abort();
        // The reader drops its handle of the socket only when the runtime polls it, but the VMM must see the end now.
        let _ = rustix::net::shutdown(self.shared.socket.get_ref(), rustix::net::Shutdown::Both);
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u32, oneshot::Sender<Reply>>>> {
        self.pending.locked()
    }

    /// Why there is no reply: the connection has ended, or is about to.
    fn closed(&self) -> CallError {
        match self.life.borrow().misconduct.clone() {
            Some(misconduct) => CallError::Broken {
                vmm: self.vmm,
                misconduct,
            },
            None => CallError::Closed { vmm: self.vmm },
        }
    }
}

#[cfg(test)]
#[path = "control_client/control_client_test.rs"]
mod tests;
#[cfg(test)]
#[path = "control_client/versions_test.rs"]
mod versions_test;
