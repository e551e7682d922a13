//! Building readers: what a process shares, and the endpoints of one registry.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderName, HeaderValue, RANGE};
use tokio::sync::Notify;

use crate::error::Error;
use crate::progress::{Progress, Silent};
use crate::reference::RegistryRef;
use crate::source::http::{Connection, Party};
use crate::source::registry::{Address, is_loopback, no_client};
use crate::source::token::Access;
use crate::source::wire::{Wire, client};
use crate::source::{Credentials, SourceOptions};

use super::answer::Terms;
use super::breaker::{Breaker, Rules};
use super::endpoint::{Endpoint, Pace, Place, Timed};
use super::gate::Gate;
use super::redirect::Redirects;
use super::remote::Remote;
use super::{Config, Mirror, MirrorKind, Stats};

/// Told to dfdaemon: the registry it fetches from.
const DRAGONFLY_REGISTRY: HeaderName = HeaderName::from_static("x-dragonfly-registry");
/// Not to be configured: they are what a request is about.
const OWN_HEADERS: [HeaderName; 4] = [AUTHORIZATION, CONTENT_LENGTH, HOST, RANGE];

/// What the readers of one process share: configuration, breakers, the prefetches' bandwidth, connections and counters.
/// One per process: limits hold among those that share it.
pub struct Fetcher {
    pub(super) config: Config,
    pub(super) stats: Arc<Stats>,
    pub(super) gate: Gate,
    pub(super) breakers: Breakers,
    wire: OnceLock<Arc<dyn Wire>>,
}

/// One for each endpoint.
pub(super) struct Breakers {
    by_endpoint: Mutex<HashMap<String, Arc<Breaker>>>,
    pub changed: Arc<Notify>,
}

impl Fetcher {
    /// # Errors
    /// `Malformed` for a mirror whose address or headers cannot be, or a limit that lets nothing through.
    pub fn new(config: Config) -> Result<Arc<Self>, Error> {
        let refuse = |key: &str, problem: &str| {
            Err(Error::malformed(
                format!("the configuration's fetch.{key}"),
                problem,
            ))
        };
        for mirror in config.mirrors.values().flatten() {
            mirror.checked()?;
        }
        if config.prefetch_bandwidth == Some(0) {
            return refuse(
                "prefetch_bandwidth",
                "it lets nothing through: leave it out for no limit",
            );
        }
        for (key, value) in [
            ("prefetch_requests", config.prefetch_requests as u64),
            ("budget_ms", config.budget_ms),
            ("answer_ms", config.answer_ms),
            ("window_ms", config.window_ms),
            ("breaker_failures", config.breaker_failures.into()),
        ] {
            if value == 0 {
                return refuse(key, "it has to be at least 1");
            }
        }
        Ok(Arc::new(Self {
            gate: Gate::new(config.prefetch_requests, config.prefetch_bandwidth),
            stats: Arc::default(),
            breakers: Breakers {
                by_endpoint: Mutex::default(),
                changed: Arc::default(),
            },
            wire: OnceLock::new(),
            config,
        }))
    }

    /// The counters, for metrics.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    #[cfg(test)]
    pub(super) fn with_wire(config: Config, wire: Arc<dyn Wire>) -> Arc<Self> {
        let fetcher = Self::new(config).unwrap();
        let _ = fetcher.wire.set(wire);
        fetcher
    }

    /// Connections, shared by all readers.
    fn wire(&self, registry: &str) -> Result<Arc<dyn Wire>, Error> {
        if let Some(wire) = self.wire.get() {
            return Ok(wire.clone());
        }
        let made = client().map_err(|failure| no_client(registry, &failure))?;
        Ok(self.wire.get_or_init(|| Arc::new(made)).clone())
    }

    fn endpoint(
        &self,
        plan: Plan,
        progress: Arc<dyn Progress>,
        options: &SourceOptions,
    ) -> Result<Endpoint, Error> {
        let config = &self.config;
        let stats = self.stats.endpoint(&plan.name);
        let pace = Pace {
            answer: Duration::from_millis(config.answer_ms),
            bytes: config.window_bytes,
            window: Duration::from_millis(config.window_ms),
        };
        let timed = Timed {
            wire: self.wire(&plan.party.registry)?,
            answer: pace.answer,
            stats: stats.clone(),
        };
        let breaker = {
            let mut breakers = self
                .breakers
                .by_endpoint
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let mut rules = config.breaker();
            if plan.last {
                // There is nobody else to ask: whoever waits for it has to see it come back.
                rules.longest = rules.longest.min(config.budget() / 10);
                rules.first = rules.first.min(rules.longest);
            }
            let made = || Breaker::new(rules, self.breakers.changed.clone(), stats.clone());
            breakers.entry(plan.name).or_insert_with(made).clone()
        };
        let (party, timed) = (plan.party, Arc::new(timed));
        let connection = match plan.access {
            Some(access) => {
                Connection::sharing(party.name, &party.base, access, timed, options.retry, progress)?
            }
            None => Connection::new(party, timed, options.retry, progress, stats.clone())?,
        };
        Ok(Endpoint {
            connection,
            place: plan.place,
            headers: plan.headers,
            terms: Terms {
                skip: config.whole_skip,
                strict: plan.strict,
            },
            pace,
            breaker,
            stats,
            redirects: Redirects::new(Duration::from_millis(config.redirect_ms)),
            missing: Mutex::default(),
        })
    }

    /// An address of a descriptor, asked without credentials.
    pub(super) fn foreign(&self, url: &str) -> Result<Arc<Endpoint>, Error> {
        let parsed =
            Url::parse(url).map_err(|error| Error::malformed(format!("the address {url:?}"), error))?;
        let name = authority(&parsed);
        let plan = Plan {
            party: Party {
                name: name.clone(),
                registry: name.clone(),
                base: url.to_owned(),
                plain: false,
                credentials: Credentials::Anonymous,
                login: crate::source::Login::Anonymous,
                scope: String::new(),
            },
            name,
            place: Place::Foreign(url.to_owned()),
            headers: Vec::new(),
            strict: false,
            last: true,
            access: None,
        };
        let options = SourceOptions::default();
        Ok(Arc::new(self.endpoint(plan, Arc::new(Silent), &options)?))
    }

    /// A reader of `reference`'s blobs: the mirrors in their order, and the registry.
    pub(super) async fn remote(
        self: &Arc<Self>,
        reference: &RegistryRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Remote, Error> {
        let registry = &reference.registry;
        let scope = format!("repository:{}:pull", reference.repository);
        let address = Address::of(registry, options.plain_http);
        let login = options.credentials.login(registry).await?;
        let own = Plan {
            name: registry.clone(),
            party: Party {
                name: registry.clone(),
                registry: registry.clone(),
                base: address.base.clone(),
                plain: address.plain,
                credentials: options.credentials.clone(),
                login,
                scope: scope.clone(),
            },
            place: Place::Repository {
                base: format!("{}/v2/{}", address.base, reference.repository),
                query: String::new(),
            },
            headers: Vec::new(),
            strict: false,
            last: true,
            access: None,
        };
        let own = self.endpoint(own, progress.clone(), options)?;
        let mut endpoints = Vec::new();
        for mirror in self.config.mirrors_of(registry) {
            let access = Some(&own.connection.access);
            let plan = mirror.plan(reference, &address, &scope, options, access).await?;
            endpoints.push(Arc::new(self.endpoint(plan, progress.clone(), options)?));
        }
        endpoints.push(Arc::new(own));
        Ok(Remote {
            endpoints,
            fetcher: self.clone(),
        })
    }
}

impl Fetcher {
    /// The mirrors of `reference`'s registry, in their order.
    pub(crate) async fn mirrors(
        self: &Arc<Self>,
        reference: &RegistryRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Vec<Arc<Endpoint>>, Error> {
        if self.config.mirrors_of(&reference.registry).is_empty() {
            return Ok(Vec::new());
        }
        let mut endpoints = self.remote(reference, options, progress).await?.endpoints;
        endpoints.pop();
        Ok(endpoints)
    }
}

/// An endpoint to be.
struct Plan {
    /// As its counters and its breaker go by.
    name: String,
    party: Party,
    place: Place,
    headers: Vec<(HeaderName, HeaderValue)>,
    strict: bool,
    /// Asked when no other has done it.
    last: bool,
    /// Shown what another is.
    access: Option<Arc<Access>>,
}

impl Mirror {
    /// The address, with the path up to the repository, and the headers.
    pub(super) fn checked(&self) -> Result<(Url, Vec<(HeaderName, HeaderValue)>), Error> {
        let refuse =
            |problem: String| Error::malformed(format!("the configuration's mirror {:?}", self.url), problem);
        let mut url = Url::parse(&self.url).map_err(|error| refuse(error.to_string()))?;
        let plain = url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none();
        if !(matches!(url.scheme(), "http" | "https") && url.has_host() && plain) {
            return Err(refuse(
                "it has to be http:// or https://, a host, perhaps a port and a path".into(),
            ));
        }
        let path = match url.path().trim_end_matches('/') {
            "" => "/v2".to_owned(),
            path if path.split('/').any(|part| part == "v2") => path.to_owned(),
            _ => return Err(refuse("a path has to have /v2 in it".into())),
        };
        url.set_path(&path);
        let header = |(name, value): (&String, &String)| {
            let parsed = HeaderName::try_from(name)
                .ok()
                .zip(HeaderValue::try_from(value).ok());
            let (name, mut value) = parsed.ok_or_else(|| refuse(format!("the header {name:?} cannot be")))?;
            if OWN_HEADERS.contains(&name) {
                return Err(refuse(format!("the header {name} is not to be set")));
            }
            value.set_sensitive(true);
            Ok((name, value))
        };
        let headers = self.headers.iter().map(header).collect::<Result<_, Error>>()?;
        Ok((url, headers))
    }

    async fn plan(
        &self,
        reference: &RegistryRef,
        upstream: &Address,
        scope: &str,
        options: &SourceOptions,
        access: Option<&Arc<Access>>,
    ) -> Result<Plan, Error> {
        let (url, mut headers) = self.checked()?;
        let name = authority(&url);
        let base = format!("{}/{}", url.as_str().trim_end_matches('/'), reference.repository);
        let registry = &reference.registry;
        let loopback = is_loopback(&name);
        let (filed, plain, strict, query) = match self.kind {
            MirrorKind::Registry => {
                let ns: String = reqwest::Url::parse_with_params("http://x/", [("ns", registry)])
                    .map(|url| format!("?{}", url.query().unwrap_or_default()))
                    .unwrap_or_default();
                (name.clone(), url.scheme() == "http", false, ns)
            }
            MirrorKind::Dragonfly => {
                let value = HeaderValue::try_from(&upstream.base)
                    .map_err(|error| Error::malformed(&upstream.base, error))?;
                if !headers.iter().any(|(name, _)| *name == DRAGONFLY_REGISTRY) {
                    headers.push((DRAGONFLY_REGISTRY, value));
                }
                (registry.clone(), upstream.plain, true, String::new())
            }
        };
        let safe = url.scheme() == "https" || loopback || self.credentials_in_clear;
        let credentials = if safe {
            options.credentials.clone()
        } else {
            Credentials::Anonymous
        };
        let login = credentials.login(&filed).await?;
        Ok(Plan {
            party: Party {
                name: format!("{registry} through {name}"),
                registry: filed,
                base: url.to_string(),
                plain,
                credentials,
                login,
                scope: scope.to_owned(),
            },
            name,
            place: Place::Repository { base, query },
            headers,
            strict,
            last: false,
            access: access
                .filter(|_| self.kind == MirrorKind::Dragonfly && safe)
                .cloned(),
        })
    }
}

/// `HOST[:PORT]`, as registries are named.
fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    url.port()
        .map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}

impl Config {
    fn breaker(&self) -> Rules {
        Rules {
            failures: self.breaker_failures,
            first: Duration::from_millis(self.breaker_open_ms),
            longest: Duration::from_millis(self.breaker_longest_ms.max(self.breaker_open_ms)),
        }
    }

    pub(super) fn budget(&self) -> Duration {
        Duration::from_millis(self.budget_ms)
    }

    pub(super) fn pause(&self) -> Duration {
        Duration::from_millis(self.pause_ms)
    }

    pub(super) fn longest_pause(&self) -> Duration {
        Duration::from_millis(self.longest_pause_ms)
    }
}
