//! Authentication: passwords and tokens, requested when the registry wants them and renewed while they are used.
//!
//! Invariants: one renewal at a time, and all requests that need it wait for it. A refusal replaces credentials only if they are still the
//! current ones. Each renewal reads the credentials again, so that expired ones (a token, a cloud's password that is valid for some hours)
//! are no longer used. Credentials are sent without TLS only if the configuration permits it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Method, Request, Response, StatusCode, Url};
use serde::Deserialize;
use thaw_sys::lock::Lock;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::error::Error;

use super::account::{Observer, RegistryAccount};
use super::auth::{Challenge, Credentials, Login, basic};
use super::refusal::{limited, refusal, registry_message};
use super::wire::{Failure, Wire, follow, follow_within_origin};

const MAX_TOKEN_BODY: usize = 1 << 20;
/// The lifetime of a token without an expiry (the distribution specification's default).
const DEFAULT_LIFE: u64 = 60;
const MAX_LIFE: u64 = 24 * 3600;
/// A token that is about to expire and cannot be renewed is tried again after this time.
const RENEWAL_PAUSE: Duration = Duration::from_secs(5);

/// One registry's credentials in use.
pub struct Access {
    /// Its name in messages.
    name: String,
    /// The name under which its credentials are stored.
    registry: String,
    credentials: Credentials,
    /// `repository:NAME:ACTIONS`.
    scope: String,
    /// Whether tokens may be requested over plain HTTP.
    plain: bool,
    /// Read when the source was opened: for the first renewal.
    first: Mutex<Option<Login>>,
    current: Mutex<Arc<Epoch>>,
    observer: Arc<dyn Observer>,
}

/// The credentials from one renewal to the next.
pub struct Epoch {
    /// `None` before the registry has sent a challenge.
    challenge: Option<Challenge>,
    granted: OnceCell<Option<Granted>>,
    accepted: AtomicBool,
}

#[derive(Clone)]
struct Granted {
    header: HeaderValue,
    renew_at: Option<Instant>,
}

impl Epoch {
    fn new(challenge: Option<Challenge>) -> Arc<Self> {
        Arc::new(Self {
            challenge,
            granted: OnceCell::new(),
            accepted: AtomicBool::new(false),
        })
    }

    /// The `Authorization` header, if credentials are used.
    pub fn header(&self) -> Option<&HeaderValue> {
        Some(&self.granted.get()?.as_ref()?.header)
    }

    /// The registry took it.
    pub fn accept(&self) {
        self.accepted.store(true, Ordering::Relaxed);
    }

    pub fn was_accepted(&self) -> bool {
        self.accepted.load(Ordering::Relaxed)
    }
}

impl Access {
    pub fn new(account: RegistryAccount, observer: Arc<dyn Observer>) -> Self {
        Self {
            name: account.name,
            registry: account.registry,
            credentials: account.credentials,
            scope: account.scope,
            plain: account.plain,
            first: Mutex::new(Some(account.login)),
            current: Mutex::new(Epoch::new(None)),
            observer,
        }
    }

    fn current(&self) -> Arc<Epoch> {
        self.current.locked().clone()
    }

    /// Puts `next` in the place of `old`, if that is still there.
    fn replace(&self, old: &Arc<Epoch>, next: Arc<Epoch>) {
        let mut current = self.current.locked();
        if Arc::ptr_eq(&current, old) {
            *current = next;
        }
    }

    /// Returns the current credentials.
    pub async fn shown(&self, wire: &dyn Wire, what: &str) -> Result<Arc<Epoch>, Error> {
        let epoch = self.current();
        let Some(granted) = self.grant(&epoch, wire, what).await? else {
            return Ok(epoch);
        };
        if granted.renew_at.is_none_or(|at| Instant::now() < at) {
            return Ok(epoch);
        }
        self.replace(&epoch, Epoch::new(epoch.challenge.clone()));
        let next = self.current();
        match self.grant(&next, wire, what).await {
            Ok(_) => Ok(next),
            // The old ones may still be valid; if they are not, the registry refuses them.
            Err(error) => {
                tracing::warn!(registry = self.name, %error, "a token about to expire cannot be renewed");
                let renew_at = Some(Instant::now() + RENEWAL_PAUSE);
                let old = Granted { renew_at, ..granted };
                let kept = Arc::new(Epoch {
                    challenge: epoch.challenge.clone(),
                    granted: OnceCell::from(Some(old)),
                    accepted: AtomicBool::new(epoch.was_accepted()),
                });
                self.replace(&next, kept.clone());
                Ok(kept)
            }
        }
    }

    /// Renews credentials that the registry refused, unless another request has already renewed them. Returns whether there are new ones.
    pub async fn refused(
        &self,
        shown: &Arc<Epoch>,
        challenge: Option<Challenge>,
        wire: &dyn Wire,
        what: &str,
    ) -> Result<bool, Error> {
        let Some(challenge) = challenge.or_else(|| shown.challenge.clone()) else {
            return Ok(false);
        };
        self.replace(shown, Epoch::new(Some(challenge)));
        let next = self.current();
        Ok(self.grant(&next, wire, what).await?.is_some())
    }

    async fn grant(&self, epoch: &Epoch, wire: &dyn Wire, what: &str) -> Result<Option<Granted>, Error> {
        let Some(challenge) = &epoch.challenge else {
            return Ok(None);
        };
        let ask = || self.ask(challenge, wire, what);
        epoch.granted.get_or_try_init(ask).await.cloned()
    }

    /// Answers a challenge, with credentials as they are now.
    async fn ask(
        &self,
        challenge: &Challenge,
        wire: &dyn Wire,
        what: &str,
    ) -> Result<Option<Granted>, Error> {
        let first = self.first.locked().take();
        let login = match first {
            Some(login) => login,
            None => self.credentials.login(&self.registry).await?,
        };
        self.observer.login();
        let (text, life) = match (challenge, &login) {
            (Challenge::Basic, Login::Basic { user, password }) => (basic(user, password), None),
            (Challenge::Basic, _) => return Ok(None),
            (
                Challenge::Bearer {
                    realm,
                    service,
                    scope,
                },
                login,
            ) => {
                let scopes = scopes(&self.scope, scope.as_deref());
                let (token, life) = self
                    .token(login, realm, service.as_deref(), &scopes, wire, what)
                    .await?;
                (format!("Bearer {token}"), Some(life))
            }
        };
        let mut header = HeaderValue::try_from(text).map_err(|_| Error::Credentials {
            registry: self.name.clone(),
            reason: "they have characters in them that no header may have".into(),
        })?;
        header.set_sensitive(true);
        let renew_at = life.map(|life| Instant::now() + life.mul_f64(0.9));
        Ok(Some(Granted { header, renew_at }))
    }

    fn denied(&self, status: StatusCode, what: &str, reason: String) -> Error {
        Error::RegistryDenied {
            registry: self.name.clone(),
            status: status.as_u16(),
            what: what.into(),
            reason,
        }
    }

    /// A token from the realm the registry names, and how long it lives.
    async fn token(
        &self,
        login: &Login,
        realm: &str,
        service: Option<&str>,
        scopes: &[String],
        wire: &dyn Wire,
        what: &str,
    ) -> Result<(String, Duration), Error> {
        let url = Url::parse(realm).map_err(|error| {
            let reason = format!("its token service {realm:?} is no address: {error}");
            self.denied(StatusCode::UNAUTHORIZED, what, reason)
        })?;
        if !(url.scheme() == "https" || (self.plain && url.scheme() == "http")) {
            let reason = format!("its token service {realm:?} would see the password in the clear");
            return Err(self.denied(StatusCode::UNAUTHORIZED, what, reason));
        }
        let request = token_request(login, url, service, scopes);
        // A refresh token is in the body, which a redirect that keeps the method repeats.
        let sent = match login {
            Login::Identity(_) => follow_within_origin(wire, request).await,
            _ => follow(wire, request).await,
        };
        let response = sent.map_err(|failure| self.unreachable(&failure))?.response;
        let what = format!("a token for {what}");
        let body = self.token_body(response, &what).await?;
        token_of(&body).ok_or_else(|| {
            let reason = "its token service gave no token".into();
            self.denied(StatusCode::UNAUTHORIZED, &what, reason)
        })
    }

    /// The body of a token service's answer, if it is a success.
    async fn token_body(&self, response: Response, what: &str) -> Result<Vec<u8>, Error> {
        let status = response.status();
        if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() {
            return Err(refusal(&self.name, what, response, 1).await);
        }
        if !status.is_success() {
            let reason = format!("its token service says: {}", registry_message(response).await);
            return Err(self.denied(status, what, reason));
        }
        Ok(limited(response, MAX_TOKEN_BODY).await)
    }

    /// The error if there is no answer: no name, no route, no TLS, or silence.
    pub fn unreachable(&self, failure: &Failure) -> Error {
        let reason = failure.reason.clone();
        let advice = if reason.contains("certificate") {
            "if its certificate is your own, name its authority in SSL_CERT_FILE"
        } else if reason.contains("corrupt message") || reason.contains("InvalidContentType") {
            "if it speaks plain HTTP, say --plain-http"
        } else {
            "check its name, the network, and whether it runs"
        };
        Error::RegistryUnreachable {
            registry: self.name.clone(),
            reason,
            advice: advice.into(),
        }
    }
}

/// The request for a token: a POST with a refresh token, or else a GET, with a password if there is one.
fn token_request(login: &Login, mut url: Url, service: Option<&str>, scopes: &[String]) -> Request {
    if let Login::Identity(token) = login {
        let scope = scopes.join(" ");
        let fields = [
            ("grant_type", "refresh_token"),
            ("refresh_token", token.as_str()),
            ("client_id", "thaw"),
            ("service", service.unwrap_or_default()),
            ("scope", &scope),
        ];
        let mut request = Request::new(Method::POST, url);
        let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
        request.headers_mut().insert(CONTENT_TYPE, kind);
        *request.body_mut() = Some(form(&fields).into());
        return request;
    }
    let service = service.map(|service| ("service", service));
    let scopes = scopes.iter().map(|scope| ("scope", scope.as_str()));
    url.query_pairs_mut()
        .extend_pairs(service.into_iter().chain(scopes));
    let mut request = Request::new(Method::GET, url);
    if let Login::Basic { user, password } = login
        && let Ok(mut header) = HeaderValue::try_from(basic(user, password))
    {
        header.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, header);
    }
    request
}

/// The token in the body of a token service's answer, and how long it lives.
fn token_of(body: &[u8]) -> Option<(String, Duration)> {
    #[derive(Deserialize)]
    struct Answer {
        token: Option<String>,
        access_token: Option<String>,
        expires_in: Option<serde_json::Value>,
    }
    let answer: Answer = serde_json::from_slice(body).ok()?;
    let life = answer.expires_in.as_ref().and_then(serde_json::Value::as_u64);
    // A lifetime of zero would require a token for every request.
    let life = life.unwrap_or(DEFAULT_LIFE).clamp(DEFAULT_LIFE, MAX_LIFE);
    let token = answer.token.or(answer.access_token)?;
    let is_sound = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    is_sound.then_some((token, Duration::from_secs(life)))
}

/// The scopes to request: our own, and any others that the registry wants.
fn scopes(own: &str, wanted: Option<&str>) -> Vec<String> {
    let (own_name, own_actions) = own.rsplit_once(':').unwrap_or((own, ""));
    let covered = |scope: &str| match scope.rsplit_once(':') {
        Some((name, actions)) if name == own_name => actions
            .split(',')
            .all(|action| own_actions.split(',').any(|it| it == action)),
        _ => false,
    };
    let beyond = wanted.unwrap_or_default().split_ascii_whitespace();
    let beyond = beyond.filter(|scope| !covered(scope)).map(str::to_owned);
    std::iter::once(own.to_owned()).chain(beyond).collect()
}

/// `application/x-www-form-urlencoded`.
fn form(fields: &[(&str, &str)]) -> String {
    let Ok(mut url) = Url::parse("http://form/") else {
        return String::new();
    };
    url.query_pairs_mut().extend_pairs(fields);
    url.query().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_joined_but_not_repeated() {
        let pull = "repository:a/b:pull";
        let both = "repository:a/b:pull,push";
        assert_eq!(scopes(pull, None), [pull]);
        assert_eq!(scopes(pull, Some(pull)), [pull]);
        assert_eq!(scopes(both, Some(pull)), [both]);
        assert_eq!(scopes(pull, Some(both)), [pull, both]);
        assert_eq!(
            scopes(both, Some("repository:a/b:push repository:c:pull")),
            [both, "repository:c:pull"]
        );
    }

    #[test]
    fn a_form_is_escaped() {
        assert_eq!(form(&[("a", "b c&d"), ("e", "")]), "a=b+c%26d&e=");
    }
}
