//! Requests to a registry: retried with bounded backoff, authenticated when asked, failures told apart.
//!
//! oci-client would do the requests but drops a response's headers when it fails, so it cannot honour `Retry-After`,
//! and it cannot resume a body; hence reqwest directly.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, RANGE,
    RETRY_AFTER, WWW_AUTHENTICATE,
};
use reqwest::{Body, Method, Response, StatusCode, Url};
use serde::Deserialize;
use tokio::time::{Instant, sleep_until};

use crate::error::Error;
use crate::progress::{Event, Progress};

use super::auth::{Challenge, Credentials, Login};
use super::token::Access;
use super::wire::{Failure, Sent, Wire, drain, follow, same_origin};

const MAX_ERROR_BODY: usize = 8 << 10;
/// How long a registry may send nothing before a line says so, and how long until the next such line.
const SILENCE: Duration = Duration::from_secs(5);
const SILENCE_AGAIN: Duration = Duration::from_secs(10);

/// How patiently a registry is asked.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Requests before giving up; at least 1.
    pub attempts: u32,
    /// The first pause; each further one is twice as long.
    pub first: Duration,
    /// The longest pause. A registry that asks for a longer one is not waited for.
    pub longest: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 5,
            first: Duration::from_millis(300),
            longest: Duration::from_secs(30),
        }
    }
}

impl Retry {
    /// The pause before asking again the `asked`th time, and up to a quarter more so that many do not ask at once.
    pub(super) fn pause(&self, asked: u32) -> Duration {
        let pause = self
            .first
            .saturating_mul(1 << asked.saturating_sub(1).min(16))
            .min(self.longest);
        let nanos = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |now| now.subsec_nanos());
        pause + pause.mul_f64(f64::from(nanos % 1000) / 4000.0)
    }
}

/// Told what a connection does beside its requests.
pub trait Observer: Send + Sync {
    /// A token was asked for, or a password read again.
    fn login(&self) {}
}

/// Nobody is told.
pub struct Unobserved;

impl Observer for Unobserved {}

/// Where a registry is and who asks it.
pub struct Party {
    /// As messages name it.
    pub name: String,
    /// As its credentials are filed: `docker.io`, `host:port`.
    pub registry: String,
    /// Where credentials go: `https://host[:port]/…`.
    pub base: String,
    /// Tokens may be asked for over plain HTTP.
    pub plain: bool,
    pub credentials: Credentials,
    /// What they are now.
    pub login: Login,
    /// `repository:NAME:ACTIONS`.
    pub scope: String,
}

/// One registry and what it wants to see.
pub struct Connection {
    wire: Arc<dyn Wire>,
    /// As messages name it.
    pub registry: String,
    origin: Url,
    /// What it is shown, perhaps the same as another is.
    pub access: Arc<Access>,
    retry: Retry,
    progress: Arc<dyn Progress>,
}

/// What is sent with a request.
pub enum Payload<'a> {
    Nothing,
    Bytes(Bytes),
    /// So many bytes, made anew whenever they are sent.
    Stream(u64, &'a (dyn Fn() -> Body + Send + Sync)),
}

/// What to ask for.
pub struct Request<'a> {
    pub method: Method,
    pub url: &'a str,
    pub accept: Option<&'a str>,
    /// Bytes wanted: from the first to before the second, or to the end.
    pub range: Option<(u64, Option<u64>)>,
    pub headers: &'a [(HeaderName, HeaderValue)],
    pub payload: Payload<'a>,
    /// As messages name it.
    pub what: &'a str,
    /// Foreign URLs get no credentials (CVE-2020-15157).
    pub foreign: bool,
}

impl<'a> Request<'a> {
    pub fn get(url: &'a str, what: &'a str) -> Self {
        Self {
            method: Method::GET,
            url,
            accept: None,
            range: None,
            headers: &[],
            payload: Payload::Nothing,
            what,
            foreign: false,
        }
    }

    fn build(&self) -> Result<reqwest::Request, Failure> {
        let lasting =
            |problem: &dyn std::fmt::Display| Failure::lasting(format!("{:?}: {problem}", self.url));
        let url = Url::parse(self.url).map_err(|error| lasting(&error))?;
        let mut request = reqwest::Request::new(self.method.clone(), url);
        let headers = request.headers_mut();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(accept) = self.accept {
            headers.insert(
                ACCEPT,
                HeaderValue::from_str(accept).map_err(|error| lasting(&error))?,
            );
        }
        let range = self.range.map(|(from, until)| match until {
            Some(until) => format!("bytes={from}-{}", until.saturating_sub(1)),
            None => format!("bytes={from}-"),
        });
        if let Some(range) = range {
            headers.insert(
                RANGE,
                HeaderValue::try_from(range).map_err(|error| lasting(&error))?,
            );
        }
        for (name, value) in self.headers {
            headers.insert(name, value.clone());
        }
        match &self.payload {
            Payload::Nothing if matches!(self.method, Method::GET | Method::HEAD) => {}
            Payload::Nothing => drop(headers.insert(CONTENT_LENGTH, HeaderValue::from(0))),
            Payload::Bytes(bytes) => *request.body_mut() = Some(bytes.clone().into()),
            Payload::Stream(size, body) => {
                headers.insert(CONTENT_LENGTH, HeaderValue::from(*size));
                *request.body_mut() = Some(body());
            }
        }
        Ok(request)
    }
}

/// Why an exchange did not come to an answer.
pub enum Unanswered {
    /// The request was not answered.
    Failure(Failure),
    /// It was not sent: there was nothing to show that the registry would take.
    Access(Error),
}

impl From<Failure> for Unanswered {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl Connection {
    pub fn new(
        party: Party,
        wire: Arc<dyn Wire>,
        retry: Retry,
        progress: Arc<dyn Progress>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, Error> {
        let (name, base) = (party.name.clone(), party.base.clone());
        let access = Arc::new(Access::new(party, observer));
        Self::sharing(name, &base, access, wire, retry, progress)
    }

    /// One that is shown what another is: its mirror that passes credentials on.
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

    /// One request, authenticated if the registry wants that, and again if it no longer takes what it took before.
    /// Any answer comes back, but for redirects, which are followed.
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
            // What somebody else thinks of a request without credentials says nothing about them.
            if !same_origin(&self.origin, &sent.url) {
                return Ok(sent);
            }
            let challenge = match sent.response.status() {
                StatusCode::UNAUTHORIZED if !renewed => {
                    let headers = sent.response.headers().get_all(WWW_AUTHENTICATE).iter();
                    Challenge::parse(headers.filter_map(|it| it.to_str().ok()))
                }
                // Some clouds' registries say so of a password that has expired.
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

    /// Asks until there is an answer or no hope: what is a success comes back as it is.
    pub async fn ask(&self, request: &Request<'_>) -> Result<Sent, Error> {
        let mut asked = 0;
        loop {
            asked += 1;
            let exchange = self.exchange(request);
            let answer = match request.payload {
                Payload::Nothing => self.wait_for(asked, exchange).await,
                // It may take long to send.
                Payload::Bytes(_) | Payload::Stream(..) => exchange.await,
            };
            let sent = match answer {
                Ok(sent) => sent,
                Err(Unanswered::Access(error)) => return Err(error),
                Err(Unanswered::Failure(failure)) => {
                    if asked >= self.retry.attempts.min(3) || !failure.may_pass {
                        return Err(self.unreachable(&failure));
                    }
                    self.pause(self.retry.pause(asked), failure.reason).await;
                    continue;
                }
            };
            let status = sent.response.status();
            if status.is_success() {
                return Ok(sent);
            }
            let passing = passing(status);
            let wanted = retry_after(sent.response.headers());
            let pause = wanted.unwrap_or_else(|| self.retry.pause(asked));
            if !passing || asked >= self.retry.attempts || pause > self.retry.longest.mul_f64(1.25) {
                return Err(self.refusal(request.what, sent.response, asked).await);
            }
            drain(sent.response).await;
            self.pause(pause, format!("it answered {status}")).await;
        }
    }

    /// [`Self::ask`], for what only has a body if it is 200 or 206.
    pub async fn get(&self, request: &Request<'_>) -> Result<Response, Error> {
        let response = self.ask(request).await?.response;
        match response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(response),
            _ => Err(self.failed(request.what, response, 1).await),
        }
    }

    async fn pause(&self, wait: Duration, reason: String) {
        self.retrying(wait, reason);
        tokio::time::sleep(wait).await;
    }

    /// What comes of `answer`. While nothing comes, says so: a person takes a silent program for one that hangs.
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

    /// Says that a pause is made.
    pub fn retrying(&self, wait: Duration, reason: String) {
        self.progress.event(Event::Retrying {
            registry: self.registry.clone(),
            wait,
            reason,
        });
    }

    /// What an answer that is no success means.
    pub async fn refusal(&self, what: &str, response: Response, attempts: u32) -> Error {
        match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Error::RegistryDenied {
                registry: self.registry.clone(),
                status: response.status().as_u16(),
                what: what.into(),
                reason: said(response).await,
            },
            StatusCode::NOT_FOUND | StatusCode::GONE => Error::RegistryNotFound {
                registry: self.registry.clone(),
                what: what.into(),
            },
            StatusCode::TOO_MANY_REQUESTS => Error::RegistryRateLimited {
                registry: self.registry.clone(),
                what: what.into(),
                retry_after: retry_after(response.headers()).map(|wanted| wanted.as_secs()),
            },
            _ => self.failed(what, response, attempts).await,
        }
    }

    async fn failed(&self, what: &str, response: Response, attempts: u32) -> Error {
        let status = response.status().as_u16();
        Error::RegistryFailed {
            registry: self.registry.clone(),
            status,
            what: what.into(),
            reason: said(response).await,
            attempts,
        }
    }

    /// No answer at all: no name, no route, no TLS, silence.
    pub fn unreachable(&self, failure: &Failure) -> Error {
        self.access.unreachable(failure)
    }
}

/// Whether a status may be another one soon.
pub fn passing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
    ) || status.is_server_error()
}

/// `Retry-After`: seconds or a date.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

/// The first bytes of a body; an error ends it.
pub async fn limited(mut response: Response, limit: usize) -> Vec<u8> {
    let mut body = Vec::new();
    while let Ok(Some(bytes)) = response.chunk().await {
        body.extend_from_slice(&bytes[..bytes.len().min(limit - body.len())]);
        if body.len() >= limit {
            break;
        }
    }
    body
}

/// The registry's own words, on one line.
pub async fn said(response: Response) -> String {
    #[derive(Deserialize)]
    struct Envelope {
        errors: Vec<One>,
    }
    #[derive(Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let reason = response
        .status()
        .canonical_reason()
        .unwrap_or("no reason given")
        .to_lowercase();
    let body = limited(response, MAX_ERROR_BODY).await;
    let text = match serde_json::from_slice::<Envelope>(&body) {
        Ok(Envelope { errors }) => {
            let said = errors.iter().map(|it| {
                if it.message.is_empty() {
                    &it.code
                } else {
                    &it.message
                }
            });
            said.cloned().collect::<Vec<_>>().join("; ")
        }
        // A page for people says no more than its status.
        Err(_) if body.starts_with(b"<") => String::new(),
        Err(_) => String::from_utf8_lossy(&body).into_owned(),
    };
    let line: String = text
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
        .take(200)
        .collect();
    let line: String = line.chars().filter(|it| !it.is_control()).collect();
    if line.is_empty() { reason } else { line }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::fetch::tests::wire::{Network, Reply};

    #[test]
    fn pauses_grow_and_are_bounded() {
        let retry = Retry {
            attempts: 9,
            first: Duration::from_millis(100),
            longest: Duration::from_secs(1),
        };
        for (asked, least) in [(1, 100), (2, 200), (4, 800), (5, 1000), (60, 1000)] {
            let pause = retry.pause(asked).as_millis();
            assert!((least..=least * 5 / 4).contains(&pause), "{asked}: {pause}");
        }
    }

    /// What is told, and when.
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
        let party = Party {
            name: "registry.example".into(),
            registry: "registry.example".into(),
            base: "https://registry.example".into(),
            plain: false,
            credentials: Credentials::Anonymous,
            login: Login::Anonymous,
            scope: "repository:app:pull".into(),
        };
        let connection = Connection::new(
            party,
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
        // What is sent may take its time, and nothing is said of an answer that comes at once.
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

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let parse = |value: &str| retry_after(&HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]));
        assert_eq!(parse("120"), Some(Duration::from_secs(120)));
        assert_eq!(parse("Fri, 31 Dec 1999 23:59:59 GMT"), Some(Duration::ZERO));
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(60));
        assert!((50..=60).contains(&parse(&date).unwrap().as_secs()));
        assert_eq!(parse("soon"), None);
    }
}
