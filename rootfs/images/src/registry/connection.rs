//! Requests to a registry: retried with bounded backoff, authenticated if the registry asks for it, with typed errors.
//!
//! oci-client is not used: it drops the headers of error answers, so it cannot honour `Retry-After`, and it cannot resume a body. The
//! requests therefore use reqwest directly.

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use reqwest::{Response, StatusCode, Url};
use tokio::time::{Instant, sleep_until};

use crate::error::Error;
use crate::progress::{Event, Progress};

use super::account::{Observer, RegistryAccount};
use super::auth::Challenge;
use super::refusal::{failed, passing, refusal, retry_after};
use super::request::{Payload, Request};
use super::retries::Retry;
use super::token::Access;
use super::wire::{Failure, Sent, Wire, drain, follow, same_origin};

/// Requests without any answer after which the registry is given up.
const UNANSWERED_ATTEMPTS: u32 = 3;
/// How long a registry may send nothing before this is reported, and the interval of later reports.
const SILENCE: Duration = Duration::from_secs(5);
const SILENCE_AGAIN: Duration = Duration::from_secs(10);

/// A connection to one registry, with its credentials.
pub struct Connection {
    wire: Arc<dyn Wire>,
    /// Its name in messages.
    pub registry: String,
    origin: Url,
    /// Its credentials, which another connection may share.
    pub access: Arc<Access>,
    retry: Retry,
    progress: Arc<dyn Progress>,
}

/// Why an exchange got no answer.
pub enum Unanswered {
    /// The request was not answered.
    Failure(Failure),
    /// It was not sent, because there were no credentials that the registry would accept.
    Access(Error),
}

impl From<Failure> for Unanswered {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl Connection {
    pub fn new(
        account: RegistryAccount,
        wire: Arc<dyn Wire>,
        retry: Retry,
        progress: Arc<dyn Progress>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, Error> {
        let (name, base) = (account.name.clone(), account.base.clone());
        let access = Arc::new(Access::new(account, observer));
        Self::sharing(name, &base, access, wire, retry, progress)
    }

    /// A connection that shares another's credentials: to a mirror that passes credentials on.
    pub fn sharing(
        name: String,
        base: &str,
        access: Arc<Access>,
        wire: Arc<dyn Wire>,
        retry: Retry,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        let origin = Url::parse(base).map_err(|error| Error::RegistryUnreachable {
            registry: name.clone(),
            reason: format!("{base:?} is no address: {error}"),
            advice: "check its name".into(),
        })?;
        Ok(Self {
            wire,
            registry: name,
            origin,
            access,
            retry,
            progress,
        })
    }

    /// Sends one request with credentials if the registry requires them, and again with renewed ones if it refuses the old ones. Returns
    /// any answer, but follows redirects.
    pub async fn exchange(&self, request: &Request<'_>) -> Result<Sent, Unanswered> {
        let wire = &*self.wire;
        let mut renewed = false;
        loop {
            let mut built = request.build()?;
            if request.foreign || !same_origin(&self.origin, built.url()) {
                return Ok(follow(wire, built).await?);
            }
            let shown = self
                .access
                .shown(wire, request.what)
                .await
                .map_err(Unanswered::Access)?;
            if let Some(header) = shown.header() {
                built.headers_mut().insert(AUTHORIZATION, header.clone());
            }
            let sent = follow(wire, built).await?;
            // Another origin got no credentials, so its answer does not concern them.
            if !same_origin(&self.origin, &sent.url) {
                return Ok(sent);
            }
            let challenge = match sent.response.status() {
                StatusCode::UNAUTHORIZED if !renewed => {
                    let headers = sent.response.headers().get_all(WWW_AUTHENTICATE).iter();
                    Challenge::parse(headers.filter_map(|it| it.to_str().ok()))
                }
                // Registries of some clouds answer so when a password has expired.
                StatusCode::FORBIDDEN if !renewed && shown.was_accepted() => None,
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Ok(sent),
                status => {
                    if !status.is_server_error() {
                        shown.accept();
                    }
                    return Ok(sent);
                }
            };
            renewed = true;
            let anew = self.access.refused(&shown, challenge, wire, request.what).await;
            if !anew.map_err(Unanswered::Access)? {
                return Ok(sent);
            }
            drain(sent.response).await;
        }
    }

    /// Sends a request until it succeeds or retries are exhausted. Returns the successful answer.
    pub async fn ask(&self, request: &Request<'_>) -> Result<Sent, Error> {
        let mut retries = self.retry.begin();
        let mut attempt = 0;
        loop {
            attempt += 1;
            let exchange = self.exchange(request);
            let answer = match request.payload {
                Payload::Nothing => self.wait_for(attempt, exchange).await,
                // It may take long to send.
                Payload::Bytes(_) | Payload::Stream(..) => exchange.await,
            };
            let sent = match answer {
                Ok(sent) => sent,
                Err(Unanswered::Access(error)) => return Err(error),
                Err(Unanswered::Failure(failure)) => {
                    let pause = retries.next_of(UNANSWERED_ATTEMPTS);
                    let Some(pause) = pause.filter(|_| failure.may_pass) else {
                        return Err(self.unreachable(&failure));
                    };
                    self.pause(pause, failure.reason).await;
                    continue;
                }
            };
            let status = sent.response.status();
            if status.is_success() {
                return Ok(sent);
            }
            let pause = retries.next(retry_after(sent.response.headers()));
            let Some(pause) = pause.filter(|_| passing(status)) else {
                return Err(refusal(&self.registry, request.what, sent.response, attempt).await);
            };
            drain(sent.response).await;
            self.pause(pause, format!("it answered {status}")).await;
        }
    }

    /// Like [`Self::ask`], for a request whose answer has a body only with status 200 or 206.
    pub async fn get(&self, request: &Request<'_>) -> Result<Response, Error> {
        let response = self.ask(request).await?.response;
        match response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(response),
            _ => Err(failed(&self.registry, request.what, response, 1).await),
        }
    }

    /// Reports a pause and waits for it before the next attempt.
    pub async fn pause(&self, wait: Duration, reason: String) {
        self.retrying(wait, reason);
        tokio::time::sleep(wait).await;
    }

    /// Waits for `answer`. Reports when nothing arrives for long, because a silent program looks as if it hangs.
    pub async fn wait_for<T>(&self, attempt: u32, answer: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let mut next = began + SILENCE;
        tokio::pin!(answer);
        loop {
            tokio::select! {
                biased;
                came = &mut answer => return came,
                () = sleep_until(next) => {}
            }
            next += SILENCE_AGAIN;
            let (registry, waited) = (self.registry.clone(), began.elapsed());
            tracing::info!(
                registry,
                attempt,
                waited_s = waited.as_secs(),
                "a registry sends nothing"
            );
            self.progress.event(Event::Waiting {
                registry,
                attempt,
                waited,
            });
        }
    }

    /// Reports a pause.
    pub fn retrying(&self, wait: Duration, reason: String) {
        self.progress.event(Event::Retrying {
            registry: self.registry.clone(),
            wait,
            reason,
        });
    }

    /// The error if there is no answer: no name, no route, no TLS, or silence.
    pub fn unreachable(&self, failure: &Failure) -> Error {
        self.access.unreachable(failure)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use bytes::Bytes;
    use reqwest::Method;

    use crate::registry::account::Unobserved;
    use crate::registry::testing::{Network, Reply, anonymous};

    use super::*;

    /// The reported events and their times.
    struct Log(Instant, Mutex<Vec<(u64, Event)>>);

    impl Progress for Log {
        fn event(&self, event: Event) {
            self.1.lock().unwrap().push((self.0.elapsed().as_secs(), event));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_registry_that_is_silent_is_named_with_the_attempt() {
        let network = Network::new(|_| Reply::status(200).after(Duration::from_secs(28)));
        let log = Arc::new(Log(Instant::now(), Mutex::default()));
        let account = anonymous();
        let connection = Connection::new(
            account,
            network,
            Retry::default(),
            log.clone(),
            Arc::new(Unobserved),
        );
        let connection = connection.unwrap();
        let request = Request::get("https://registry.example/v2/app/manifests/1", "a manifest");
        connection.ask(&request).await.unwrap();
        let said = log.1.lock().unwrap().clone();
        let said: Vec<_> = said
            .iter()
            .map(|(at, event)| match event {
                Event::Waiting {
                    registry,
                    attempt,
                    waited,
                } => (*at, registry.as_str(), *attempt, waited.as_secs()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(said, [5, 15, 25].map(|at| (at, "registry.example", 1, at)));
        // Sending may take long without a report, and an answer that comes at once causes none.
        log.1.lock().unwrap().clear();
        let sending = Request {
            method: Method::PUT,
            payload: Payload::Bytes(Bytes::from_static(b"x")),
            ..request
        };
        connection.ask(&sending).await.unwrap();
        connection.wait_for(1, std::future::ready(())).await;
        assert_eq!(*log.1.lock().unwrap(), []);
    }
}
