//! Which sandboxes a caller may reach, and what it calls them.
//!
//! Invariant: to a caller, a sandbox beyond its scope is one that is not there. Every lookup of the daemon takes a [`Wanted`] and
//! every list and watch a [`Scope`], so none is made without saying for whom.

use thaw_protocol::api::Sandbox;
use thaw_sandbox::tenant::Tenant;

use super::grant::Role;
use super::peer::Peer;

/// The sandboxes that are there for a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Whose names it uses. A name is of one tenant, or of none.
    tenant: Option<Tenant>,
    is_node: bool,
}

impl Scope {
    /// All of the node. Names are those of sandboxes without a tenant; others are reached by their ids.
    pub fn node() -> Scope {
        Scope {
            tenant: None,
            is_node: true,
        }
    }

    /// Those of one tenant.
    pub fn tenant(tenant: Tenant) -> Scope {
        Scope {
            tenant: Some(tenant),
            is_node: false,
        }
    }

    /// What a caller may reach: an administrator everything.
    pub fn of(peer: &Peer) -> Scope {
        Scope {
            tenant: peer.tenant().cloned(),
            is_node: peer.role() == Role::Admin,
        }
    }

    /// Whether it is all of the node.
    pub fn is_node(&self) -> bool {
        self.is_node
    }

    /// Whether this sandbox is in it.
    pub fn reaches(&self, sandbox: &Sandbox) -> bool {
        self.is_node || (self.tenant.is_some() && self.tenant_name() == sandbox.tenant.as_deref())
    }

    /// Whose names it uses.
    pub fn tenant_name(&self) -> Option<&str> {
        self.tenant.as_ref().map(Tenant::as_str)
    }
}

/// A sandbox as a caller names it: by its id, or by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub scope: Scope,
    pub text: String,
}

impl Wanted {
    /// Of all sandboxes of the node: for thawd itself, and for its host's users.
    pub fn on_node(text: impl Into<String>) -> Wanted {
        Wanted {
            scope: Scope::node(),
            text: text.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::grant::Grant;

    fn sandbox(tenant: Option<&str>) -> Sandbox {
        Sandbox {
            tenant: tenant.map(str::to_owned),
            ..Sandbox::default()
        }
    }

    #[test]
    fn only_an_administrator_reaches_other_tenants() {
        let tenants = [None, Some("acme"), Some("other"), Some("")];
        for role in Role::ALL {
            let grant = Grant::new(role, Some("acme".parse().unwrap())).unwrap();
            let scope = Scope::of(&Peer::token("x", grant));
            for tenant in tenants {
                let is_mine = tenant == Some("acme");
                assert_eq!(scope.reaches(&sandbox(tenant)), is_mine || role == Role::Admin);
            }
        }
        let user = Scope::of(&Peer::user(0));
        assert!(user.is_node() && tenants.iter().all(|t| user.reaches(&sandbox(*t))));
    }
}
