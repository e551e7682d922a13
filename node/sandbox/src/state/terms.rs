//! The caller's terms for a sandbox that its machine does not know. They are recorded, so that a later owner keeps them.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use thaw_protocol::api::RateLimits;

use crate::snapshot::Hash;
use crate::tenant::Tenant;

/// Tenant, labels, timeout and idempotency key of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// `None`: the sandbox belongs to the node, as all sandboxes did before tenants.
    #[serde(default)]
    pub tenant: Option<Tenant>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub timeout: Option<Timeout>,
    /// Whether the sandbox is deleted when its container's process ends.
    #[serde(default)]
    pub delete_on_exit: bool,
    #[serde(default)]
    pub asked: Option<Asked>,
    /// Rate limits of its disks and network. `None` for a sandbox of the release before rate limits, whose VMM has none.
    #[serde(default)]
    pub rate_limits: Option<RateLimits>,
}

/// On whose behalf a sandbox is created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Behalf {
    /// The tenant that will own the sandbox. `None`: the node.
    pub tenant: Option<Tenant>,
    /// The idempotency key, if the request has one.
    pub asked: Option<Asked>,
}

/// The idempotency key of a creation: a later owner gives a repeated request the same answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// The client that the key belongs to.
    pub client: u64,
    /// The share of the remembered answers that this one counts against; 0 in a record from before tenants.
    #[serde(default)]
    pub share: u64,
    pub key: String,
    /// Hash of the request it came with.
    pub request: Hash,
    /// Whether a ready sandbox is the complete result of the request. If false, the result is complete only once the answer is stored
    /// beside the record: until then the caller got no answer, and has no use for a part of the result.
    pub ready_is_all: bool,
}

/// When the sandbox's owner at that time deletes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeout {
    /// The timeout in the request, seconds.
    pub seconds: u32,
    /// CLOCK_BOOTTIME milliseconds: no sandbox outlives a boot, and this clock is never set.
    pub at: u64,
}

impl Timeout {
    /// This many seconds from now.
    pub fn after(seconds: u32) -> Timeout {
        Timeout {
            seconds,
            at: boottime_ms().saturating_add(u64::from(seconds) * 1000),
        }
    }

    /// The time left; zero after the timeout.
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
