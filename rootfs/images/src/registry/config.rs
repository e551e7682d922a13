//! The configuration of registries: mirrors, time limits and bandwidth, as in the configuration file.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::breaker::Rules;

/// The `[fetch]` table of the configuration. Everything has a default; an unknown key is an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Mirrors by the registry that they replace (`docker.io`, `host:port`), in the order in which they are asked, before the registry
    /// itself. Those under `"*"` apply to every registry without mirrors of its own.
    pub mirrors: BTreeMap<String, Vec<Mirror>>,
    /// Bytes per second that all prefetches of the process may use. `None`: no limit.
    #[serde(deserialize_with = "some_at_least_one")]
    pub prefetch_bandwidth: Option<u64>,
    /// Prefetches of the whole process in flight at once.
    #[serde(deserialize_with = "at_least_one")]
    pub prefetch_requests: usize,
    /// Milliseconds after which a read on demand has ended, with bytes or with an error, all retries included.
    #[serde(deserialize_with = "at_least_one")]
    pub budget_ms: u64,
    /// Milliseconds within which a server has to begin its answer.
    #[serde(deserialize_with = "at_least_one")]
    pub answer_ms: u64,
    /// Milliseconds within which a server has to send `window_bytes` of a body, or its rest; otherwise it is too slow.
    #[serde(deserialize_with = "at_least_one")]
    pub window_ms: u64,
    /// Bytes of a body that must arrive in each window.
    pub window_bytes: u64,
    /// Milliseconds of the longest first pause between attempts; later ones are up to twice as long each.
    pub pause_ms: u64,
    /// Milliseconds of the longest pause between attempts.
    pub longest_pause_ms: u64,
    /// Consecutive failures after which a registry or mirror gets no requests for a while.
    #[serde(deserialize_with = "at_least_one")]
    pub breaker_failures: u32,
    /// Milliseconds for which it gets no requests the first time. Then one request probes it; each failed probe doubles the time.
    pub breaker_open_ms: u64,
    /// Longest such time in milliseconds; for a registry itself at most a tenth of `budget_ms`.
    pub breaker_longest_ms: u64,
    /// Milliseconds for which the target of a registry's redirect is asked directly, if its address does not contain an expiry.
    pub redirect_ms: u64,
    /// Where a server ignores ranges and sends the whole: bytes before the wanted ones that are read and thrown away.
    pub whole_skip: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mirrors: BTreeMap::new(),
            prefetch_bandwidth: None,
            prefetch_requests: 4,
            budget_ms: 60_000,
            answer_ms: 15_000,
            window_ms: 10_000,
            window_bytes: 64 << 10,
            pause_ms: 200,
            longest_pause_ms: 5_000,
            breaker_failures: 3,
            breaker_open_ms: 1_000,
            breaker_longest_ms: 30_000,
            redirect_ms: 300_000,
            whole_skip: 1 << 20,
        }
    }
}

/// One mirror of a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mirror {
    /// `http://HOST[:PORT]` or `https://…`, with a path up to and including `/v2/…` if the mirror keeps the registry's repositories under
    /// another path.
    #[serde(deserialize_with = "an_address")]
    pub url: String,
    /// Its protocol.
    #[serde(default)]
    pub kind: MirrorKind,
    /// Headers for every request to it.
    #[serde(default, deserialize_with = "headers")]
    pub headers: BTreeMap<String, String>,
    /// Send credentials to it even without encryption (plain HTTP to another host).
    #[serde(default)]
    pub credentials_in_clear: bool,
}

impl Mirror {
    /// A mirror at this address, with default settings.
    fn at(url: String) -> Mirror {
        Mirror {
            url,
            kind: MirrorKind::default(),
            headers: BTreeMap::new(),
            credentials_in_clear: false,
        }
    }
}

/// The protocol of a mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MirrorKind {
    /// The distribution specification, with credentials of its own (stored under its host). As in containerd, the query `ns` names the
    /// registry.
    #[default]
    Registry,
    /// Dragonfly's dfdaemon. The header `X-Dragonfly-Registry` names the registry, whose credentials it gets. Its answers must have a
    /// `Content-Range`.
    Dragonfly,
}

impl Config {
    /// The mirrors that stand for `registry`.
    pub fn mirrors_of(&self, registry: &str) -> &[Mirror] {
        self.mirrors
            .get(registry)
            .or_else(|| self.mirrors.get("*"))
            .map_or(&[], Vec::as_slice)
    }
}

// An invalid value is refused while it is parsed, so that the error names its line.

fn at_least_one<'de, D: Deserializer<'de>, T: Deserialize<'de> + From<u8> + PartialEq>(
    given: D,
) -> Result<T, D::Error> {
    let value = T::deserialize(given)?;
    match value == T::from(0) {
        true => Err(D::Error::custom("it has to be at least 1")),
        false => Ok(value),
    }
}

fn some_at_least_one<'de, D: Deserializer<'de>>(given: D) -> Result<Option<u64>, D::Error> {
    match Option::deserialize(given)? {
        Some(0) => Err(D::Error::custom(
            "it lets nothing through: leave it out for no limit",
        )),
        value => Ok(value),
    }
}

fn an_address<'de, D: Deserializer<'de>>(given: D) -> Result<String, D::Error> {
    let mirror = Mirror::at(String::deserialize(given)?);
    mirror.checked().map_err(D::Error::custom)?;
    Ok(mirror.url)
}

fn headers<'de, D: Deserializer<'de>>(given: D) -> Result<BTreeMap<String, String>, D::Error> {
    let mirror = Mirror {
        headers: BTreeMap::deserialize(given)?,
        ..Mirror::at("http://mirror.invalid".into())
    };
    mirror.checked().map_err(D::Error::custom)?;
    Ok(mirror.headers)
}

impl Config {
    pub(super) fn breaker(&self) -> Rules {
        Rules {
            failures: self.breaker_failures,
            first: Duration::from_millis(self.breaker_open_ms),
            longest: Duration::from_millis(self.breaker_longest_ms.max(self.breaker_open_ms)),
        }
    }

    pub(crate) fn budget(&self) -> Duration {
        Duration::from_millis(self.budget_ms)
    }

    pub(crate) fn pause(&self) -> Duration {
        Duration::from_millis(self.pause_ms)
    }

    pub(crate) fn longest_pause(&self) -> Duration {
        Duration::from_millis(self.longest_pause_ms)
    }
}
