//! A proxy in front of a registry: it shapes, counts, and does wrong when told to.
//!
//! Plain HTTP/1.1 on loopback, a thread a connection. All connections share one [`Link`]: a response's bytes leave in the
//! order they ask for it, no faster than the link, and its first byte no sooner than a round trip after the request.
//! What is counted is what left towards the client, heads included.

mod fault;
pub(crate) mod http;
mod link;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

pub use fault::{Fault, On, Rule};
use fault::{Plan, Tokens};
use http::{Body, Head};
pub use link::Link;
use link::Wire;

/// Bytes sent at once: what a slow link carries in some milliseconds.
const SEGMENT: usize = 32 << 10;
/// Requests whose description is kept.
const LOGGED: usize = 100_000;

/// A proxy, ended when dropped.
pub struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
}

/// What went through so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub requests: u64,
    /// Bytes the client was sent.
    pub down: u64,
    /// Bytes the client sent in bodies.
    pub up: u64,
}

/// One request, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logged {
    pub method: String,
    pub target: String,
    pub range: Option<String>,
    pub status: u16,
    pub bytes: u64,
}

/// A request in the log from before its answer's first byte is sent: who has the answer finds it there.
struct Entry {
    request: Logged,
    sent: Arc<AtomicU64>,
}

impl Entry {
    fn so_far(&self) -> Logged {
        Logged {
            bytes: self.sent.load(Ordering::Relaxed),
            ..self.request.clone()
        }
    }
}

struct Shared {
    upstream: SocketAddr,
    wire: Wire,
    plan: Mutex<Plan>,
    tokens: Mutex<Option<Tokens>>,
    log: Mutex<Vec<Entry>>,
    open: Mutex<Vec<TcpStream>>,
    requests: AtomicU64,
    down: AtomicU64,
    up: AtomicU64,
    away: AtomicBool,
}

impl Proxy {
    /// A proxy for the registry at `upstream` (`host:port`), on a free port.
    pub fn start(upstream: &str, link: Link) -> io::Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream: upstream
                .parse()
                .map_err(|e| io::Error::other(format!("{upstream}: {e}")))?,
            wire: Wire::new(link),
            plan: Mutex::default(),
            tokens: Mutex::default(),
            log: Mutex::default(),
            open: Mutex::default(),
            requests: AtomicU64::new(0),
            down: AtomicU64::new(0),
            up: AtomicU64::new(0),
            away: AtomicBool::new(false),
        });
        shared.clone().listen(listener);
        Ok(Proxy { shared, address })
    }

    /// `127.0.0.1:PORT`, to be used as the registry's name.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// What went through since the start or the last [`Self::reset`].
    pub fn counts(&self) -> Counts {
        Counts {
            requests: self.shared.requests.load(Ordering::Relaxed),
            down: self.shared.down.load(Ordering::Relaxed),
            up: self.shared.up.load(Ordering::Relaxed),
        }
    }

    /// Counts from zero; gives what was counted, and the requests.
    pub fn reset(&self) -> (Counts, Vec<Logged>) {
        let counts = Counts {
            requests: self.shared.requests.swap(0, Ordering::Relaxed),
            down: self.shared.down.swap(0, Ordering::Relaxed),
            up: self.shared.up.swap(0, Ordering::Relaxed),
        };
        let log = std::mem::take(&mut *self.shared.log.lock().unwrap());
        (counts, log.iter().map(Entry::so_far).collect())
    }

    /// The requests so far.
    pub fn log(&self) -> Vec<Logged> {
        self.shared
            .log
            .lock()
            .unwrap()
            .iter()
            .map(Entry::so_far)
            .collect()
    }

    /// Does wrong by these rules from now on, by no other. The first rule that fits a request decides.
    pub fn faults(&self, rules: Vec<Rule>) {
        *self.shared.plan.lock().unwrap() = Plan::new(rules);
    }

    /// How often each rule, in order, was applied.
    pub fn applied(&self) -> Vec<usize> {
        self.shared.plan.lock().unwrap().applied()
    }

    /// From now on every request must carry a token, good for `uses` requests, which this proxy gives to anybody.
    pub fn require_tokens(&self, uses: usize) {
        *self.shared.tokens.lock().unwrap() = Some(Tokens::new(uses));
    }

    /// Tokens given so far.
    pub fn tokens_given(&self) -> usize {
        self.shared
            .tokens
            .lock()
            .unwrap()
            .as_ref()
            .map_or(0, Tokens::given)
    }

    /// Goes away: open connections are reset, new ones refused.
    pub fn go_away(&self) {
        self.shared.away.store(true, Ordering::SeqCst);
        for stream in self.shared.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        // Wakes the listener, which then closes.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(5));
    }

    /// Comes back at the same address.
    pub fn come_back(&self) -> io::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let listener = loop {
            match TcpListener::bind(self.address) {
                Ok(listener) => break listener,
                Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(10));
                }
                Err(e) => return Err(e),
            }
        };
        self.shared.away.store(false, Ordering::SeqCst);
        self.shared.clone().listen(listener);
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.go_away();
    }
}

impl Shared {
    fn listen(self: Arc<Self>, listener: TcpListener) {
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                if self.away.load(Ordering::SeqCst) {
                    return;
                }
                if let Ok(kept) = stream.try_clone() {
                    self.open.lock().unwrap().push(kept);
                }
                let shared = self.clone();
                thread::spawn(move || {
                    // A connection that fails is the client's to notice.
                    let _ = shared.serve(&stream);
                    let _ = stream.shutdown(Shutdown::Both);
                    let peer = stream.peer_addr().ok();
                    shared
                        .open
                        .lock()
                        .unwrap()
                        .retain(|other| peer.is_some() && other.peer_addr().ok() != peer);
                });
            }
        });
    }

    /// One connection's requests, in turn, over one connection to the registry.
    fn serve(&self, client: &TcpStream) -> io::Result<()> {
        client.set_nodelay(true)?;
        self.wire.round_trip();
        let mut client_in = io::BufReader::new(client);
        let mut upstream: Option<io::BufReader<TcpStream>> = None;
        while let Some(request) = Head::read(&mut client_in)? {
            self.requests.fetch_add(1, Ordering::Relaxed);
            let fault = self.plan.lock().unwrap().fault_for(&request);
            let own = self.own_answer(&request, fault.as_ref());
            if own.is_some() || matches!(fault, Some(Fault::Hang)) {
                let body = request.request_body()?;
                let taken = body.copy(&mut client_in, &mut io::sink())?;
                self.up.fetch_add(taken, Ordering::Relaxed);
            }
            if let Some(answer) = own {
                self.wire.round_trip();
                let sent = self.note(&request, answer.status);
                self.send(client, &answer.bytes, &sent)?;
                continue;
            }
            if matches!(fault, Some(Fault::Hang)) {
                self.note(&request, 0);
                // Until the client gives up.
                let _ = client_in.read(&mut [0]);
                return Ok(());
            }
            let mut connection = match upstream.take() {
                Some(connection) => connection,
                None => io::BufReader::with_capacity(SEGMENT, TcpStream::connect(self.upstream)?),
            };
            let keep = self.exchange(&request, &mut client_in, client, &mut connection, fault)?;
            if !keep {
                return Ok(());
            }
            upstream = Some(connection);
        }
        Ok(())
    }

    /// What is answered without asking the registry: tokens, and faults that are whole answers.
    fn own_answer(&self, request: &Head, fault: Option<&Fault>) -> Option<http::Answer> {
        if let Some(Fault::Answer { status, headers }) = fault {
            return Some(http::Answer::new(*status, headers, b""));
        }
        let mut tokens = self.tokens.lock().unwrap();
        let tokens = tokens.as_mut()?;
        tokens.answer(request)
    }

    /// Passes one request on and its response back. False when the connection cannot be used again.
    fn exchange(
        &self,
        request: &Head,
        client_in: &mut impl Read,
        client: &TcpStream,
        upstream: &mut io::BufReader<TcpStream>,
        fault: Option<Fault>,
    ) -> io::Result<bool> {
        let without = matches!(fault, Some(Fault::WholeForRange)).then_some("range");
        let mut outgoing = upstream.get_ref();
        outgoing.write_all(&request.bytes(without))?;
        if request.header("expect").is_some() {
            let mut answer = client;
            answer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let taken = request.request_body()?.copy(client_in, &mut outgoing)?;
        self.up.fetch_add(taken, Ordering::Relaxed);
        self.wire.round_trip();
        let response = loop {
            let head = Head::read(upstream)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            if head.status()? != 100 {
                break head;
            }
        };
        let body = response.response_body(&request.method)?;
        let sent = self.note(request, response.status()?);
        self.send(client, &response.bytes(None), &sent)?;
        let mut out = Out {
            shared: self,
            client,
            sent: &sent,
            fault,
            position: 0,
        };
        body.copy(upstream, &mut out)?;
        Ok(body != Body::UntilClose && !request.closes() && !response.closes())
    }

    /// Where the bytes sent for it are to be counted.
    fn note(&self, request: &Head, status: u16) -> Arc<AtomicU64> {
        let sent = Arc::new(AtomicU64::new(0));
        let mut log = self.log.lock().unwrap();
        if log.len() < LOGGED {
            log.push(Entry {
                request: Logged {
                    method: request.method.clone(),
                    target: request.target.clone(),
                    range: request.header("range").map(str::to_string),
                    status,
                    bytes: 0,
                },
                sent: sent.clone(),
            });
        }
        sent
    }

    /// Sends as the link allows.
    fn send(&self, mut client: &TcpStream, bytes: &[u8], sent: &AtomicU64) -> io::Result<u64> {
        for segment in bytes.chunks(SEGMENT) {
            self.wire.carry(segment.len());
            // Before, so that who has the bytes finds them counted.
            self.down.fetch_add(segment.len() as u64, Ordering::Relaxed);
            sent.fetch_add(segment.len() as u64, Ordering::Relaxed);
            client.write_all(segment)?;
        }
        Ok(bytes.len() as u64)
    }
}

/// A response's body on its way to the client, spoiled if so planned.
struct Out<'a> {
    shared: &'a Shared,
    client: &'a TcpStream,
    sent: &'a AtomicU64,
    fault: Option<Fault>,
    position: u64,
}

impl Out<'_> {
    fn send(&self, bytes: &[u8]) -> io::Result<u64> {
        self.shared.send(self.client, bytes, self.sent)
    }
}

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(SEGMENT);
        let mut bytes = bytes[..taken].to_vec();
        match &self.fault {
            Some(Fault::CutAfter(limit)) => {
                let left = limit.saturating_sub(self.position).min(taken as u64) as usize;
                if left < taken {
                    self.position += self.send(&bytes[..left])?;
                    return Err(io::Error::other("cut, as planned"));
                }
            }
            Some(Fault::Trickle { after, every }) => {
                // In one piece: a packet for each byte would take minutes on an emulated machine.
                let at_once = after.saturating_sub(self.position).min(taken as u64) as usize;
                self.position += self.send(&bytes[..at_once])?;
                for byte in &bytes[at_once..] {
                    thread::sleep(*every);
                    self.position += self.send(std::slice::from_ref(byte))?;
                }
                return Ok(taken);
            }
            Some(Fault::Flip(at)) => {
                let inside = at.checked_sub(self.position).filter(|i| *i < taken as u64);
                if let Some(index) = inside {
                    bytes[index as usize] ^= 0x40;
                }
            }
            _ => {}
        }
        self.position += self.send(&bytes)?;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
