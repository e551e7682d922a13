//! Resolves names for the guests of sandboxes whose network policy has domains.
//!
//! | module | contents |
//! |---|---|
//! | here | one proxy for each such sandbox: it answers the queries that arrive at the sandbox's gateway |
//! | [`message`] | queries and answers |
//! | [`places`] | how many queries of each guest may wait for a name server |
//! | [`upstream`] | asks the node's name servers |
//!
//! Invariants: a name that the policy does not allow is never asked for; no answer has an address to which the guest may not connect; queries
//! that wait, and the rate at which queries of one guest are read, are bounded; a guest occupies one thread for blocking work at most.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use thaw_network::names::Names;
use tokio::net::UdpSocket;
use tokio::sync::Mutex;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use message::{Code, Kind, Question, Unanswerable};
pub(crate) use upstream::NameServers;
use upstream::{Answer, NoAnswer, Upstream};

mod message;
pub(crate) mod places;
mod upstream;

/// Most queries of one guest that are answered at once.
const MOST_WAITING: usize = 64;
/// Most queries of one guest that are read in a second.
const MOST_A_SECOND: u32 = 500;
/// Longest query, bytes. Queries have one name of at most 255 bytes and an OPT record.
const MAX_QUERY: usize = 1232;
/// Most addresses of an answer: those that fit into 512 bytes beside the longest name.
const MOST_ADDRESSES: usize = 14;
/// Shortest and longest time to live of an answer.
const SHORTEST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(3600);
/// Pause after a failure of the socket.
const PAUSE: Duration = Duration::from_millis(100);

/// What a guest may resolve, and what follows from it.
#[async_trait]
pub(crate) trait Gate: Send + Sync {
    /// Whether the guest may resolve a name: in lower case, without a dot at its end.
    async fn allows(&self, name: &str) -> Result<bool, Error>;
    /// Lets the guest connect to the addresses of a name. Returns those that it may be told.
    async fn admit(
        &self,
        name: &str,
        addresses: Vec<Ipv4Addr>,
        ttl: Duration,
    ) -> Result<Vec<Ipv4Addr>, Error>;
}

#[async_trait]
impl Gate for Names {
    async fn allows(&self, name: &str) -> Result<bool, Error> {
        let (names, name) = (self.clone(), name.to_owned());
        // A change of the policy has it locked for longer.
        blocking(move || Ok(names.allows(&name))).await
    }

    async fn admit(
        &self,
        name: &str,
        addresses: Vec<Ipv4Addr>,
        ttl: Duration,
    ) -> Result<Vec<Ipv4Addr>, Error> {
        let (names, name) = (self.clone(), name.to_owned());
        blocking(move || Ok(names.admit(&name, &addresses, ttl)?)).await
    }
}

/// Answers the queries of one guest until it is dropped.
#[derive(Debug)]
pub(crate) struct Proxy(AbortHandle);

impl Drop for Proxy {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Proxy {
    /// Answers the queries that arrive at this socket, which does not block. Must be called within the runtime.
    ///
    /// # Errors
    /// The socket cannot be registered.
    pub fn start(
        socket: std::net::UdpSocket,
        gate: impl Gate + 'static,
        upstream: impl Upstream + 'static,
    ) -> Result<Proxy, Error> {
        let socket = UdpSocket::from_std(socket).map_err(|e| {
            Error::new(
                ErrorKind::NetworkUnavailable,
                format!("cannot wait for DNS queries: {e}"),
            )
        })?;
        let answering = Answering {
            socket: Arc::new(socket),
            gate: Arc::new(gate),
            upstream: Arc::new(upstream),
            gate_turn: Arc::default(),
        };
        Ok(Proxy(tokio::spawn(answering.serve()).abort_handle()))
    }
}

#[derive(Clone)]
struct Answering {
    socket: Arc<UdpSocket>,
    gate: Arc<dyn Gate>,
    upstream: Arc<dyn Upstream>,
    /// Held while the gate is asked.
    gate_turn: Arc<Mutex<()>>,
}

impl Answering {
    async fn serve(self) {
        // Dropped with this future, so that no answer keeps the socket open after the proxy.
        let mut answers = JoinSet::new();
        let mut pace = Pace::new();
        let mut query = [0; MAX_QUERY];
        loop {
            let (length, from) = match self.socket.recv_from(&mut query).await {
                Ok(received) => received,
                Err(e) => {
                    tracing::debug!("cannot read a DNS query: {e}");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            pace.keep().await;
            while answers.try_join_next().is_some() {}
            // The guest asks again.
            if answers.len() >= MOST_WAITING {
                continue;
            }
            let (answering, query) = (self.clone(), query[..length].to_vec());
            answers.spawn(async move { answering.answer(&query, from).await });
        }
    }

    async fn answer(&self, query: &[u8], from: SocketAddr) {
        if let Some(answer) = self.answer_to(query).await
            && let Err(e) = self.socket.send_to(&answer, from).await
        {
            tracing::debug!("cannot answer a DNS query: {e}");
        }
    }

    /// The answer to a query; `None` to one that must not get any.
    async fn answer_to(&self, query: &[u8]) -> Option<Vec<u8>> {
        let question = match message::read(query) {
            Ok(question) => question,
            Err(Unanswerable::Silent) => return None,
            Err(Unanswerable::Refused(answer)) => return answer.encode(),
        };
        let code = match self.found(&question).await {
            Ok((addresses, ttl)) => return question.addresses(&addresses, ttl).encode(),
            Err(code) => code,
        };
        question.without_addresses(code).encode()
    }

    /// The addresses that the guest may be told, and for how long.
    async fn found(&self, question: &Question) -> Result<(Vec<Ipv4Addr>, Duration), Code> {
        let name = question.name();
        let unresolved = |e: Error| {
            tracing::warn!("a name is not resolved: {e}");
            Code::Failed
        };
        let is_allowed = {
            let _turn = self.gate_turn.lock().await;
            self.gate.allows(name).await.map_err(unresolved)?
        };
        if !is_allowed {
            return Err(Code::Refused);
        }
        if question.kind() == Kind::Other {
            return Err(Code::NoData);
        }
        let answer = self.upstream.lookup(name).await;
        let Answer { mut addresses, ttl } = answer.map_err(|why| match why {
            NoAnswer::NoName => Code::NoName,
            NoAnswer::NoAddress => Code::NoData,
            NoAnswer::Failed => Code::Failed,
        })?;
        addresses.truncate(MOST_ADDRESSES);
        let ttl = ttl.clamp(SHORTEST, LONGEST);
        let told = {
            let _turn = self.gate_turn.lock().await;
            self.gate.admit(name, addresses, ttl).await.map_err(unresolved)?
        };
        match told.is_empty() {
            true => Err(Code::NoData),
            false => Ok((told, ttl)),
        }
    }
}

/// Bounds how many queries are read in a second. Those that are not read in time are dropped by the kernel.
struct Pace {
    since: Instant,
    read: u32,
}

impl Pace {
    fn new() -> Pace {
        Pace {
            since: Instant::now(),
            read: 0,
        }
    }

    /// Counts a query, and waits if there were too many.
    async fn keep(&mut self) {
        self.read += 1;
        let second = self.since + Duration::from_secs(1);
        if self.read > MOST_A_SECOND {
            tokio::time::sleep_until(second).await;
        }
        if Instant::now() >= second {
            *self = Pace::new();
        }
    }
}

#[cfg(test)]
#[path = "dns_test.rs"]
mod tests;
