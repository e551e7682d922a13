//! How many requests are served at once, in total and of one client.
//!
//! Each kind of request has its own lane, so that a flood of one kind leaves room for the others. Within a lane a client has at most its
//! share; all callers of one tenant are one client. Further requests wait in a queue for each client, and the queues take turns.
//! Invariants: never more requests run or wait than [`Bounds`] allow, so memory is bounded; a request whose queue is full is refused at
//! once; a dropped permit lets the next request run, and a permit for a caller that has left passes to the next.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use thaw_sys::lock::Lock;
use tokio::sync::oneshot;

use super::extract::peer;
use super::lease::{self, Expired, Lease};
use super::problem::{ApiCode, Refusal};

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Creates a sandbox.
    Create,
    /// Reads.
    Read,
    /// Changes or deletes.
    Change,
    /// Follows changes or output, possibly for long.
    Watch,
    /// Runs a process or transfers a file, possibly for long.
    Exec,
}

const VERBS: [Verb; 5] = [Verb::Create, Verb::Read, Verb::Change, Verb::Watch, Verb::Exec];

impl Verb {
    /// Whether it may take long. Such requests are not counted with the short ones.
    fn lasts(self) -> bool {
        matches!(self, Verb::Watch | Verb::Exec)
    }

    /// Its name in metrics.
    fn name(self) -> &'static str {
        match self {
            Verb::Create => "create",
            Verb::Read => "read",
            Verb::Change => "change",
            Verb::Watch => "watch",
            Verb::Exec => "exec",
        }
    }
}

/// The load of one kind, and how many were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub verb: &'static str,
    pub running: usize,
    pub waiting: usize,
    /// Number of requests refused since the gate was made.
    pub refused: u64,
}

/// The bounds of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Maximum number of running requests.
    pub running: usize,
    /// Maximum number of running requests of one client.
    pub of_one: usize,
    /// Maximum number of waiting requests of one client.
    pub waiting: usize,
}

/// The bounds of all kinds.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum number of running requests of all kinds together, except watches, processes and files, which may take long.
    pub running: usize,
    pub create: Share,
    pub read: Share,
    pub change: Share,
    pub watch: Share,
    pub exec: Share,
}

impl Default for Bounds {
    fn default() -> Bounds {
        let share = |running, of_one, waiting| Share {
            running,
            of_one,
            waiting,
        };
        Bounds {
            running: 512,
            create: share(256, 224, 1024),
            read: share(128, 96, 512),
            change: share(256, 224, 1024),
            watch: share(4096, 3072, 0),
            exec: share(512, 384, 0),
        }
    }
}

impl Bounds {
    fn of(&self, verb: Verb) -> Share {
        match verb {
            Verb::Create => self.create,
            Verb::Read => self.read,
            Verb::Change => self.change,
            Verb::Watch => self.watch,
            Verb::Exec => self.exec,
        }
    }
}

#[derive(Debug, Default)]
struct Client {
    running: usize,
    waiting: VecDeque<oneshot::Sender<Permit>>,
}

#[derive(Debug, Default)]
struct Lane {
    running: usize,
    /// The clients that have requests running or waiting.
    clients: HashMap<u64, Client>,
    /// The clients that have requests waiting, each once, the next first.
    turns: VecDeque<u64>,
}

#[derive(Debug, Default)]
struct Lanes {
    /// All running requests that do not take long.
    running: usize,
    lanes: [Lane; VERBS.len()],
}

/// Admits requests, or makes them wait.
#[derive(Debug, Default)]
pub struct Gate {
    bounds: Bounds,
    lanes: Mutex<Lanes>,
    refused: [AtomicU64; VERBS.len()],
}

/// The right of one request to run, until this is dropped.
#[derive(Debug)]
pub struct Permit {
    gate: Arc<Gate>,
    client: u64,
    verb: Verb,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gate.leave(self.client, self.verb);
    }
}

impl Gate {
    /// A gate with these bounds.
    pub fn new(bounds: Bounds) -> Arc<Gate> {
        Arc::new(Gate {
            bounds,
            lanes: Mutex::default(),
            refused: Default::default(),
        })
    }

    /// The load of each kind.
    pub fn load(&self) -> [Load; VERBS.len()] {
        let lanes = self.lanes();
        VERBS.map(|verb| {
            let lane = &lanes.lanes[verb as usize];
            Load {
                verb: verb.name(),
                running: lane.running,
                waiting: lane.clients.values().map(|c| c.waiting.len()).sum(),
                refused: self.refused[verb as usize].load(Ordering::Relaxed),
            }
        })
    }

    /// Waits for the client's turn.
    ///
    /// # Errors
    /// [`ApiCode::TooMany`], at once, if too many requests of the client wait already.
    pub async fn enter(self: &Arc<Gate>, client: u64, verb: Verb) -> Result<Permit, Refusal> {
        let waits = {
            let mut lanes = self.lanes();
            if self.has_room(&lanes, client, verb) {
                count_in(&mut lanes, client, verb);
                drop(lanes);
                return Ok(self.permit(client, verb));
            }
            let lane = &mut lanes.lanes[verb as usize];
            let most = self.bounds.of(verb).waiting;
            let queue = &mut lane.clients.entry(client).or_default().waiting;
            queue.retain(|waits| !waits.is_closed());
            if queue.len() >= most {
                forget(lane, client);
                self.refused[verb as usize].fetch_add(1, Ordering::Relaxed);
                let what = format!("{most} requests of this kind wait already");
                return Err(Refusal::new(ApiCode::TooMany, what));
            }
            let (told, waits) = oneshot::channel();
            queue.push_back(told);
            if !lane.turns.contains(&client) {
                lane.turns.push_back(client);
            }
            waits
        };
        let gone = |_| Refusal::new(ApiCode::Broken, "the gate is gone");
        waits.await.map_err(gone)
    }

    fn permit(self: &Arc<Gate>, client: u64, verb: Verb) -> Permit {
        Permit {
            gate: self.clone(),
            client,
            verb,
        }
    }

    fn has_room(&self, lanes: &Lanes, client: u64, verb: Verb) -> bool {
        let (share, lane) = (self.bounds.of(verb), &lanes.lanes[verb as usize]);
        let mine = lane.clients.get(&client).map_or(0, |c| c.running);
        lane.running < share.running
            && mine < share.of_one
            && (verb.lasts() || lanes.running < self.bounds.running)
    }

    fn leave(self: &Arc<Gate>, client: u64, verb: Verb) {
        let mut granted = Vec::new();
        {
            let mut lanes = self.lanes();
            count_out(&mut lanes, client, verb);
            for verb in VERBS {
                while let Some(grant) = self.next(&mut lanes, verb) {
                    granted.push(grant);
                }
            }
        }
        for (told, client, verb) in granted {
            // The waiting caller may have left: then the permit is dropped, which admits another.
            drop(told.send(self.permit(client, verb)));
        }
    }

    /// Takes the next request, and counts it as running.
    fn next(&self, lanes: &mut Lanes, verb: Verb) -> Option<(oneshot::Sender<Permit>, u64, Verb)> {
        let at = verb as usize;
        for _ in 0..lanes.lanes[at].turns.len() {
            let client = lanes.lanes[at].turns.pop_front()?;
            let has_room = self.has_room(lanes, client, verb);
            let lane = &mut lanes.lanes[at];
            let queue = &mut lane.clients.get_mut(&client)?.waiting;
            queue.retain(|waits| !waits.is_closed());
            let told = if has_room { queue.pop_front() } else { None };
            if !queue.is_empty() {
                lane.turns.push_back(client);
            }
            if let Some(told) = told {
                count_in(lanes, client, verb);
                return Some((told, client, verb));
            }
            forget(lane, client);
        }
        None
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.locked()
    }
}

fn count_in(lanes: &mut Lanes, client: u64, verb: Verb) {
    let lane = &mut lanes.lanes[verb as usize];
    lane.running += 1;
    lane.clients.entry(client).or_default().running += 1;
    if !verb.lasts() {
        lanes.running += 1;
    }
}

fn count_out(lanes: &mut Lanes, client: u64, verb: Verb) {
    let lane = &mut lanes.lanes[verb as usize];
    lane.running -= 1;
    if let Some(mine) = lane.clients.get_mut(&client) {
        mine.running -= 1;
    }
    forget(lane, client);
    if !verb.lasts() {
        lanes.running -= 1;
    }
}

/// Forgets a client without requests.
fn forget(lane: &mut Lane, client: u64) {
    if lane
        .clients
        .get(&client)
        .is_some_and(|c| c.running == 0 && c.waiting.is_empty())
    {
        lane.clients.remove(&client);
    }
}

/// The kind of a request of the API.
fn verb(request: &Request) -> Verb {
    if let Some(verb) = request.extensions().get() {
        return *verb;
    }
    let (method, path) = (request.method(), request.uri().path());
    let of_one = path.starts_with("/v1/sandboxes/");
    let creates = matches!(path, "/v1/sandboxes" | "/v1/thaws") || of_one && path.ends_with("/fork");
    if method == Method::POST && creates {
        return Verb::Create;
    }
    if of_one
        && [
            "/exec",
            "/files",
            "/processes/output",
            "/processes/input",
            "/stop",
            "/restart",
        ]
        .iter()
        .any(|end| path.ends_with(end))
    {
        return Verb::Exec;
    }
    if method != Method::GET && method != Method::HEAD {
        return Verb::Change;
    }
    if of_one && ["/files/watch", "/exit"].iter().any(|end| path.ends_with(end)) {
        return Verb::Watch;
    }
    // Decoded, as the handler reads it.
    let query = request.uri().query().unwrap_or_default();
    let watches = |(name, value): (Cow<str>, Cow<str>)| {
        matches!(&*name, "watch" | "follow") && matches!(&*value, "1" | "true")
    };
    match form_urlencoded::parse(query.as_bytes()).any(watches) {
        true => Verb::Watch,
        false => Verb::Read,
    }
}

/// Admits a request through the gate, until its answer has been written or given up. Its [`Verb`] is the one among its extensions, or that
/// of its route in the API. The permit is also among the request's extensions, for work that goes on after the answer.
pub async fn admit(State(gate): State<Arc<Gate>>, mut request: Request, next: Next) -> Response {
    let client = match peer(request.extensions()) {
        Ok(peer) => peer.share(),
        Err(refusal) => return refusal.into_response(),
    };
    let lease = request.extensions().get::<Arc<Lease>>().cloned();
    let verb = verb(&request);
    let permit = match gate.enter(client, verb).await {
        Ok(permit) => Arc::new(permit),
        Err(refusal) => return refusal.into_response(),
    };
    request.extensions_mut().insert(permit.clone());
    let answer = next.run(request);
    let answer = match &lease {
        Some(lease) if verb.lasts() => tokio::select! {
            answer = answer => answer,
            // The work ends as if the caller had hung up, but the caller gets an answer with the reason.
            () = lease.expired() => return Refusal::from(Expired).into_response(),
        },
        _ => answer.await,
    };
    answer.map(|body| Body::new(Running::new(body, permit, lease)))
}

/// Completes when a lease expires.
type Ending = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A response body. If its length is unknown it is a stream, which breaks off when its caller's lease expires.
struct Running {
    body: Body,
    over: Option<Ending>,
    _permit: Arc<Permit>,
}

impl Running {
    fn new(body: Body, permit: Arc<Permit>, lease: Option<Arc<Lease>>) -> Running {
        let lease = lease.filter(|_| body.size_hint().exact().is_none());
        let over = lease.map(|lease| Box::pin(lease::expired(Some(lease))) as Ending);
        Running {
            body,
            over,
            _permit: permit,
        }
    }
}

impl HttpBody for Running {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(over) = &mut self.over
            && over.as_mut().poll(context).is_ready()
        {
            // Drop the source of the body now, not when the connection ends.
            (self.over, self.body) = (None, Body::empty());
            return Poll::Ready(Some(Err(axum::Error::new(Expired))));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
#[path = "request_gate_test.rs"]
mod tests;
