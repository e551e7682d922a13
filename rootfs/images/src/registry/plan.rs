//! The parameters of an endpoint, before it has a connection.

use std::sync::Arc;

use reqwest::header::{HeaderName, HeaderValue};

use super::account::RegistryAccount;
use super::endpoint::Place;
use super::token::Access;

/// The parameters of an endpoint.
pub(super) struct Plan {
    /// Names its counters and its breaker.
    pub name: String,
    pub account: RegistryAccount,
    pub place: Place,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub strict: bool,
    /// Asked last, after all mirrors.
    pub last: bool,
    /// The credentials that another connection uses, to share them.
    pub access: Option<Arc<Access>>,
}
