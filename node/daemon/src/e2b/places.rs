//! How many connections of a proxy are in use.
//!
//! Invariants: a connection has a place as long as it is in use. There are never more places than [`Bounds`] says, so that one sandbox leaves
//! places to the other sandboxes of its tenant, and one tenant to other tenants.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use thaw_sandbox::tenant::Tenant;
use thaw_sys::lock::Lock;

use crate::api::problem::{ApiCode, Refusal};

/// Most connections in use.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub in_all: usize,
    /// To the sandboxes of one tenant, or to all without a tenant.
    pub of_tenant: usize,
    /// To one sandbox, or to one node.
    pub of_one: usize,
}

/// A sandbox by its id, or a node by its name.
#[derive(Clone, Debug)]
pub struct Party<'a> {
    pub name: &'a str,
    /// Whose the sandbox is.
    pub tenant: Option<Tenant>,
}

impl<'a> From<&'a str> for Party<'a> {
    /// A node, or a sandbox without a tenant.
    fn from(name: &'a str) -> Party<'a> {
        Party { name, tenant: None }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Places {
    in_use: Arc<Mutex<InUse>>,
    bounds: Bounds,
}

#[derive(Debug, Default)]
struct InUse {
    in_all: usize,
    of_tenant: HashMap<Option<Tenant>, usize>,
    of_one: HashMap<String, usize>,
}

/// One connection in use, until it is dropped.
#[derive(Debug)]
pub struct Place {
    in_use: Arc<Mutex<InUse>>,
    name: String,
    tenant: Option<Tenant>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut in_use = self.in_use.locked();
        in_use.in_all -= 1;
        give_back(&mut in_use.of_tenant, &self.tenant);
        give_back(&mut in_use.of_one, &self.name);
    }
}

fn give_back<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

impl Places {
    /// None is taken yet.
    pub fn new(bounds: Bounds) -> Places {
        Places {
            in_use: Arc::default(),
            bounds,
        }
    }

    /// Takes a place for a connection.
    ///
    /// # Errors
    /// [`ApiCode::TooMany`], with the bound that is reached.
    pub fn take(&self, to: Party<'_>) -> Result<Arc<Place>, Refusal> {
        let Bounds {
            in_all,
            of_tenant,
            of_one,
        } = self.bounds;
        let mut in_use = self.in_use.locked();
        let full = if in_use.of_one.get(to.name).is_some_and(|count| *count >= of_one) {
            Some(format!("{} has {of_one} connections, the most of one", to.name))
        } else if in_use
            .of_tenant
            .get(&to.tenant)
            .is_some_and(|count| *count >= of_tenant)
        {
            let whose = match to.tenant {
                Some(_) => "the tenant's sandboxes",
                None => "the sandboxes without a tenant",
            };
            Some(format!(
                "{whose} have {of_tenant} connections, the most of one tenant"
            ))
        } else if in_use.in_all >= in_all {
            Some(format!("there are {in_all} connections, the most in all"))
        } else {
            None
        };
        if let Some(full) = full {
            return Err(Refusal::new(ApiCode::TooMany, full));
        }
        in_use.in_all += 1;
        *in_use.of_tenant.entry(to.tenant.clone()).or_default() += 1;
        *in_use.of_one.entry(to.name.to_owned()).or_default() += 1;
        Ok(Arc::new(Place {
            in_use: self.in_use.clone(),
            name: to.name.to_owned(),
            tenant: to.tenant,
        }))
    }

    /// How many are taken.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.in_use.locked().in_all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(name: &'a str, tenant: Option<&str>) -> Party<'a> {
        let tenant = tenant.map(|tenant| tenant.parse().unwrap());
        Party { name, tenant }
    }

    #[test]
    fn places_are_bounded_in_all_of_a_tenant_and_of_one() {
        let bounds = Bounds {
            in_all: 4,
            of_tenant: 3,
            of_one: 2,
        };
        let places = Places::new(bounds);
        for tenant in [None, Some("acme")] {
            let mut taken = Vec::new();
            let mut take = |name, tenant, bound: Option<&str>| match (places.take(of(name, tenant)), bound) {
                (Ok(place), None) => taken.push(place),
                (Err(refused), Some(bound)) => assert!(refused.to_string().contains(bound), "{refused}"),
                (taken, bound) => panic!("{name}: {taken:?}, not {bound:?}"),
            };
            take("a", tenant, None);
            take("a", tenant, None);
            take("a", tenant, Some("a has 2"));
            take("b", tenant, None);
            take("c", tenant, Some("have 3"));
            take("d", Some("other"), None);
            take("e", Some("third"), Some("are 4"));
            drop(taken.pop());
            assert!(places.take(of("e", Some("third"))).is_ok());
            drop(taken);
            let in_use = places.in_use.locked();
            assert!(in_use.in_all == 0 && in_use.of_tenant.is_empty() && in_use.of_one.is_empty());
        }
    }
}
