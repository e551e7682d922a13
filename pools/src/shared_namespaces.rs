//! One set of empty namespaces for all VMMs that this process starts.
//!
//! Made with the first VMM, and held while this process lives; a VMM keeps those it is in. docs/jail.md says why VMMs can share them.

use std::sync::OnceLock;

use thaw_sys::namespaces::Namespaces;

static SHARED: OnceLock<Option<Namespaces>> = OnceLock::new();

/// The namespaces, or `None` if the host does not let this process make any: each VMM then tries to make its own.
pub fn get() -> Option<&'static Namespaces> {
    let make = || {
        Namespaces::make()
            .inspect_err(|error| tracing::debug!(%error, "cannot make namespaces for VMMs to share"))
            .ok()
    };
    SHARED.get_or_init(make).as_ref()
}
