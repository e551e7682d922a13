//! The messages that containerd wraps in an `Any`, which names their type.

use thaw_protocol::shim::Any;

/// The message's name: its type URL without the authority.
pub fn kind(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}
