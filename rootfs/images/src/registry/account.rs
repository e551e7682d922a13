//! A registry as a connection sees it: its name, its address and the credentials for it; and observers of connections.

use super::auth::{Credentials, Login};

/// Observes the actions of a connection other than its requests.
pub trait Observer: Send + Sync {
    /// A token was requested, or a password read again.
    fn login(&self) {}
}

/// Ignores everything.
pub struct Unobserved;

impl Observer for Unobserved {}

/// A registry's address and the credentials to use there.
pub struct RegistryAccount {
    /// Its name in messages.
    pub name: String,
    /// The name under which its credentials are stored: `docker.io`, `host:port`.
    pub registry: String,
    /// Where credentials go: `https://host[:port]/…`.
    pub base: String,
    /// Whether tokens may be requested over plain HTTP.
    pub plain: bool,
    pub credentials: Credentials,
    /// The current credentials.
    pub login: Login,
    /// `repository:NAME:ACTIONS`.
    pub scope: String,
}
