//! The caller's terms for a sandbox that its machine does not know. They are recorded, so that a later owner keeps them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{ChangeSandbox, OnExit, OnTimeout, RateLimits};

use crate::snapshot::Hash;
use crate::tenant::Tenant;

/// Tenant, labels, annotations, timeout and idempotency key of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// `None`: the sandbox belongs to the node, as all sandboxes did before tenants.
    #[serde(default)]
    pub tenant: Option<Tenant>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Texts that a protocol of thawd keeps with the sandbox, each under the protocol's name. Only that protocol reads them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(default)]
    pub timeout: Option<Timeout>,
    /// How long it may be idle, seconds.
    #[serde(default)]
    pub idle_timeout_s: Option<u32>,
    /// What happens when either timeout is over.
    #[serde(default)]
    pub on_timeout: OnTimeout,
    /// Whether the sandbox is deleted when its container's process ends.
    #[serde(default)]
    pub delete_on_exit: bool,
    /// Whether its machine ends then, and its record and its output are kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end_on_exit: bool,
    #[serde(default)]
    pub asked: Option<Asked>,
    /// Rate limits of its disks and network. `None` for a sandbox of the release before rate limits, whose VMM has none.
    #[serde(default)]
    pub rate_limits: Option<RateLimits>,
}

impl Terms {
    /// How long the sandbox may run, and what happens then.
    pub fn time_limit(&self) -> TimeLimit {
        TimeLimit {
            timeout: self.timeout,
            idle_s: self.idle_timeout_s,
            on_timeout: self.on_timeout,
        }
    }

    /// The same terms with another time limit.
    pub fn within(self, limit: TimeLimit) -> Terms {
        Terms {
            timeout: limit.timeout,
            idle_timeout_s: limit.idle_s,
            on_timeout: limit.on_timeout,
            ..self
        }
    }

    /// What happens to the sandbox when its container's process ends.
    pub fn on_exit(&self) -> OnExit {
        match (self.delete_on_exit, self.end_on_exit) {
            (true, _) => OnExit::Delete,
            (false, true) => OnExit::End,
            (false, false) => OnExit::Keep,
        }
    }

    /// The same terms, with this when the container's process ends.
    pub fn with_exit(self, on_exit: OnExit) -> Terms {
        Terms {
            delete_on_exit: on_exit == OnExit::Delete,
            end_on_exit: on_exit == OnExit::End,
            ..self
        }
    }
}

/// What ends a sandbox beside its machine and its time limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// The process that it was made for, if it ends with that.
    pub client: Option<ProcessRecord>,
    /// What happens to it when its container's process ends.
    pub on_exit: OnExit,
}

/// How long a sandbox may run, and what happens then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeLimit {
    pub timeout: Option<Timeout>,
    /// How long it may be idle, seconds.
    pub idle_s: Option<u32>,
    pub on_timeout: OnTimeout,
}

impl TimeLimit {
    /// The limit of a sandbox that is made now.
    pub fn from_now(timeout_s: Option<u32>, idle_s: Option<u32>, on_timeout: OnTimeout) -> TimeLimit {
        TimeLimit {
            timeout: timeout_s.map(Timeout::after),
            idle_s,
            on_timeout,
        }
    }

    /// This limit with a caller's change. A timeout that the change names starts now.
    pub fn changed(self, change: &ChangeSandbox) -> TimeLimit {
        TimeLimit {
            timeout: match change.timeout_s {
                Some(seconds) => seconds.map(Timeout::after),
                None => self.timeout,
            },
            idle_s: change.idle_timeout_s.unwrap_or(self.idle_s),
            on_timeout: change.on_timeout.unwrap_or(self.on_timeout),
        }
    }

    /// This limit with a timeout that starts now, if the sandbox was to be paused and its time is over.
    pub fn renewed(self) -> TimeLimit {
        let is_spent = |timeout: &Timeout| self.on_timeout == OnTimeout::Pause && timeout.left().is_zero();
        match self.timeout.filter(is_spent) {
            Some(timeout) => TimeLimit {
                timeout: Some(Timeout::after(timeout.seconds)),
                ..self
            },
            None => self,
        }
    }

    /// Whether the time is over.
    pub fn is_over(self) -> bool {
        self.timeout.is_some_and(|timeout| timeout.left().is_zero())
    }

    /// When the time is over, seconds since the Unix epoch.
    pub fn ends_at(self) -> Option<u64> {
        self.timeout
            .map(|timeout| (since_epoch() + timeout.left()).as_secs())
    }
}

/// On whose behalf a sandbox is created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Behalf {
    /// The tenant that will own the sandbox. `None`: the node.
    pub tenant: Option<Tenant>,
    /// The idempotency key, if the request has one.
    pub asked: Option<Asked>,
    /// See [`Terms::annotations`].
    pub annotations: BTreeMap<String, String>,
}

impl Behalf {
    /// The terms that follow from who asked; the others are of the request.
    pub fn terms(self) -> Terms {
        Terms {
            tenant: self.tenant,
            annotations: self.annotations,
            asked: self.asked,
            ..Terms::default()
        }
    }
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

/// When a sandbox's time is over.
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

    /// The timeout of this many seconds that is over at a time, in seconds since the Unix epoch.
    pub(super) fn ending_at(seconds: u32, epoch: u64) -> Timeout {
        let left = epoch.saturating_sub(since_epoch().as_secs());
        Timeout {
            seconds,
            at: boottime_ms().saturating_add(left.saturating_mul(1000)),
        }
    }

    /// The time left; zero after the timeout.
    pub fn left(self) -> Duration {
        Duration::from_millis(self.at.saturating_sub(boottime_ms()))
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
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
            annotations: BTreeMap::from([("protocol".to_owned(), "any text: \u{1f9ca}\n".to_owned())]),
            timeout: Some(timeout),
            idle_timeout_s: Some(60),
            on_timeout: OnTimeout::Pause,
            delete_on_exit: true,
            end_on_exit: false,
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
        assert_eq!((&before.rate_limits, &before.tenant), (&None, &None));
        assert_eq!(before.on_timeout, OnTimeout::Delete);
        assert!(before.annotations.is_empty());
        for on_exit in [OnExit::Keep, OnExit::Delete, OnExit::End] {
            let terms = before.clone().with_exit(on_exit);
            let read: Terms = serde_json::from_str(&serde_json::to_string(&terms).unwrap()).unwrap();
            assert_eq!(read.on_exit(), on_exit);
        }
        let wrong = serde_json::from_str::<Terms>(r#"{"tenant": "../other"}"#);
        assert!(
            wrong.is_err(),
            "such a record is unreadable, and its sandbox nobody's to adopt"
        );
        let left = read.timeout.unwrap().left();
        assert!(left <= Duration::from_secs(3600) && left > Duration::from_secs(3000));
        assert_eq!(Timeout { seconds: 1, at: 0 }.left(), Duration::ZERO);
    }

    #[test]
    fn change_of_a_time_limit_keeps_what_it_does_not_name() {
        let over = TimeLimit {
            timeout: Some(Timeout { seconds: 60, at: 0 }),
            idle_s: Some(5),
            on_timeout: OnTimeout::Pause,
        };
        let nothing = over.changed(&ChangeSandbox::default());
        assert_eq!(nothing, over);
        assert!(nothing.is_over());
        let longer = ChangeSandbox {
            timeout_s: Some(Some(3600)),
            ..ChangeSandbox::default()
        };
        let longer = over.changed(&longer);
        assert!(!longer.is_over() && longer.on_timeout == OnTimeout::Pause);
        assert!(longer.timeout.unwrap().left() > Duration::from_secs(3000));
        let none = ChangeSandbox {
            timeout_s: Some(None),
            idle_timeout_s: Some(None),
            on_timeout: Some(OnTimeout::Delete),
            ..ChangeSandbox::default()
        };
        assert_eq!(over.changed(&none), TimeLimit::default());
        assert_eq!(over.changed(&none).ends_at(), None);
    }

    #[test]
    fn only_a_spent_timeout_that_pauses_is_renewed() {
        let limit = |on_timeout, at| TimeLimit {
            timeout: Some(Timeout { seconds: 60, at }),
            idle_s: None,
            on_timeout,
        };
        assert!(!limit(OnTimeout::Pause, 0).renewed().is_over());
        for kept in [limit(OnTimeout::Delete, 0), limit(OnTimeout::Pause, u64::MAX)] {
            assert_eq!(kept.renewed(), kept);
        }
    }
}
