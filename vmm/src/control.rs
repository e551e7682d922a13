//! The server of [`thaw_protocol::control`]: one thread, one connection at a time.
//!
//! Invariants: a request is read only when everything before it has been sent, so at most two events and one reply wait for a
//! slow peer; a packet that is not a request ends the connection, but never the machine (unless the machine is tethered to the
//! connection); a request of a later version is refused. A freeze that the guest runs through is written piece by piece between requests, and
//! ends with its connection.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use thaw_protocol::control::{
    Command, ControlError, ErrorCode, Event, FromVmm, MachineState, Request, Response,
};
use thaw_protocol::encoding::EncodingError;
use thaw_protocol::packet::{self, PacketError, Receiver};
use thaw_protocol::versions::{CONTROL, VersionError};
use thaw_sys::allocator;

use crate::events::EventSink;
use crate::machine::{Machine, Restored};

/// A process without a machine and without a connection ends after this long: its starter is gone.
const SHELL_PATIENCE: Timespec = Timespec {
    tv_sec: 30,
    tv_nsec: 0,
};

/// How long after a thaw the vCPUs that have nothing to do yet are woken. Each wake takes a processor from the guest's first vCPU, from the
/// answer to the thaw and from other thaws; a guest that starts one of them later waits this long at most.
const REST_AFTER: Duration = Duration::from_millis(2);

/// Why [`serve`] returned.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// The peer requested it.
    Shutdown,
    /// The connection closed, and the machine was tethered to it or the process had no machine yet.
    Disconnected,
    /// No client connected in time.
    Abandoned,
}

/// Serves connections until the process must end.
///
/// # Errors
/// When the listening socket or poll fails.
pub fn serve(listener: OwnedFd, machine: &mut Machine, events: &EventSink) -> std::io::Result<End> {
    let mut server = Server {
        machine,
        events,
        receiver: Receiver::default(),
        tethered: false,
        rest_at: None,
        awaits_freeze: None,
    };
    let mut patience = Some(SHELL_PATIENCE);
    loop {
        let mut ready = [PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut ready, patience.as_ref()) {
            Ok(0) => return Ok(End::Abandoned),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        let socket = match accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => continue,
            Err(e) => return Err(e.into()),
        };
        patience = None;
        let end = server.serve_connection(socket)?;
        server.wake_rest();
        server.awaits_freeze = None;
        server.machine.cancel_freeze();
        if let Some(end) = end {
            return Ok(end);
        }
    }
}

/// A message and the descriptors to send with it.
struct Outgoing {
    message: FromVmm,
    fds: Vec<OwnedFd>,
}

impl From<Event> for Outgoing {
    fn from(event: Event) -> Outgoing {
        Outgoing {
            message: FromVmm::Event(event),
            fds: Vec::new(),
        }
    }
}

/// A response and the descriptors to send with it.
struct Answer {
    response: Response,
    fds: Vec<OwnedFd>,
}

impl From<Response> for Answer {
    fn from(response: Response) -> Answer {
        Answer {
            response,
            fds: Vec::new(),
        }
    }
}

struct Server<'a> {
    machine: &'a mut Machine,
    events: &'a EventSink,
    receiver: Receiver,
    tethered: bool,
    /// When to wake the vCPUs that a thaw has not started.
    rest_at: Option<Instant>,
    /// The request that is answered when a freeze is written.
    awaits_freeze: Option<u32>,
}

/// What to do with a connection next.
enum Step {
    Continue,
    /// The connection is over.
    Closed,
    Shutdown,
}

impl Server<'_> {
    /// Serves one connection. Returns why the process must end, or `None` if it can serve another connection.
    fn serve_connection(&mut self, socket: OwnedFd) -> std::io::Result<Option<End>> {
        self.events.renew();
        let mut outgoing = VecDeque::new();
        loop {
            self.write_some(&mut outgoing);
            if outgoing.is_empty() {
                outgoing.extend(self.events.take_new().into_iter().map(Outgoing::from));
            }
            match send_all(&socket, &mut outgoing) {
                Ok(()) => {}
                Err(e) => return Ok(self.closed(&e)),
            }
            let (readable, closed) = self.wait(&socket, outgoing.is_empty())?;
            if readable && outgoing.is_empty() {
                match self.answer(&socket, &mut outgoing) {
                    Step::Continue => {}
                    Step::Closed => return Ok(self.closed(&PacketError::Closed)),
                    Step::Shutdown => return Ok(Some(End::Shutdown)),
                }
            } else if closed {
                return Ok(self.closed(&PacketError::Closed));
            }
        }
    }

    /// Waits until there is something to do. Returns whether a packet can be read, and whether the peer has closed.
    fn wait(&mut self, socket: &OwnedFd, all_sent: bool) -> std::io::Result<(bool, bool)> {
        let wanted = if all_sent { PollFlags::IN } else { PollFlags::OUT };
        let mut ready = [
            PollFd::new(socket, wanted),
            PollFd::new(self.events, PollFlags::IN),
        ];
        // While the peer does not read, events stay in the event sink.
        let watched = if all_sent { &mut ready[..] } else { &mut ready[..1] };
        let left = match (self.until_rest(), self.writes()) {
            (_, true) => Some(Timespec::default()),
            (left, false) => left,
        };
        match poll(watched, left.as_ref()) {
            Ok(_) => {
                let seen = ready[0].revents();
                Ok((
                    seen.contains(PollFlags::IN),
                    seen.intersects(PollFlags::HUP | PollFlags::ERR),
                ))
            }
            Err(Errno::INTR) => Ok((false, false)),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether there is something to write now. Not while a machine is paused for the moment of the freeze: its disk is being copied.
    fn writes(&self) -> bool {
        let is_time = self.awaits_freeze.is_some() || self.machine.state() == MachineState::Running;
        is_time && self.machine.is_writing()
    }

    /// Writes a part of a freeze, and answers the request for it after the last one.
    fn write_some(&mut self, outgoing: &mut VecDeque<Outgoing>) {
        if self.writes() {
            self.machine.write_some();
        }
        if let Some(id) = self.awaits_freeze
            && let Some(result) = self.machine.frozen()
        {
            self.awaits_freeze = None;
            let result = result.map(|memory_bytes| Response::Frozen { memory_bytes });
            outgoing.push_back(Outgoing {
                message: FromVmm::Reply { id, result },
                fds: Vec::new(),
            });
        }
    }

    /// How long until [`Self::wake_rest`] is due; wakes them if it is now. `None` if nothing is to be woken.
    fn until_rest(&mut self) -> Option<Timespec> {
        let left = self.rest_at?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.wake_rest();
            return None;
        }
        // Fails only for times that are longer by far.
        Timespec::try_from(left).ok()
    }

    /// Wakes the vCPUs that the last thaw has not started, and gives the heap's free memory back to the host.
    fn wake_rest(&mut self) {
        if self.rest_at.take().is_some() {
            self.machine.wake_rest();
            allocator::trim();
        }
    }

    /// Reads one request and executes it.
    fn answer(&mut self, socket: &OwnedFd, outgoing: &mut VecDeque<Outgoing>) -> Step {
        let received = self.receiver.receive_bytes(socket);
        let read = received.and_then(|(bytes, fds)| Ok((Request::read(bytes)?, fds)));
        let (Request { id, command }, fds) = match read {
            Ok((Ok(request), fds)) => (request, fds),
            Ok((Err((id, unknown)), _)) => {
                outgoing.push_back(refusal(id, &unknown));
                return Step::Continue;
            }
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => return Step::Continue,
            Err(PacketError::Closed) => return Step::Closed,
            Err(e) => {
                tracing::warn!("control connection closed: {e}");
                return Step::Closed;
            }
        };
        let shutdown = command == Command::Shutdown;
        let thaw = matches!(command, Command::Thaw { .. });
        // vCPUs that have not run have nothing to add to a status.
        if command != Command::Status {
            self.wake_rest();
        }
        if command == Command::FinishFreeze && self.awaits_freeze.is_none() {
            self.awaits_freeze = Some(id);
            return Step::Continue;
        }
        self.machine.hurry(true);
        let result = self.execute(command, fds);
        self.machine.hurry(false);
        if let Err(e) = &result {
            tracing::info!(code = ?e.code, "request {id} refused: {e}");
        }
        let (result, fds) = match result {
            Ok(Answer { response, fds }) => (Ok(response), fds),
            Err(e) => (Err(e), Vec::new()),
        };
        outgoing.push_back(Outgoing {
            message: FromVmm::Reply { id, result },
            fds,
        });
        if shutdown {
            self.machine.last_words();
            // A peer that does not read its reply learns of the shutdown from the closed connection.
            let _ = send_all(socket, outgoing);
            return Step::Shutdown;
        }
        if thaw {
            self.rest_at = Some(Instant::now() + REST_AFTER);
        }
        Step::Continue
    }

    fn execute(&mut self, command: Command, fds: Vec<OwnedFd>) -> Result<Answer, ControlError> {
        let machine = &mut *self.machine;
        match command {
            Command::Create {
                version,
                machine: spec,
            } => {
                machine.create(version, &spec, fds)?;
                self.tethered = spec.tethered;
            }
            Command::Attach { device, backend } => machine.attach(device, backend, fds)?,
            Command::Detach { device } => machine.detach(device)?,
            Command::AddImage { slot, image } => machine.add_image(slot, image, fds)?,
            Command::RemoveImage { slot } => machine.remove_image(slot)?,
            Command::Boot { cmdline } => machine.boot(&cmdline, fds)?,
            Command::Pause => machine.pause()?,
            Command::Resume => machine.resume()?,
            Command::Status => {
                return Ok(Response::Status {
                    state: machine.state(),
                    times: machine.times(),
                    faults: machine.faults(),
                }
                .into());
            }
            Command::Restore {
                layers,
                working_set,
                mode,
            } => return Ok(restored(machine.restore(layers, working_set, mode, fds)?)),
            Command::Thaw { memory_mib, empty } => machine.thaw(memory_mib, &empty)?,
            Command::Freeze { kind } => {
                let memory_bytes = machine.freeze(kind, fds)?;
                return Ok(Response::Frozen { memory_bytes }.into());
            }
            Command::PrepareFreeze { kind } => machine.prepare_freeze(kind, fds)?,
            Command::BeginFreeze => machine.begin_freeze(fds)?,
            Command::FinishFreeze => {
                return Err(ControlError {
                    code: ErrorCode::WrongState,
                    message: "another request awaits the end of this freeze".into(),
                });
            }
            Command::CancelFreeze => machine.cancel_freeze(),
            Command::WorkingSet => machine.working_set(fds)?,
            Command::Resize { memory_mib } => machine.resize(memory_mib)?,
            Command::Limit { device, limits } => machine.limit(device, limits)?,
            Command::Hello { version } => {
                let version = CONTROL.agree(version).map_err(|e| too_old(&e))?;
                let release = env!("CARGO_PKG_VERSION").to_owned();
                return Ok(Response::Hello { version, release }.into());
            }
            Command::Shutdown => {}
        }
        Ok(Response::Done.into())
    }

    /// Handles the end of a connection. Returns why the process must end too, or `None` if it goes on.
    fn closed(&self, why: &PacketError) -> Option<End> {
        tracing::debug!("control connection ended: {why}");
        let ends = self.tethered || self.machine.state() == MachineState::NoMachine;
        if ends {
            self.machine.last_words();
        }
        ends.then_some(End::Disconnected)
    }
}

/// The reply to a request of a later version.
fn refusal(id: u32, unknown: &EncodingError) -> Outgoing {
    tracing::info!("request {id} refused: {unknown}");
    let result = Err(ControlError {
        code: ErrorCode::Version,
        message: format!(
            "this thaw-vmm speaks version {} of the control protocol: {unknown}",
            CONTROL.current
        ),
    });
    Outgoing {
        message: FromVmm::Reply { id, result },
        fds: Vec::new(),
    }
}

fn too_old(error: &VersionError) -> ControlError {
    ControlError {
        code: ErrorCode::Version,
        message: error.to_string(),
    }
}

/// The reply to a restore, with the userfaultfd if there is one.
fn restored(restored: Restored) -> Answer {
    let Restored {
        regions,
        uffd,
        populated,
    } = restored;
    Answer {
        response: Response::Restored {
            regions,
            populated_pages: populated.pages,
            populate_ns: populated.ns,
        },
        fds: uffd.into_iter().collect(),
    }
}

/// Sends the queued messages until the socket is full.
fn send_all(socket: &OwnedFd, outgoing: &mut VecDeque<Outgoing>) -> Result<(), PacketError> {
    while let Some(message) = outgoing.front() {
        let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
        match packet::send(socket, &message.message, &fds) {
            Ok(()) => outgoing.pop_front(),
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
        };
    }
    Ok(())
}
