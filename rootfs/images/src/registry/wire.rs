//! Sending requests and following redirects.
//!
//! Invariants: a redirect to another origin gets no credentials and no header that is meant for the first origin. A request with a secret
//! body never follows such a redirect. Redirects from HTTPS to plain HTTP, in a circle, or longer than [`MAX_REDIRECTS`] are not followed.
//! The head of an answer has bounded size.

use std::sync::Once;
use std::time::Duration;

use futures_util::future::BoxFuture;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_LENGTH, HeaderName, LOCATION, RANGE};
use reqwest::{Client, ClientBuilder, Method, Request, Response, StatusCode, Url};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence within a body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections that are kept to one host.
const IDLE_CONNECTIONS: usize = 32;
const MAX_HEADERS: usize = 100;
const MAX_REDIRECTS: usize = 10;
/// An unwanted body up to this size is read to its end, so that the connection can be used again.
const MAX_DRAINED: u64 = 16 << 10;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Headers that another origin may receive.
const FOR_EVERYBODY: [HeaderName; 4] = [ACCEPT, ACCEPT_ENCODING, RANGE, CONTENT_LENGTH];

/// Why there was no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub reason: String,
    /// Trying again may help.
    pub may_pass: bool,
    pub timeout: bool,
}

impl Failure {
    /// A failure that retries do not change.
    pub fn lasting(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            may_pass: false,
            timeout: false,
        }
    }

    pub fn timeout(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            may_pass: true,
            timeout: true,
        }
    }
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        Self {
            reason: cause(&error),
            may_pass: !(error.is_builder() || error.is_redirect()),
            timeout: error.is_timeout(),
        }
    }
}

/// The innermost cause, which is the most specific.
fn cause(error: &reqwest::Error) -> String {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text = innermost.to_string();
    if error.is_timeout() && !text.contains("time") {
        format!("{text} (no answer in time)")
    } else {
        text
    }
}

/// Sends one request and returns its answer, whatever its status. It follows no redirects.
pub trait Wire: Send + Sync {
    fn send(&self, request: Request) -> BoxFuture<'_, Result<Response, Failure>>;
}

impl Wire for Client {
    fn send(&self, request: Request) -> BoxFuture<'_, Result<Response, Failure>> {
        Box::pin(async move { Ok(self.execute(request).await?) })
    }
}

/// An HTTP client that verifies TLS with the host's certificates (or `SSL_CERT_FILE`) and resolves names without glibc's loadable modules,
/// which a static binary lacks.
pub fn client() -> Result<Client, Failure> {
    build(|builder| builder.read_timeout(READ_TIMEOUT))
}

/// A client without a time limit, which its user sets: the answer to a large body comes only once it was sent.
pub fn patient_client() -> Result<Client, Failure> {
    build(|builder| builder)
}

fn build(set: impl Fn(ClientBuilder) -> ClientBuilder) -> Result<Client, Failure> {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| {
        // Only the first provider of a process takes effect; any provider is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    let builder = || {
        let builder = Client::builder()
            .user_agent(concat!("thaw/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .http1_max_headers(MAX_HEADERS)
            .redirect(reqwest::redirect::Policy::none())
            .hickory_dns(true);
        set(builder)
    };
    // A host without any certificates can still use registries on plain HTTP.
    let client = builder().build();
    Ok(client.or_else(|_| builder().tls_certs_only([]).build())?)
}

/// An answer that is not a redirect.
#[derive(Debug)]
pub struct Sent {
    pub response: Response,
    /// The address that sent it.
    pub url: Url,
    /// Number of redirects that were followed.
    pub redirects: usize,
}

/// Sends a request and follows redirects.
pub async fn follow(wire: &dyn Wire, request: Request) -> Result<Sent, Failure> {
    follow_to(wire, request, Reach::Anywhere).await
}

/// Like [`follow`], for a request with credentials in its body: a redirect to another origin is refused, because that origin would see
/// them.
pub async fn follow_within_origin(wire: &dyn Wire, request: Request) -> Result<Sent, Failure> {
    follow_to(wire, request, Reach::SameOrigin).await
}

/// How far a request may be redirected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    Anywhere,
    SameOrigin,
}

async fn follow_to(wire: &dyn Wire, mut request: Request, reach: Reach) -> Result<Sent, Failure> {
    let mut visited = vec![request.url().clone()];
    loop {
        let spare = request.try_clone();
        let url = request.url().clone();
        let response = wire.send(request).await?;
        let location = match response.status() {
            StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT => response.headers().get(LOCATION),
            _ => None,
        };
        let location = location.map(|it| it.to_str().map(str::to_owned));
        let (Some(location), Some(mut next)) = (location, spare) else {
            let redirects = visited.len() - 1;
            return Ok(Sent {
                response,
                url,
                redirects,
            });
        };
        let keeps_method = matches!(
            response.status(),
            StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT
        );
        if !keeps_method && !matches!(*next.method(), Method::GET | Method::HEAD) {
            let redirects = visited.len() - 1;
            return Ok(Sent {
                response,
                url,
                redirects,
            });
        }
        let target = location
            .ok()
            .and_then(|location| url.join(&location).ok())
            .filter(|target| matches!(target.scheme(), "http" | "https") && target.has_host())
            .ok_or_else(|| Failure::lasting("redirected to what is no address of HTTP"))?;
        drain(response).await;
        if url.scheme() == "https" && target.scheme() == "http" {
            return Err(Failure::lasting("redirected from HTTPS to plain HTTP"));
        }
        if reach == Reach::SameOrigin && !same_origin(&visited[0], &target) {
            let reason =
                "redirected to another origin, which would see the credentials in the request's body";
            return Err(Failure::lasting(reason));
        }
        if visited.contains(&target) {
            return Err(Failure::lasting("redirected in a circle"));
        }
        if visited.len() > MAX_REDIRECTS {
            return Err(Failure::lasting("too many redirects"));
        }
        if !same_origin(&visited[0], &target) {
            let meant: Vec<_> = next.headers().keys().cloned().collect();
            for name in meant.iter().filter(|name| !FOR_EVERYBODY.contains(name)) {
                next.headers_mut().remove(name);
            }
        }
        *next.url_mut() = target.clone();
        visited.push(target);
        request = next;
    }
}

/// Same scheme, host and port.
pub fn same_origin(one: &Url, other: &Url) -> bool {
    one.scheme() == other.scheme()
        && one.host() == other.host()
        && one.port_or_known_default() == other.port_or_known_default()
}

/// Reads an unwanted body to its end, if that is quick.
pub async fn drain(mut response: Response) {
    if response
        .content_length()
        .is_some_and(|length| length <= MAX_DRAINED)
    {
        let rest = async { while let Ok(Some(_)) = response.chunk().await {} };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, rest).await;
    }
}
