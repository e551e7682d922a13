//! Requests to a registry: retried with bounded backoff, authenticated when asked, failures told apart.
//!
//! oci-client would do the requests but drops a response's headers when it fails, so it cannot honour `Retry-After`,
//! and it cannot resume a body; hence reqwest directly.

use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, SystemTime};

use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, RANGE, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;

use crate::error::Error;
use crate::progress::{Event, Progress};

use super::auth::{Challenge, Login, basic};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence within a body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_REDIRECTS: usize = 10;
const MAX_ERROR_BODY: usize = 8 << 10;
const MAX_TOKEN_BODY: usize = 1 << 20;

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
    fn pause(&self, asked: u32) -> Duration {
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

/// One registry and what it wants to see.
pub struct Connection {
    client: Client,
    /// As messages name it.
    pub registry: String,
    plain: bool,
    login: Login,
    scope: String,
    /// The `Authorization` header that worked last.
    authorization: Mutex<Option<String>>,
    retry: Retry,
    progress: Arc<dyn Progress>,
}

/// What to ask for.
pub struct Request<'a> {
    pub url: &'a str,
    pub accept: Option<&'a str>,
    /// First byte wanted, when resuming.
    pub from: u64,
    /// As messages name it.
    pub what: &'a str,
    /// Foreign URLs get no credentials (CVE-2020-15157).
    pub foreign: bool,
}

impl Connection {
    pub fn new(
        registry: String,
        plain: bool,
        login: Login,
        scope: String,
        retry: Retry,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        let client = client().map_err(|error| Error::RegistryUnreachable {
            registry: registry.clone(),
            reason: cause(&error),
            advice: "check the certificates of this host (SSL_CERT_FILE)".into(),
        })?;
        let authorization = Mutex::new(None);
        Ok(Self {
            client,
            registry,
            plain,
            login,
            scope,
            authorization,
            retry,
            progress,
        })
    }

    /// Asks until there is an answer or no hope: 200 or 206 come back as they are.
    pub async fn get(&self, request: &Request<'_>) -> Result<Response, Error> {
        let mut asked = 0;
        let mut authenticated = false;
        loop {
            asked += 1;
            let response = match self.send(request).await {
                Ok(response) => response,
                Err(error) if asked >= self.retry.attempts.min(3) || !may_pass(&error) => {
                    return Err(self.unreachable(&error));
                }
                Err(error) => {
                    self.pause(self.retry.pause(asked), cause(&error)).await;
                    continue;
                }
            };
            let status = response.status();
            match status {
                StatusCode::OK | StatusCode::PARTIAL_CONTENT => return Ok(response),
                StatusCode::UNAUTHORIZED if !authenticated && !request.foreign => {
                    authenticated = true;
                    asked -= 1;
                    if self.authenticate(&response, request.what).await? {
                        continue;
                    }
                    return Err(self.denied(request.what, response).await);
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    return Err(self.denied(request.what, response).await);
                }
                StatusCode::NOT_FOUND | StatusCode::GONE => {
                    return Err(Error::RegistryNotFound {
                        registry: self.registry.clone(),
                        what: request.what.into(),
                    });
                }
                StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {}
                _ if status.is_server_error() => {}
                _ => return Err(self.failed(request.what, response, asked).await),
            }
            let wanted = retry_after(response.headers());
            let pause = wanted.unwrap_or_else(|| self.retry.pause(asked));
            if asked >= self.retry.attempts || pause > self.retry.longest.mul_f64(1.25) {
                if status == StatusCode::TOO_MANY_REQUESTS {
                    return Err(Error::RegistryRateLimited {
                        registry: self.registry.clone(),
                        what: request.what.into(),
                        retry_after: wanted.map(|wanted| wanted.as_secs()),
                    });
                }
                return Err(self.failed(request.what, response, asked).await);
            }
            self.pause(pause, format!("it answered {status}")).await;
        }
    }

    async fn send(&self, request: &Request<'_>) -> reqwest::Result<Response> {
        let mut builder = self.client.get(request.url);
        if let Some(accept) = request.accept {
            builder = builder.header(ACCEPT, accept);
        }
        if request.from > 0 {
            builder = builder.header(RANGE, format!("bytes={}-", request.from));
        }
        let authorization = self
            .authorization
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(authorization) = authorization.filter(|_| !request.foreign) {
            builder = builder.header(AUTHORIZATION, authorization);
        }
        builder.send().await
    }

    async fn pause(&self, wait: Duration, reason: String) {
        self.progress.event(Event::Retrying {
            registry: self.registry.clone(),
            wait,
            reason,
        });
        tokio::time::sleep(wait).await;
    }

    /// Answers a 401. Returns whether asking again makes sense.
    async fn authenticate(&self, response: &Response, what: &str) -> Result<bool, Error> {
        let headers = response.headers().get_all(WWW_AUTHENTICATE).iter();
        let authorization = match (
            Challenge::parse(headers.filter_map(|it| it.to_str().ok())),
            &self.login,
        ) {
            (Some(Challenge::Basic), Login::Basic { user, password }) => basic(user, password),
            (
                Some(Challenge::Bearer {
                    realm,
                    service,
                    scope,
                }),
                _,
            ) => {
                let scope = scope.unwrap_or_else(|| self.scope.clone());
                format!(
                    "Bearer {}",
                    self.token(&realm, service.as_deref(), &scope, what).await?
                )
            }
            _ => return Ok(false),
        };
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(authorization);
        Ok(true)
    }

    /// A token from the realm the registry names.
    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: &str,
        what: &str,
    ) -> Result<String, Error> {
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let denied = |status: StatusCode, reason: String| Error::RegistryDenied {
            registry: self.registry.clone(),
            status: status.as_u16(),
            what: what.into(),
            reason,
        };
        let mut url = Url::parse(realm).map_err(|error| {
            denied(
                StatusCode::UNAUTHORIZED,
                format!("its token service {realm:?} is no address: {error}"),
            )
        })?;
        let safe = url.scheme() == "https" || (self.plain && url.scheme() == "http");
        if !safe {
            let reason = format!("its token service {realm:?} would see the password in the clear");
            return Err(denied(StatusCode::UNAUTHORIZED, reason));
        }
        let builder = match &self.login {
            Login::Identity(token) => {
                let form = [
                    ("grant_type", "refresh_token"),
                    ("refresh_token", token.as_str()),
                    ("client_id", "thaw"),
                    ("service", service.unwrap_or_default()),
                    ("scope", scope),
                ];
                self.client.post(url).form(&form)
            }
            login => {
                let service = service.map(|service| ("service", service));
                url.query_pairs_mut()
                    .extend_pairs(service.into_iter().chain([("scope", scope)]));
                match login {
                    Login::Basic { user, password } => {
                        self.client.get(url).header(AUTHORIZATION, basic(user, password))
                    }
                    _ => self.client.get(url),
                }
            }
        };
        let response = builder.send().await.map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        if status == StatusCode::TOO_MANY_REQUESTS {
            let retry_after = retry_after(response.headers()).map(|wait| wait.as_secs());
            let what = format!("a token for {what}");
            return Err(Error::RegistryRateLimited {
                registry: self.registry.clone(),
                what,
                retry_after,
            });
        }
        if status.is_server_error() {
            return Err(self.failed(&format!("a token for {what}"), response, 1).await);
        }
        if !status.is_success() {
            let reason = format!("its token service says: {}", said(response).await);
            return Err(denied(status, reason));
        }
        let body = limited(response, MAX_TOKEN_BODY).await;
        let answer: Option<Answer> = serde_json::from_slice(&body).ok();
        let token = answer.and_then(|answer| answer.token.or(answer.access_token));
        token
            .filter(|token| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()))
            .ok_or_else(|| denied(StatusCode::UNAUTHORIZED, "its token service gave no token".into()))
    }

    async fn denied(&self, what: &str, response: Response) -> Error {
        let status = response.status().as_u16();
        Error::RegistryDenied {
            registry: self.registry.clone(),
            status,
            what: what.into(),
            reason: said(response).await,
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
    pub fn unreachable(&self, error: &reqwest::Error) -> Error {
        let reason = cause(error);
        let advice = if reason.contains("certificate") {
            "if its certificate is your own, name its authority in SSL_CERT_FILE"
        } else if reason.contains("corrupt message") || reason.contains("InvalidContentType") {
            "if it speaks plain HTTP, say --plain-http"
        } else {
            "check its name, the network, and whether it runs"
        };
        Error::RegistryUnreachable {
            registry: self.registry.clone(),
            reason,
            advice: advice.into(),
        }
    }
}

/// An HTTP client that verifies TLS with the host's certificates (or `SSL_CERT_FILE`), resolves names without glibc's
/// loadable modules (a static binary has none), and follows no redirect from HTTPS to plain HTTP.
fn client() -> reqwest::Result<Client> {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| {
        // Only the first provider of a process counts; whichever it is, it does.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    let redirect = reqwest::redirect::Policy::custom(|attempt| {
        if attempt.previous().len() > MAX_REDIRECTS {
            return attempt.error("too many redirects");
        }
        let downgrade =
            attempt.url().scheme() == "http" && attempt.previous().iter().any(|it| it.scheme() == "https");
        if downgrade {
            attempt.error("redirected from HTTPS to plain HTTP")
        } else {
            attempt.follow()
        }
    });
    let builder = || {
        Client::builder()
            .user_agent(concat!("thaw/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .hickory_dns(true)
    };
    // A host without any certificates can still use registries on plain HTTP.
    let client = builder().redirect(redirect).build();
    client.or_else(|_| builder().tls_certs_only([]).build())
}

/// Whether trying again may help.
fn may_pass(error: &reqwest::Error) -> bool {
    !(error.is_builder() || error.is_redirect())
}

/// The innermost cause, which is the one that tells.
pub fn cause(error: &reqwest::Error) -> String {
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

/// `Retry-After`: seconds or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

/// The first bytes of a body; an error ends it.
async fn limited(mut response: Response, limit: usize) -> Vec<u8> {
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
async fn said(response: Response) -> String {
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
    use super::*;

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
