//! How long a caller over TCP may keep a watch, a followed log, a session or a file transfer open.
//!
//! Invariant: a lease expires as soon as the presented credentials no longer identify the same caller with the same role and tenant,
//! because the [`Credentials`] were reloaded or its token expired. A lease waits for these events and does not poll. A user of this host,
//! who connects to the unix socket, has no lease: the kernel identifies it, and that does not change.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::credentials::{Credentials, Presented};
use super::peer::Peer;
use super::problem::{ApiCode, Refusal};

/// Maximum sleep until an expiry, after which a change of the clock is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(60 * 60);

/// The right of an authenticated caller to keep its streams open.
pub struct Lease {
    credentials: Arc<Credentials>,
    presented: Presented,
    peer: Peer,
}

impl Lease {
    /// The lease of a caller that `credentials` authenticated as `peer` from `presented`.
    pub fn new(credentials: Arc<Credentials>, presented: Presented, peer: Peer) -> Lease {
        Lease {
            credentials,
            presented,
            peer,
        }
    }

    /// Waits until it expires.
    pub async fn expired(&self) {
        let mut reloads = self.credentials.generation();
        loop {
            // Marked before the check, so that no reload in between is missed.
            reloads.mark_unchanged();
            let until = match self.credentials.admit(&self.presented) {
                Ok(admission) if admission.peer == self.peer => admission.until,
                _ => return,
            };
            tokio::select! {
                // Never fails: this holds the credentials, and so the sender.
                _ = reloads.changed() => {}
                () = sleep_towards(until, self.credentials.now()) => {}
            }
        }
    }
}

/// Waits until a lease expires; for ever if there is none.
pub async fn expired(lease: Option<Arc<Lease>>) {
    match lease {
        Some(lease) => lease.expired().await,
        None => std::future::pending().await,
    }
}

/// The error of a caller whose lease has expired.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the token or certificate of this request has expired, or was removed or changed on the node")]
pub struct Expired;

impl From<Expired> for Refusal {
    fn from(expired: Expired) -> Refusal {
        Refusal::new(ApiCode::Unauthenticated, expired)
    }
}

/// Sleeps until `until`, or for [`LONGEST_SLEEP`] if that is sooner; for ever if there is no `until`.
async fn sleep_towards(until: Option<SystemTime>, now: SystemTime) {
    let Some(until) = until else {
        return std::future::pending().await;
    };
    let left = until.duration_since(now).unwrap_or_default();
    tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use axum::http::HeaderMap;
    use thaw_sandbox::config::api::ApiConfig;
    use tokio::time::Instant;

    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn presented(token: &str) -> Presented {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
        headers.insert("other", "x".parse().unwrap());
        let presented = Presented::take(None, &mut headers);
        assert_eq!(headers.len(), 1);
        presented
    }

    /// A file of tokens, and the lease of a caller with [`TOKEN`]. The day 2027-01-01 begins `left` seconds from now, by tokio's clock.
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
        let peer = credentials.admit(&presented(TOKEN)).unwrap().peer;
        (file, Arc::new(Lease::new(credentials, presented(TOKEN), peer)))
    }

    #[tokio::test(start_paused = true)]
    async fn lease_is_over_when_its_token_expires() {
        let (_file, lease) = leased(&format!("one {TOKEN} expires=2027-01-01"), 100_000);
        let began = Instant::now();
        lease.expired().await;
        let lasted = began.elapsed().as_secs();
        assert!((100_000..100_002).contains(&lasted), "{lasted}");
        // An expired lease stays expired.
        lease.expired().await;
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
            let over = tokio::spawn(async move { waiting.expired().await });
            let rewrite = |text: &str| std::fs::write(file.path(), text).unwrap();
            // Changes to other callers' lines, and a later expiry of its own.
            rewrite(&format!("{line} expires=9999-12-31\nthree {other} role=admin"));
            credentials.reload().unwrap();
            tokio::time::sleep(Duration::from_secs(10_000)).await;
            assert!(!over.is_finished(), "{changed}");
            // An invalid file changes nothing.
            rewrite("one");
            assert!(credentials.reload().is_err());
            tokio::time::sleep(Duration::from_secs(10_000)).await;
            assert!(!over.is_finished(), "{changed}");
            rewrite(&changed);
            credentials.reload().unwrap();
            over.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn caller_without_a_lease_keeps_what_it_opened() {
        let waited = tokio::time::timeout(Duration::from_secs(1_000_000), expired(None)).await;
        assert!(waited.is_err());
    }
}
