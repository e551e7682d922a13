//! What a sandbox's caller asked for that its machine does not know. It is recorded, so that a later owner keeps to it.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use thaw_protocol::api::RateLimits;

use crate::snapshot::Hash;
use crate::tenant::Tenant;

/// Whose it is, labels, how long it may be there, and by which key it was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// None: it is the node's, as every sandbox of the release before tenants is.
    #[serde(default)]
    pub tenant: Option<Tenant>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub timeout: Option<Timeout>,
    /// It is deleted when its container's process has ended.
    #[serde(default)]
    pub delete_on_exit: bool,
    #[serde(default)]
    pub asked: Option<Asked>,
    /// Rate limits of its disks and network. `None` for a sandbox of the release before rate limits, whose VMM has none.
    #[serde(default)]
    pub rate_limits: Option<RateLimits>,
}

/// On whose behalf a sandbox is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Behalf {
    /// Whose it is to be. None: the node's.
    pub tenant: Option<Tenant>,
    /// With a key, if it was asked for with one.
    pub asked: Option<Asked>,
}

/// The idempotency key of its creation: a later owner gives a repeated request the same answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Whose key.
    pub client: u64,
    /// Whose share of the answers that are remembered; 0 in a record of before tenants.
    #[serde(default)]
    pub share: u64,
    pub key: String,
    /// Hash of the request it came with.
    pub request: Hash,
    /// Once it is ready, it is all that was asked for. Else it is when the answer is beside its record: before, who asked
    /// was told nothing, and part of what he asked for is nothing to him.
    pub ready_is_all: bool,
}

/// When it is deleted by whoever owns it then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeout {
    /// As it was asked for, seconds.
    pub seconds: u32,
    /// CLOCK_BOOTTIME milliseconds: no sandbox outlives a boot, and this clock is never set.
    pub at: u64,
}

impl Timeout {
    /// So many seconds from now.
    pub fn after(seconds: u32) -> Timeout {
        Timeout {
            seconds,
            at: boottime_ms().saturating_add(u64::from(seconds) * 1000),
        }
    }

    /// How long until then; zero when it has passed.
    pub fn left(self) -> Duration {
        Duration::from_millis(self.at.saturating_sub(boottime_ms()))
    }
}

fn boottime_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_keeps_its_moment_through_the_record() {
        let timeout = Timeout::after(3600);
        let terms = Terms {
            tenant: Some("acme".parse().unwrap()),
            labels: BTreeMap::new(),
            timeout: Some(timeout),
            delete_on_exit: true,
            asked: Some(Asked {
                client: u64::MAX,
                share: 8,
                key: "k".into(),
                request: Hash::of(b"r"),
                ready_is_all: true,
            }),
            rate_limits: Some(RateLimits::default()),
        };
        let read: Terms = serde_json::from_str(&serde_json::to_string(&terms).unwrap()).unwrap();
        assert_eq!(read, terms);
        let before: Terms = serde_json::from_str(r#"{"labels": {}, "timeout": null}"#).unwrap();
        assert_eq!((before.rate_limits, before.tenant), (None, None));
        let wrong = serde_json::from_str::<Terms>(r#"{"tenant": "../other"}"#);
        assert!(
            wrong.is_err(),
            "such a record is unreadable, and its sandbox nobody's to adopt"
        );
        let left = read.timeout.unwrap().left();
        assert!(left <= Duration::from_secs(3600) && left > Duration::from_secs(3000));
        assert_eq!(Timeout { seconds: 1, at: 0 }.left(), Duration::ZERO);
    }
}
