//! The API key of a request: a token of this node.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::api::credentials::{Credentials, Presented};
use crate::api::peer::Peer;
use crate::api::problem::Refusal;

/// The header with the API key.
pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The caller of a request that may be passed on to another node, and its key, which the other node checks too. The request keeps the key.
///
/// # Errors
/// The key is no token of this node.
pub fn admit(credentials: &Credentials, headers: &HeaderMap) -> Result<(Peer, HeaderValue), Refusal> {
    let admitted = credentials.admit(&Presented::take_from(&API_KEY, &mut headers.clone()))?;
    let key = headers.get(API_KEY).cloned();
    let mut key = key.unwrap_or_else(|| HeaderValue::from_static(""));
    key.set_sensitive(true);
    Ok((admitted.peer, key))
}
