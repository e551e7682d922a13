//! A process whose output thawd relays to callers.
//!
//! While a caller reads, thawd reads the process's pipes: nothing is lost, and a slow caller slows the process. Once no caller reads, the
//! guest keeps the end of the output ([`Processes::keep`]) and callers read that. So a process never waits for a caller that has gone, and
//! outlives thawd.
//!
//! Invariants: at most two pieces of output are held for each reader; a relay's task ends with its process, or with thawd; no lock is held
//! while the guest or a caller is waited for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_protocol::connect::Code;
use thaw_protocol::e2b::process::ProcessConfig;
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::error::Error;
use thaw_sys::lock::Lock;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::failure::Failure;
use crate::api::kept::{Processes, Said as Kept};
use crate::api::problem::Refusal;
use crate::api::process::Process;
use crate::api::session::{self, Said};

/// Most processes of one sandbox that are relayed at once.
const MOST: usize = 256;
/// Most readers of one process.
const MOST_READERS: usize = 16;
/// How long a guest may take to keep the output of a process while thawd shuts down.
const PARTING: Duration = Duration::from_secs(5);

/// An event of a process.
#[derive(Debug)]
pub enum Event {
    Wrote(Output, Vec<u8>),
    /// The last event, with the exit code.
    Ended(Result<i32, Failure>),
}

/// What a caller said of a process when it started it.
#[derive(Clone, Debug, Default)]
pub struct About {
    pub config: ProcessConfig,
    pub tag: Option<String>,
    pub has_terminal: bool,
}

/// The relayed processes of one sandbox, by their ids in the guest.
#[derive(Debug, Default)]
pub struct Relays(Mutex<BTreeMap<String, Arc<Relay>>>);

/// Who reads the output.
#[derive(Debug)]
enum Reading {
    /// These callers, whom thawd passes it to. If there are none it is lost.
    Callers(BTreeMap<u64, mpsc::Sender<Event>>),
    /// The guest is asked to keep it.
    Leaving,
    /// The guest keeps it.
    Guest,
    /// The process has ended, and all output was passed on.
    Nobody,
}

/// A process whose output is relayed.
#[derive(Debug)]
pub struct Relay {
    pub id: String,
    pub pid: u32,
    pub about: About,
    reading: Mutex<Reading>,
    /// Counts the changes of `reading` to another variant.
    changed: watch::Sender<u64>,
    /// The last reader has left.
    alone: Notify,
    numbers: std::sync::atomic::AtomicU64,
}

impl Relays {
    /// Those that run.
    pub fn all(&self) -> Vec<Arc<Relay>> {
        self.0.locked().values().cloned().collect()
    }

    /// The first with this property.
    pub fn find(&self, is_wanted: impl Fn(&Relay) -> bool) -> Option<Arc<Relay>> {
        self.0.locked().values().find(|relay| is_wanted(relay)).cloned()
    }

    /// Checks that there is room for another.
    ///
    /// # Errors
    /// There is not.
    pub fn check_room(&self) -> Result<(), Failure> {
        match self.0.locked().len() < MOST {
            true => Ok(()),
            false => Err(Failure::new(
                Code::ResourceExhausted,
                format!("the sandbox runs {MOST} processes already, which is the most; end one"),
            )),
        }
    }

    /// Relays a process that was just started, to its first reader. The returned future must run: it ends with the process, which it kills
    /// at `deadline`.
    pub fn begin(self: &Arc<Self>, started: Started) -> (Reader, impl Future<Output = ()> + Send + use<>) {
        let relay = Arc::new(Relay {
            id: started.process.id(),
            pid: started.pid,
            about: started.about,
            reading: Mutex::new(Reading::Callers(BTreeMap::new())),
            changed: watch::Sender::default(),
            alone: Notify::new(),
            numbers: Default::default(),
        });
        let (sender, events) = mpsc::channel(1);
        relay.add(sender);
        let reader = Reader::Relayed(Subscription {
            number: 0,
            relay: relay.clone(),
            events,
        });
        self.0.locked().insert(relay.id.clone(), relay.clone());
        let relays = self.clone();
        let running = Running {
            relay,
            process: started.process,
            processes: started.processes,
            closing: started.closing,
            deadline: started.deadline,
        };
        let work = async move {
            let _ended = Forgotten(relays, running.relay.clone());
            running.run().await;
        };
        (reader, work)
    }
}

/// A process that was just started.
#[derive(Debug)]
pub struct Started {
    pub process: Arc<dyn Process>,
    pub processes: Arc<dyn Processes>,
    pub pid: u32,
    pub about: About,
    /// When it is killed.
    pub deadline: Option<Instant>,
    pub closing: watch::Receiver<bool>,
}

/// Forgets a relay at the end of its task.
struct Forgotten(Arc<Relays>, Arc<Relay>);

impl Drop for Forgotten {
    fn drop(&mut self) {
        let Forgotten(relays, relay) = self;
        relay.set(Reading::Nobody);
        relays.0.locked().remove(&relay.id);
    }
}

impl Relay {
    /// Another reader of the output, from now on; or, if the guest keeps it, of what the guest has.
    ///
    /// # Errors
    /// The process has ended, or has too many readers.
    pub async fn read(self: &Arc<Self>, processes: Arc<dyn Processes>) -> Result<Reader, Failure> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            match &mut *self.reading.locked() {
                Reading::Callers(callers) if callers.len() >= MOST_READERS => {
                    let what = format!("the process has {MOST_READERS} readers already, which is the most");
                    return Err(Failure::new(Code::ResourceExhausted, what));
                }
                Reading::Callers(callers) => {
                    let (sender, events) = mpsc::channel(1);
                    let number = self.number();
                    callers.insert(number, sender);
                    return Ok(Reader::Relayed(Subscription {
                        number,
                        relay: self.clone(),
                        events,
                    }));
                }
                Reading::Guest => return Ok(Reader::of_guest(processes, self.id.clone())),
                Reading::Nobody => return Err(has_ended(self.pid)),
                Reading::Leaving => {}
            }
            if changed.changed().await.is_err() {
                return Err(has_ended(self.pid));
            }
        }
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    fn add(&self, sender: mpsc::Sender<Event>) {
        if let Reading::Callers(callers) = &mut *self.reading.locked() {
            callers.insert(self.number(), sender);
        }
    }

    /// Returns who read before.
    fn set(&self, reading: Reading) -> Reading {
        let before = std::mem::replace(&mut *self.reading.locked(), reading);
        self.changed.send_modify(|changes| *changes += 1);
        before
    }

    /// The current readers.
    fn callers(&self) -> Vec<mpsc::Sender<Event>> {
        match &*self.reading.locked() {
            Reading::Callers(callers) => callers.values().cloned().collect(),
            Reading::Leaving | Reading::Guest | Reading::Nobody => Vec::new(),
        }
    }

    /// Passes output to every reader. Waits for the slowest.
    async fn deliver(&self, output: Output, data: Vec<u8>) {
        for caller in self.callers() {
            // A reader that has left is removed by its end.
            let _ = caller.send(Event::Wrote(output, data.clone())).await;
        }
    }

    /// Tells every reader the end. There are no more readers from then on.
    async fn finish(&self, end: Result<i32, Failure>) {
        let Reading::Callers(callers) = self.set(Reading::Nobody) else {
            return;
        };
        for caller in callers.into_values() {
            let _ = caller.send(Event::Ended(end.clone())).await;
        }
    }

    /// If no caller reads, the output is about to be kept by the guest.
    fn leave(&self) -> bool {
        let mut reading = self.reading.locked();
        let is_alone = matches!(&*reading, Reading::Callers(callers) if callers.is_empty());
        if is_alone {
            *reading = Reading::Leaving;
        }
        is_alone
    }
}

/// The error for a process that is not there any more.
pub fn has_ended(pid: u32) -> Failure {
    Failure::new(Code::NotFound, format!("there is no process {pid}: it has ended"))
}

/// The task of a relay.
struct Running {
    relay: Arc<Relay>,
    process: Arc<dyn Process>,
    processes: Arc<dyn Processes>,
    closing: watch::Receiver<bool>,
    deadline: Option<Instant>,
}

impl Running {
    async fn run(self) {
        let Running {
            relay,
            process,
            processes,
            mut closing,
            mut deadline,
        } = self;
        let mut work = std::pin::pin!(pass_on(&relay, process.as_ref(), relay.about.has_terminal));
        let end = loop {
            let wait = wait_for(&relay, deadline);
            let next = tokio::select! {
                biased;
                end = &mut work => break end,
                _ = closing.wait_for(|closing| *closing) => Next::Closing,
                next = wait => next,
            };
            // A guest that is paused does not answer.
            let answer = async {
                match next {
                    Next::Deadline => process.signal(libc::SIGKILL as u8).await,
                    Next::Alone if relay.leave() => {
                        let kept = processes.keep(&relay.id).await;
                        relay.set(reading_after(kept));
                    }
                    Next::Alone | Next::Closing => {}
                }
            };
            let is_closing = tokio::select! {
                biased;
                () = answer => next == Next::Closing,
                _ = closing.wait_for(|closing| *closing) => true,
            };
            if is_closing {
                let kept = tokio::time::timeout(PARTING, processes.keep(&relay.id)).await;
                if !matches!(kept, Ok(Ok(()))) {
                    tracing::debug!("the guest does not keep the output of a process that thawd relayed");
                }
                return;
            }
            if next == Next::Deadline {
                deadline = None;
            }
        };
        tokio::select! {
            () = relay.finish(end.map_err(Failure::from)) => {}
            _ = closing.wait_for(|closing| *closing) => {}
        }
    }
}

/// What a relay does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The process has run for as long as it may.
    Deadline,
    /// The last reader has left.
    Alone,
    /// thawd shuts down. The readers see that their senders are gone.
    Closing,
}

async fn wait_for(relay: &Relay, deadline: Option<Instant>) -> Next {
    let late = async {
        match deadline {
            Some(deadline) => tokio::time::sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = late => Next::Deadline,
        () = relay.alone.notified() => Next::Alone,
    }
}

/// Who reads once the guest was asked to keep the output. A guest keeps few processes at once; the output of others is lost.
fn reading_after(kept: Result<(), Refusal>) -> Reading {
    match kept {
        Ok(()) => Reading::Guest,
        Err(refusal) => {
            tracing::debug!("the output of a process without a reader is lost: {refusal}");
            Reading::Callers(BTreeMap::new())
        }
    }
}

/// Passes on all output of a process, and returns its exit code.
async fn pass_on(relay: &Relay, process: &dyn Process, has_terminal: bool) -> Result<i32, Error> {
    let (over, ended) = watch::channel(false);
    let end = async {
        let status = process.wait().await;
        over.send_replace(true);
        status
    };
    let (says, mut said) = mpsc::channel(1);
    let outputs = async {
        let says = says;
        let stderr = async {
            // With a terminal both are one stream.
            if !has_terminal {
                session::pump(process, Output::Stderr, &says, ended.clone()).await;
            }
        };
        tokio::join!(
            session::pump(process, Output::Stdout, &says, ended.clone()),
            stderr
        );
    };
    let delivery = async {
        while let Some(Said::Wrote(output, data)) = said.recv().await {
            relay.deliver(output, data).await;
        }
    };
    let (status, (), ()) = tokio::join!(end, outputs, delivery);
    status
}

/// A reader of a process's output.
#[derive(Debug)]
pub enum Reader {
    Relayed(Subscription),
    /// The guest keeps the output.
    Kept {
        processes: Arc<dyn Processes>,
        id: String,
        at: u64,
    },
}

/// A caller that thawd passes output to. Dropping it ends that.
#[derive(Debug)]
pub struct Subscription {
    number: u64,
    relay: Arc<Relay>,
    events: mpsc::Receiver<Event>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut reading = self.relay.reading.locked();
        if let Reading::Callers(callers) = &mut *reading {
            callers.remove(&self.number);
            if callers.is_empty() {
                self.relay.alone.notify_one();
            }
        }
    }
}

impl Reader {
    /// A reader of what the guest has kept, and of what comes after it.
    pub fn of_guest(processes: Arc<dyn Processes>, id: String) -> Reader {
        Reader::Kept { processes, id, at: 0 }
    }

    /// The next event.
    pub async fn next(&mut self) -> Event {
        match self {
            Reader::Relayed(subscription) => match subscription.events.recv().await {
                Some(event) => event,
                // The relay's task ended without a last event.
                None => Event::Ended(Err(Failure::ending())),
            },
            Reader::Kept { processes, id, at } => match processes.output(id, *at).await {
                Ok(Kept::Wrote {
                    offset,
                    is_stderr,
                    data,
                }) => {
                    *at = offset + data.len() as u64;
                    let output = if is_stderr { Output::Stderr } else { Output::Stdout };
                    Event::Wrote(output, data)
                }
                Ok(Kept::Ended(code)) => Event::Ended(Ok(code)),
                Err(refusal) => Event::Ended(Err(refusal.into())),
            },
        }
    }
}
