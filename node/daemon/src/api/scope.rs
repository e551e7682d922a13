//! The sandboxes that a caller may reach, and their names.
//!
//! Invariant: for a caller, a sandbox outside its scope does not exist. Every lookup takes a [`Wanted`], and every list and watch a
//! [`Scope`], so none can ignore the caller.

use thaw_protocol::api::Sandbox;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::tenant::Tenant;

use super::grant::Role;
use super::peer::Peer;

/// The sandboxes that exist for a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// The tenant whose names the scope uses. A name belongs to one tenant, or to none.
    tenant: Option<Tenant>,
    is_node: bool,
}

impl Scope {
    /// All sandboxes of the node. Only sandboxes without a tenant have names in this scope; the others are reached by id.
    pub fn node() -> Scope {
        Scope {
            tenant: None,
            is_node: true,
        }
    }

    /// The sandboxes of one tenant.
    pub fn tenant(tenant: Tenant) -> Scope {
        Scope {
            tenant: Some(tenant),
            is_node: false,
        }
    }

    /// The scope of a caller: for an administrator everything.
    pub fn of(peer: &Peer) -> Scope {
        Scope {
            tenant: peer.tenant().cloned(),
            is_node: peer.role() == Role::Admin,
        }
    }

    /// The stored snapshots that exist for the same caller.
    pub fn viewer(&self) -> Viewer {
        Viewer {
            tenant: self.tenant.clone(),
            is_node: self.is_node,
        }
    }

    /// Whether it is the whole node.
    pub fn is_node(&self) -> bool {
        self.is_node
    }

    /// Whether a sandbox is in it.
    pub fn reaches(&self, sandbox: &Sandbox) -> bool {
        self.reaches_tenant(sandbox.tenant.as_deref())
    }

    /// Whether this scope contains what a tenant owns. `None`: what the node owns.
    pub fn reaches_tenant(&self, tenant: Option<&str>) -> bool {
        self.is_node || (self.tenant.is_some() && self.tenant_name() == tenant)
    }

    /// The tenant of the sandboxes that the caller creates.
    pub fn tenant_of_new(&self) -> Option<&Tenant> {
        self.tenant.as_ref()
    }

    /// The tenant whose names the scope uses.
    pub fn tenant_name(&self) -> Option<&str> {
        self.tenant.as_ref().map(Tenant::as_str)
    }
}

/// A sandbox that a caller wants, by id or name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub scope: Scope,
    pub text: String,
}

impl Wanted {
    /// A sandbox in the scope of the node: for thawd itself, and for users of the host.
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
