//! The client of registries. Pulls, pushes, reads of ranges and listings of referrers all go through it.
//!
//! A [`Client`] makes a [`connection::Connection`] for each account it talks to. A connection authenticates ([`token`]),
//! follows redirects ([`wire`]) and retries ([`retries`]). An [`endpoint::Endpoint`] is a connection to one place that
//! has blobs, a registry or a mirror, with its circuit breaker ([`breaker`]) and counters ([`stats`]).
//!
//! Invariants: a registry sees only credentials that are meant for it. Every operation ends, after a number of attempts
//! or a time limit. An endpoint that keeps failing is not asked for a while.

pub(crate) mod account;
mod address;
mod answer;
pub(crate) mod auth;
pub(crate) mod breaker;
mod bucket;
pub(crate) mod budget;
mod client;
mod config;
pub(crate) mod connection;
pub(crate) mod download;
pub(crate) mod endpoint;
pub(crate) mod gate;
mod mirror;
mod plan;
mod redirect;
pub(crate) mod refusal;
pub(crate) mod repository;
pub(crate) mod request;
pub(crate) mod retries;
pub(crate) mod stats;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod token;
pub(crate) mod wire;

use crate::error::Error;

pub use auth::Credentials;
pub use client::{Client, Rights};
pub use config::{Config, Mirror, MirrorKind};
pub use retries::Retry;
pub use stats::{EndpointCounts, Stats};

/// How to reach registries.
#[derive(Clone, Default)]
pub struct Options {
    /// HTTP without TLS, for every registry. It is used for loopback addresses in any case, and for the registries
    /// that the environment variable `THAW_PLAIN_HTTP` lists, separated by commas.
    pub plain_http: bool,
    pub credentials: Credentials,
    pub retry: Retry,
}

/// Creates an HTTP client for requests to the registry `host`. It verifies TLS with this host's certificates and resolves names without
/// glibc.
///
/// # Errors
/// `RegistryUnreachable` if this host's certificates cannot be read.
pub fn http_client(host: &str) -> Result<reqwest::Client, Error> {
    wire::client().map_err(|failure| address::no_client(host, &failure))
}
