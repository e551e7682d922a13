//! The user namespace of this process that owns the network namespaces of slots.
//!
//! [`thaw_sys::user_namespace`] says what that spares. They are configured from the host's user namespace, which has every right over those
//! below it.

use std::sync::OnceLock;

use thaw_sys::user_namespace::UserNamespace;

static OWNER: OnceLock<Option<UserNamespace>> = OnceLock::new();

/// The user namespace, or `None` if the host grants none: network namespaces of slots are then the host's.
pub(super) fn get() -> Option<&'static UserNamespace> {
    let make = || {
        UserNamespace::make()
            .inspect_err(|error| tracing::debug!(%error, "no user namespace to own the namespaces of slots"))
            .ok()
    };
    OWNER.get_or_init(make).as_ref()
}
