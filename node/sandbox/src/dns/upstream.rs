//! Asks the node's name servers for addresses.
//!
//! Nothing is cached: a tenant must not learn from the time of an answer what another has resolved.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use async_trait::async_trait;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolveHosts, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};
use tokio::sync::Semaphore;

use super::places::Places;

/// Most queries of all guests that wait for a name server. More fail at once.
const MOST_WAITING: usize = 512;
static WAITING: Semaphore = Semaphore::const_new(MOST_WAITING);
/// How long one attempt may take, and how many there are.
const TIMEOUT: Duration = Duration::from_secs(3);
const ATTEMPTS: usize = 2;
/// How long a query may wait in all: a chain of aliases is several queries of the resolver.
const DEADLINE: Duration = Duration::from_secs(10);

/// The addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub addresses: Vec<Ipv4Addr>,
    /// The shortest time to live of its records.
    pub ttl: Duration,
}

/// Why a name has no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    NoName,
    NoAddress,
    Failed,
}

/// Finds the IPv4 addresses of a name.
#[async_trait]
pub(crate) trait Upstream: Send + Sync {
    /// `name` has no dot at its end.
    async fn lookup(&self, name: &str) -> Result<Answer, NoAnswer>;
}

/// The node's name servers, for one guest.
pub(crate) struct NameServers {
    resolver: Option<TokioResolver>,
    places: Places,
}

impl NameServers {
    /// These servers. Without one, every lookup fails.
    pub fn new(servers: &[IpAddr]) -> NameServers {
        NameServers {
            resolver: resolver(servers),
            places: Places::among(&WAITING),
        }
    }
}

fn resolver(servers: &[IpAddr]) -> Option<TokioResolver> {
    if servers.is_empty() {
        return None;
    }
    let servers = servers.iter().copied().map(NameServerConfig::udp_and_tcp);
    let config = ResolverConfig::from_name_servers(servers.collect());
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    let options = builder.options_mut();
    options.cache_size = 0;
    // The host's own names are none of its guests' business.
    options.use_hosts_file = ResolveHosts::Never;
    options.timeout = TIMEOUT;
    options.attempts = ATTEMPTS;
    let built = builder
        .build()
        .inspect_err(|e| tracing::warn!("names are not resolved for sandboxes: {e}"));
    built.ok()
}

#[async_trait]
impl Upstream for NameServers {
    async fn lookup(&self, name: &str) -> Result<Answer, NoAnswer> {
        let resolver = self.resolver.as_ref().ok_or(NoAnswer::Failed)?;
        let _place = self.places.take().ok_or(NoAnswer::Failed)?;
        // The dot keeps search domains out.
        let lookup = resolver.lookup(format!("{name}."), RecordType::A);
        let found = tokio::time::timeout(DEADLINE, lookup).await;
        let found = found.map_err(|_| NoAnswer::Failed)?.map_err(|e| {
            match (e.is_nx_domain(), e.is_no_records_found()) {
                (true, _) => NoAnswer::NoName,
                (false, true) => NoAnswer::NoAddress,
                (false, false) => NoAnswer::Failed,
            }
        })?;
        // The records of aliases limit the time too.
        let ttl = found.answers().iter().map(|record| record.ttl).min();
        let addresses = found.answers().iter().filter_map(|record| match &record.data {
            RData::A(address) => Some(address.0),
            _ => None,
        });
        let answer = Answer {
            addresses: addresses.collect(),
            ttl: Duration::from_secs(ttl.unwrap_or(0).into()),
        };
        match answer.addresses.is_empty() {
            true => Err(NoAnswer::NoAddress),
            false => Ok(answer),
        }
    }
}
