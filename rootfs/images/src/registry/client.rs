//! The client of registries: the state that all requests of a process share, and the connections and endpoints created from it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use reqwest::Url;
use thaw_sys::lock::Lock;
use tokio::sync::Notify;

use crate::error::Error;
use crate::progress::{Progress, Silent};
use crate::reference::RegistryRef;

use super::account::{RegistryAccount, Unobserved};
use super::address::{Address, no_client};
use super::answer::Terms;
use super::auth::{Credentials, Login};
use super::breaker::Breaker;
use super::connection::Connection;
use super::endpoint::{Endpoint, Pace, Place, Timed};
use super::gate::Gate;
use super::mirror::authority;
use super::plan::Plan;
use super::redirect::Redirects;
use super::repository::Repository;
use super::wire::{Wire, client, patient_client};
use super::{Config, Options, Stats};

/// The state that all requests of a process share: configuration, breakers, the bandwidth of prefetches, connections and counters. There is
/// one per process, because its limits apply to all that share it.
pub struct Client {
    pub(crate) config: Config,
    pub(crate) stats: Arc<Stats>,
    pub(crate) gate: Gate,
    breakers: Breakers,
    wire: OnceLock<Arc<dyn Wire>>,
    /// For uploads, which are answered only once they are sent.
    patient: OnceLock<Arc<dyn Wire>>,
}

/// The uses of a connection to a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    Pull,
    /// Pull and push.
    Push,
}

/// One for each endpoint.
struct Breakers {
    by_endpoint: Mutex<HashMap<String, Arc<Breaker>>>,
    changed: Arc<Notify>,
}

impl Client {
    /// # Errors
    /// `Malformed` for a mirror with an invalid address or invalid headers, or for a limit that admits nothing.
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
            patient: OnceLock::new(),
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
    pub(crate) fn with_wire(config: Config, wire: Arc<dyn Wire>) -> Arc<Self> {
        let client = Self::new(config).unwrap();
        let _ = client.wire.set(wire);
        client
    }

    /// Notified when a probe of any breaker has ended.
    pub(crate) fn breaker_changed(&self) -> &Notify {
        &self.breakers.changed
    }

    /// Connections, shared by all requests with the same rights.
    fn wire(&self, rights: Rights, registry: &str) -> Result<Arc<dyn Wire>, Error> {
        let (wire, make): (_, fn() -> _) = match rights {
            Rights::Pull => (&self.wire, client),
            Rights::Push => (&self.patient, patient_client),
        };
        if let Some(wire) = wire.get() {
            return Ok(wire.clone());
        }
        let made = make().map_err(|failure| no_client(registry, &failure))?;
        Ok(wire.get_or_init(|| Arc::new(made)).clone())
    }

    /// A connection to a reference's repository, for its documents, whole layers and uploads. It ignores the circuit breaker, because a
    /// person waits for the answer and must see an error at once.
    pub(crate) async fn repository(
        &self,
        reference: &RegistryRef,
        options: &Options,
        rights: Rights,
        progress: Arc<dyn Progress>,
    ) -> Result<Repository, Error> {
        let address = Address::of(&reference.registry, options.plain_http);
        let wire = self.wire(rights, &reference.registry)?;
        let account = RegistryAccount::of(reference, &address, options, rights).await?;
        let connection = Connection::new(account, wire, options.retry, progress, Arc::new(Unobserved))?;
        let base = format!("{}/v2/{}", address.base, reference.repository);
        Ok(Repository::new(Arc::new(connection), base))
    }

    fn endpoint(
        &self,
        plan: Plan,
        progress: Arc<dyn Progress>,
        options: &Options,
    ) -> Result<Endpoint, Error> {
        let config = &self.config;
        let stats = self.stats.endpoint(&plan.name);
        let pace = Pace {
            answer: Duration::from_millis(config.answer_ms),
            bytes: config.window_bytes,
            window: Duration::from_millis(config.window_ms),
        };
        let timed = Timed {
            wire: self.wire(Rights::Pull, &plan.account.registry)?,
            answer: pace.answer,
            stats: stats.clone(),
        };
        let breaker = {
            let mut breakers = self.breakers.by_endpoint.locked();
            let mut rules = config.breaker();
            if plan.last {
                // There is no alternative endpoint, so its recovery must be noticed soon.
                rules.longest = rules.longest.min(config.budget() / 10);
                rules.first = rules.first.min(rules.longest);
            }
            let made = || Breaker::new(rules, self.breakers.changed.clone(), stats.clone());
            breakers.entry(plan.name).or_insert_with(made).clone()
        };
        let (account, timed) = (plan.account, Arc::new(timed));
        let connection = match plan.access {
            Some(access) => Connection::sharing(
                account.name,
                &account.base,
                access,
                timed,
                options.retry,
                progress,
            )?,
            None => Connection::new(account, timed, options.retry, progress, stats.clone())?,
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

    /// An endpoint for an address in a descriptor, which gets no credentials.
    pub(crate) fn foreign(&self, url: &str) -> Result<Arc<Endpoint>, Error> {
        let parsed =
            Url::parse(url).map_err(|error| Error::malformed(format!("the address {url:?}"), error))?;
        let name = authority(&parsed);
        let plan = Plan {
            account: RegistryAccount {
                name: name.clone(),
                registry: name.clone(),
                base: url.to_owned(),
                plain: false,
                credentials: Credentials::Anonymous,
                login: Login::Anonymous,
                scope: String::new(),
            },
            name,
            place: Place::Foreign(url.to_owned()),
            headers: Vec::new(),
            strict: false,
            last: true,
            access: None,
        };
        let options = Options::default();
        Ok(Arc::new(self.endpoint(plan, Arc::new(Silent), &options)?))
    }

    /// Where the blobs of a repository are: its mirrors in their order, and its registry.
    pub(crate) async fn endpoints(
        &self,
        reference: &RegistryRef,
        options: &Options,
        progress: Arc<dyn Progress>,
    ) -> Result<Vec<Arc<Endpoint>>, Error> {
        let registry = &reference.registry;
        let address = Address::of(registry, options.plain_http);
        let account = RegistryAccount::of(reference, &address, options, Rights::Pull).await?;
        let scope = account.scope.clone();
        let own = Plan {
            name: registry.clone(),
            account,
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
        Ok(endpoints)
    }

    /// The mirrors of a repository, in their order.
    pub(crate) async fn mirrors(
        &self,
        reference: &RegistryRef,
        options: &Options,
        progress: Arc<dyn Progress>,
    ) -> Result<Vec<Arc<Endpoint>>, Error> {
        if self.config.mirrors_of(&reference.registry).is_empty() {
            return Ok(Vec::new());
        }
        let mut endpoints = self.endpoints(reference, options, progress).await?;
        endpoints.pop();
        Ok(endpoints)
    }
}

impl RegistryAccount {
    /// The registry itself, with the current credentials.
    async fn of(
        reference: &RegistryRef,
        address: &Address,
        options: &Options,
        rights: Rights,
    ) -> Result<Self, Error> {
        let registry = &reference.registry;
        let actions = match rights {
            Rights::Pull => "pull",
            Rights::Push => "pull,push",
        };
        Ok(Self {
            name: registry.clone(),
            registry: registry.clone(),
            base: address.base.clone(),
            plain: address.plain,
            credentials: options.credentials.clone(),
            login: options.credentials.login(registry).await?,
            scope: format!("repository:{}:{actions}", reference.repository),
        })
    }
}
