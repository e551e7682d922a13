//! `thawd.toml`: the configuration of a node, read by both `thaw` and `thawd`.
//!
//! Invariant: a file is applied completely or rejected. An unknown key, a value of the wrong type or a value out of range is an
//! error that names the line. Without a file, every option has its default.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, Deserialize, Deserializer};
use serde::{Serialize, Serializer};

use crate::error::{Error, ErrorKind};

pub mod api;
pub mod default;
pub mod e2b;
pub mod pools;
pub mod quotas;
mod snapshots;

pub use snapshots::SnapshotsConfig;

/// The variable that names the file.
pub const VARIABLE: &str = "THAW_CONFIG";
/// Maximum size of a configuration file, bytes.
const MAX_FILE: u64 = 1 << 20;
/// Maximum number of failed sandboxes kept, whatever the file sets.
pub const MOST_FAILED: usize = 10_000;

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub store: StoreConfig,
    pub prefetch: PrefetchConfig,
    /// Mirrors, budgets and limits for registries.
    pub fetch: thaw_images::registry::Config,
    /// Addresses and name servers of sandboxes.
    pub network: thaw_network::Setup,
    /// The resources that thawd makes ahead.
    pub pools: pools::PoolsConfig,
    /// Where thawd serves its API besides its unix socket.
    pub api: api::ApiConfig,
    /// Where thawd serves its metrics to callers without access to the API.
    pub metrics: api::MetricsConfig,
    /// Where thawd serves E2B's API, and the templates of that API.
    pub e2b: e2b::E2bConfig,
    pub tracing: TracingConfig,
    pub sandbox: SandboxConfig,
    pub disk: DiskConfig,
    pub snapshots: SnapshotsConfig,
    /// What each tenant may have.
    pub quotas: quotas::QuotasConfig,
    /// What the machines of all tenants may have.
    pub capacity: quotas::CapacityConfig,
}

/// `[disk]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiskConfig {
    /// Maximum disk space of thawd's sandboxes and their snapshots. `None`: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<DiskLimit>,
}

/// `[sandbox]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxConfig {
    /// Whether a sandbox whose limits cannot be set is refused. `None`: thawd refuses it, `thaw run` without thawd does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require_limits: Option<bool>,
    /// Whether a sandbox whose VMM cannot have all its namespaces and Landlock is refused. `None`: as for `require_limits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require_jail: Option<bool>,
    /// How long a failed sandbox stays listed, seconds. 0: it is only logged and counted.
    pub failed_retention_s: u64,
    /// Maximum number of failed sandboxes listed, 0 to [`MOST_FAILED`].
    #[serde(deserialize_with = "most_failed")]
    pub failed_most: usize,
}

impl Default for SandboxConfig {
    fn default() -> Self {
        Self {
            require_limits: None,
            require_jail: None,
            failed_retention_s: 24 * 60 * 60,
            failed_most: 100,
        }
    }
}

fn most_failed<'de, D: Deserializer<'de>>(given: D) -> Result<usize, D::Error> {
    let given = usize::deserialize(given)?;
    match given <= MOST_FAILED {
        true => Ok(given),
        false => Err(de::Error::custom(format!("at most {}", MOST_FAILED))),
    }
}

/// `[store]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// Maximum number of unused bytes on disk that the store keeps. `None`: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Size>,
}

/// `[tracing]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TracingConfig {
    /// The OTLP over HTTP collector that thawd sends spans of creations to. `None`: none.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "collector")]
    pub otlp: Option<String>,
}

fn collector<'de, D: Deserializer<'de>>(given: D) -> Result<Option<String>, D::Error> {
    let given = String::deserialize(given)?;
    let good = given
        .parse::<http::Uri>()
        .is_ok_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.query().is_none());
    match good {
        true => Ok(Some(given)),
        false => Err(de::Error::custom(
            "it has to be http:// or https://, a host, perhaps a port and a path",
        )),
    }
}

/// `[prefetch]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefetchConfig {
    /// Whether starts read ahead the bytes that a recorded run of the image read.
    pub enabled: bool,
    /// Maximum number of bytes of file data that one start reads ahead.
    pub limit: Size,
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            limit: Size(1 << 30),
        }
    }
}

/// A size, at least 1 MiB, or a percentage of the file system that holds the data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskLimit {
    Bytes(Size),
    /// 1 to 100.
    Percent(u8),
}

impl std::str::FromStr for DiskLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskLimit, String> {
        let Some(percent) = text.strip_suffix('%') else {
            return DiskLimit::of_bytes(text.parse()?);
        };
        match percent.parse() {
            Ok(percent @ 1..=100) => Ok(DiskLimit::Percent(percent)),
            _ => Err(format!("{text:?} is no part of a disk: 1% to 100%")),
        }
    }
}

impl DiskLimit {
    fn of_bytes(size: Size) -> Result<DiskLimit, String> {
        match size.0 >= 1 << 20 {
            true => Ok(DiskLimit::Bytes(size)),
            false => Err(format!(
                "{size} is less than any sandbox takes; leave it out for no limit"
            )),
        }
    }
}

impl fmt::Display for DiskLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskLimit::Bytes(size) => size.fmt(f),
            DiskLimit::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl Serialize for DiskLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DiskLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<DiskLimit, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Given {
            Number(i64),
            Text(String),
        }
        let limit = match Given::deserialize(deserializer) {
            Ok(Given::Number(bytes)) => u64::try_from(bytes)
                .map_err(|_| "a size below zero".to_owned())
                .and_then(|bytes| DiskLimit::of_bytes(Size(bytes))),
            Ok(Given::Text(text)) => text.parse(),
            Err(_) => Err("it has to be a number of bytes, or a text with k, m, g, t or %".to_owned()),
        };
        limit.map_err(de::Error::custom)
    }
}

/// A number of bytes: an integer, or a string of an integer and k, m, g or t (KiB, MiB, GiB, TiB).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let wrong = || format!("{text:?} is no size: a number of bytes, or with k, m, g or t");
        let (digits, shift) = match text.to_ascii_lowercase().chars().last() {
            Some('k') => (&text[..text.len() - 1], 10),
            Some('m') => (&text[..text.len() - 1], 20),
            Some('g') => (&text[..text.len() - 1], 30),
            Some('t') => (&text[..text.len() - 1], 40),
            _ => (text, 0),
        };
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number.checked_mul(1 << shift).map(Size).ok_or_else(wrong)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "t"), (30, "g"), (20, "m"), (10, "k")] {
            if self.0 > 0 && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or a text with k, m, g or t")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Size, E> {
                Ok(Size(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Size, E> {
                u64::try_from(value)
                    .map(Size)
                    .map_err(|_| E::custom("a size below zero"))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl Config {
    /// The configuration of this process: the file that `THAW_CONFIG` names, which must exist, otherwise [`default_path`], which may be
    /// missing.
    ///
    /// # Errors
    /// `config-invalid`: with the file, the line and the key.
    pub fn from_env() -> Result<Config, Error> {
        match named() {
            Some(path) => Config::at(&path),
            None => Ok(Config::read(&default_path())?.unwrap_or_default()),
        }
    }

    /// Reads a file that must exist.
    fn at(path: &Path) -> Result<Config, Error> {
        Config::read(path)?.ok_or_else(|| {
            let what = format!("{} is not there", path.display());
            Error::new(ErrorKind::ConfigInvalid, what).remedy(format!(
                "correct the name, or unset {VARIABLE} where that names it"
            ))
        })
    }

    /// Reads a file; `None` if it does not exist.
    fn read(path: &Path) -> Result<Option<Config>, Error> {
        let unreadable = |error: std::io::Error| {
            let what = format!("cannot read {}: {error}", path.display());
            Error::new(ErrorKind::ConfigInvalid, what).remedy("check its permissions")
        };
        match std::fs::metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(error)),
            Ok(metadata) if metadata.len() > MAX_FILE => {
                let what = format!("{} is larger than {MAX_FILE} bytes", path.display());
                return Err(Error::new(ErrorKind::ConfigInvalid, what));
            }
            Ok(_) => {}
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        Config::parse(&text)
            .map(Some)
            .map_err(|why| Error::new(ErrorKind::ConfigInvalid, format!("{}: {why}", path.display())))
    }

    /// Parses a text. The error names the invalid line and the reason.
    pub fn parse(text: &str) -> Result<Config, String> {
        toml::from_str(text).map_err(|error| {
            let message = error.message().trim_end_matches('\n');
            match error.span() {
                Some(span) => {
                    let before = text.get(..span.start).unwrap_or(text);
                    let number = before.matches('\n').count();
                    let line = text.lines().nth(number).unwrap_or_default().trim();
                    format!("line {}, `{line}`: {message}", number + 1)
                }
                None => message.to_owned(),
            }
        })
    }
}

/// The file that [`VARIABLE`] names.
fn named() -> Option<PathBuf> {
    std::env::var_os(VARIABLE)
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// Path of the file if `THAW_CONFIG` is not set: `/etc/thaw/thawd.toml` for root, otherwise `$XDG_CONFIG_HOME/thaw/thawd.toml` or
/// `~/.config/thaw/thawd.toml`.
pub fn default_path() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/etc/thaw/thawd.toml".into();
    }
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    set("XDG_CONFIG_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".config")))
        .unwrap_or_else(|| "/".into())
        .join("thaw/thawd.toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_default_and_is_read() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
        let config = Config::parse(
            "[store]\nlimit = \"20g\"\n[prefetch]\nenabled = false\nlimit = 4096\n\
             [api]\nlisten = \"127.0.0.1:8443\"\ntokens = \"/t\"\n[fetch]\nprefetch_bandwidth = 1000000\n[[fetch.mirrors.\"docker.io\"]]\nurl = \"http://127.0.0.1:4001\"\nkind = \"dragonfly\"\n",
        )
        .unwrap();
        assert_eq!(config.store.limit, Some(Size(20 << 30)));
        assert_eq!(config.prefetch.limit, Size(4096));
        assert!(!config.prefetch.enabled);
        assert_eq!(config.api.listen, Some(([127, 0, 0, 1], 8443).into()));
        assert_eq!(config.fetch.prefetch_bandwidth, Some(1_000_000));
        assert_eq!(config.fetch.mirrors_of("docker.io").len(), 1);
        let written = toml::to_string(&config).unwrap();
        assert_eq!(Config::parse(&written).unwrap(), config);
    }

    #[test]
    fn the_guides_example_is_read() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/images.md");
        let guide = std::fs::read_to_string(path).unwrap();
        let example = guide
            .split("```toml")
            .nth(1)
            .and_then(|it| it.split("```").next());
        let config = Config::parse(example.unwrap()).unwrap();
        assert_eq!(config.prefetch, PrefetchConfig::default());
        assert_eq!(config.pools, pools::PoolsConfig::default());
        assert_eq!(config.network, thaw_network::Setup::default());
        assert_eq!(config.fetch.mirrors_of("quay.io").len(), 1);
        let defaults = thaw_images::registry::Config {
            mirrors: config.fetch.mirrors.clone(),
            prefetch_bandwidth: config.fetch.prefetch_bandwidth,
            ..Default::default()
        };
        assert_eq!(config.fetch, defaults);
    }

    #[test]
    fn errors_name_line_and_key() {
        for (text, line, key) in [
            ("[store]\nlimits = 1\n", "line 2", "limits"),
            ("\n\n[prefetch]\nenabled = \"often\"\n", "line 4", "enabled"),
            ("[store]\nlimit = \"much\"\n", "line 2", "limit"),
            ("[store]\nlimit = -1\n", "line 2", "limit"),
            ("[disk]\nlimit = -1\n", "line 2", "limit"),
            ("[disk]\nlimit = 0\n", "line 2", "limit"),
            ("[disk]\nlimit = \"0%\"\n", "line 2", "limit"),
            ("[disk]\nlimit = \"101%\"\n", "line 2", "limit"),
            ("[disk]\nlimit = \"99999999999t\"\n", "line 2", "limit"),
            ("[disk]\nlimit = true\n", "line 2", "limit"),
            ("[sandbox]\nrequire_limits = 1\n", "line 2", "require_limits"),
            (
                "[snapshots]\nrequire_signature = 2\n",
                "line 2",
                "require_signature",
            ),
            ("[sandbox]\nrequire_jail = \"no\"\n", "line 2", "require_jail"),
            ("[nothing]\n", "line 1", "nothing"),
            ("[store\n", "line 1", "[store"),
            ("[fetch]\nmirrors = 3\n", "line 2", "mirrors"),
            ("[api]\nlisten = \"everywhere\"\n", "line 2", "listen"),
            ("[tracing]\n\notlp = \"collector:4318\"\n", "line 3", "otlp"),
            ("[tracing]\notlp = 4318\n", "line 2", "otlp"),
            ("[fetch]\n\nbudget_ms = 0\n", "line 3", "budget_ms"),
            (
                "[fetch]\nprefetch_bandwidth = 0\n",
                "line 2",
                "prefetch_bandwidth",
            ),
            (
                "[[fetch.mirrors.\"*\"]]\nkind = \"registry\"\nurl = \"ftp://x\"\n",
                "line 3",
                "url",
            ),
            (
                "[[fetch.mirrors.\"*\"]]\nurl = \"http://x\"\nheaders = { host = \"y\" }\n",
                "line 3",
                "headers",
            ),
            ("[network]\nrange = \"8.8.0.0/16\"\n", "line 2", "range"),
            ("[sandbox]\nfailed_most = 10001\n", "line 2", "failed_most"),
            (
                "[sandbox]\nfailed_retention_s = -1\n",
                "line 2",
                "failed_retention_s",
            ),
            (
                "[network]\nnameservers = [\"fd00::1\"]\n",
                "line 2",
                "nameservers",
            ),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(line) && error.contains(key), "{error}");
        }
    }

    #[test]
    fn a_named_file_must_be_there_and_an_unnamed_one_need_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("thawd.toml");
        assert_eq!(Config::read(&path).unwrap(), None);
        std::fs::write(&path, "[store]\nlimit = 1\nlimit = 2\n").unwrap();
        let failure = Config::read(&path).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::ConfigInvalid);
        assert!(failure.to_string().contains("thawd.toml: line 3"), "{failure}");
    }

    #[test]
    fn sizes_are_read_as_they_are_shown() {
        for text in ["0", "1", "4k", "3m", "20g", "2t", "1500"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
        for text in ["", "k", "-1", "1.5g", "20000000000t", "1kb"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
