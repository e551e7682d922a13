//! How long a caller over TCP may keep what it has open: a watch, a log that it follows, a session, a file on its way.
//!
//! Invariant: a lease is over as soon as what the caller showed at the beginning no longer makes it the same caller with the same role and
//! tenant, because [`Credentials`] were read again or because its token has expired. It waits for these and does not poll.
//! A user of the host, who connects to the unix socket, has no lease: the kernel said who it is, and that does not change.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, HeaderValue, header};

use super::client_roles::ClientCertificate;
use super::credentials::Credentials;
use super::peer::Peer;
use super::problem::{ApiCode, Refusal};

/// Longest sleep until an expiry: a clock that was set meanwhile is noticed after it.
const LONGEST: Duration = Duration::from_secs(60 * 60);

/// What a caller shows to say who it is.
pub struct Shown {
    /// In its connection's handshake.
    pub certificate: Option<Arc<ClientCertificate>>,
    /// With the request: `Authorization` alone.
    pub headers: HeaderMap,
}

impl Shown {
    /// Takes the token from a request's headers, so that nothing behind this sees it.
    pub fn take(certificate: Option<Arc<ClientCertificate>>, headers: &mut HeaderMap) -> Shown {
        let mut taken = HeaderMap::new();
        // A request with two is as one with more: it brings no token.
        for value in headers.get_all(header::AUTHORIZATION).iter().take(2) {
            // A copy: the value itself holds the buffer that the whole head was read into.
            if let Ok(mut copy) = HeaderValue::from_bytes(value.as_bytes()) {
                copy.set_sensitive(true);
                taken.append(header::AUTHORIZATION, copy);
            }
        }
        headers.remove(header::AUTHORIZATION);
        Shown {
            certificate,
            headers: taken,
        }
    }
}

/// What a caller that was let in may keep open, until it is over.
pub struct Lease {
    credentials: Arc<Credentials>,
    shown: Shown,
    peer: Peer,
}

impl Lease {
    /// Of a caller that these credentials let in as `peer`, for what it showed.
    pub fn new(credentials: Arc<Credentials>, shown: Shown, peer: Peer) -> Lease {
        Lease {
            credentials,
            shown,
            peer,
        }
    }

    /// Waits until it is over.
    pub async fn over(&self) {
        let mut read_again = self.credentials.generation();
        loop {
            // Before looking, so that no change in between is missed.
            read_again.mark_unchanged();
            let until = match self.credentials.admit(&self.shown) {
                Ok(admission) if admission.peer == self.peer => admission.until,
                _ => return,
            };
            tokio::select! {
                // Its sender is in the credentials, which we hold.
                _ = read_again.changed() => {}
                () = reach(until, self.credentials.now()) => {}
            }
        }
    }
}

/// Waits for the end of a lease; for ever where there is none.
pub async fn over(lease: Option<Arc<Lease>>) {
    match lease {
        Some(lease) => lease.over().await,
        None => std::future::pending().await,
    }
}

/// Why something ended with its caller's lease.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the token or certificate of this request has expired, or was removed or changed on the node")]
pub struct Over;

impl From<Over> for Refusal {
    fn from(over: Over) -> Refusal {
        Refusal::new(ApiCode::Unauthenticated, over)
    }
}

/// Sleeps from `now` until a time, or at least towards it; for ever where there is none.
async fn reach(until: Option<SystemTime>, now: SystemTime) {
    let Some(until) = until else {
        return std::future::pending().await;
    };
    let left = until.duration_since(now).unwrap_or_default();
    tokio::time::sleep(left.min(LONGEST)).await;
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use thaw_sandbox::config::api::ApiConfig;
    use tokio::time::Instant;

    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn shown(token: &str) -> Shown {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
        headers.insert("other", "x".parse().unwrap());
        let shown = Shown::take(None, &mut headers);
        assert_eq!(headers.len(), 1);
        shown
    }

    /// A file of tokens, and the lease of who brings [`TOKEN`]. The day 2027-01-01 begins so many seconds from now, by tokio's clock.
    fn leased(line: &str, left: u64) -> (tempfile::NamedTempFile, Arc<Lease>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), line).unwrap();
        let config = ApiConfig {
            tokens: Some(file.path().to_owned()),
            ..ApiConfig::default()
        };
        let (began, day) = (Instant::now(), UNIX_EPOCH + Duration::from_secs(1_798_761_600));
        let clock = move || day - Duration::from_secs(left) + began.elapsed();
        let credentials = Arc::new(Credentials::read_by(&config, Box::new(clock)).unwrap());
        let peer = credentials.admit(&shown(TOKEN)).unwrap().peer;
        (file, Arc::new(Lease::new(credentials, shown(TOKEN), peer)))
    }

    #[tokio::test(start_paused = true)]
    async fn lease_is_over_when_its_token_expires() {
        let (_file, lease) = leased(&format!("one {TOKEN} expires=2027-01-01"), 100_000);
        let began = Instant::now();
        lease.over().await;
        let lasted = began.elapsed().as_secs();
        assert!((100_000..100_002).contains(&lasted), "{lasted}");
        // It stays over.
        lease.over().await;
    }

    #[tokio::test(start_paused = true)]
    async fn lease_is_over_when_its_line_changes_and_not_before() {
        let line = format!("one {TOKEN} role=operate tenant=acme");
        let other = "x".repeat(24);
        for changed in [
            format!("two {TOKEN} role=operate tenant=acme"),
            format!("one {TOKEN} role=read tenant=acme"),
            format!("one {TOKEN} role=operate tenant=other"),
            format!("one {other} role=operate tenant=acme"),
            format!("{line} expires=2020-01-01"),
        ] {
            let (file, lease) = leased(&line, 1);
            let (waiting, credentials) = (lease.clone(), lease.credentials.clone());
            let over = tokio::spawn(async move { waiting.over().await });
            let rewrite = |text: &str| std::fs::write(file.path(), text).unwrap();
            // Others' lines, and a later expiry of its own.
            rewrite(&format!("{line} expires=9999-12-31\nthree {other} role=admin"));
            credentials.read_again().unwrap();
            tokio::time::sleep(Duration::from_secs(10_000)).await;
            assert!(!over.is_finished(), "{changed}");
            // What cannot be used changes nothing.
            rewrite("one");
            assert!(credentials.read_again().is_err());
            tokio::time::sleep(Duration::from_secs(10_000)).await;
            assert!(!over.is_finished(), "{changed}");
            rewrite(&changed);
            credentials.read_again().unwrap();
            over.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn caller_without_a_lease_keeps_what_it_opened() {
        let waited = tokio::time::timeout(Duration::from_secs(1_000_000), over(None)).await;
        assert!(waited.is_err());
    }
}
