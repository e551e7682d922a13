//! Finds a stored snapshot by id, name, or the beginning of an id.
//!
//! Invariant: a snapshot that a viewer does not reach does not exist for it. A name belongs to one tenant, or to none.

use std::sync::Arc;

use thaw_sys::lock::Lock;

use super::index::Stored;
use super::{Object, SnapshotStore, not_found};
use crate::closest::closest;
use crate::error::{Error, ErrorKind};
use crate::id::is_id;
use crate::tenant::Tenant;

/// Who looks for a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Viewer {
    /// The tenant whose names it uses.
    pub tenant: Option<Tenant>,
    /// Whether it reaches all snapshots of the node.
    pub is_node: bool,
}

impl Viewer {
    /// The node itself, and users of the host. Only snapshots without a tenant have names for it; the others are reached by id.
    pub fn node() -> Viewer {
        Viewer {
            tenant: None,
            is_node: true,
        }
    }

    /// Whether a snapshot exists for it.
    pub fn reaches(&self, object: &Object) -> bool {
        self.is_node || (self.tenant.is_some() && self.tenant == object.tenant)
    }

    fn names(&self, object: &Object, wanted: &str) -> bool {
        object.name.as_deref() == Some(wanted) && self.tenant == object.tenant
    }
}

/// Finds a snapshot in one of several stores: by its id, its name, or an unambiguous beginning of its id. Returns the place of the store
/// among them. Blocks.
///
/// # Errors
/// [`ErrorKind::SnapshotNotFound`]: no snapshot matches, or several.
pub fn find(stores: &[SnapshotStore], wanted: &str, viewer: &Viewer) -> Result<(usize, Arc<Stored>), Error> {
    let places = || stores.iter().enumerate();
    if let Some(found) = places().find_map(|(at, store)| Some((at, store.exact(wanted, viewer)?))) {
        return Ok(found);
    }
    let all: Vec<(usize, Arc<Stored>)> = places()
        .flat_map(|(at, store)| store.list().into_iter().map(move |stored| (at, stored)))
        .filter(|(_, stored)| viewer.reaches(&stored.object))
        .collect();
    let mut begin = all
        .iter()
        .filter(|(_, stored)| !wanted.is_empty() && stored.object.id.starts_with(wanted));
    match (begin.next(), begin.next()) {
        (Some(one), None) => Ok(one.clone()),
        (Some(_), Some(_)) => Err(Error::new(
            ErrorKind::SnapshotNotFound,
            format!("more than one snapshot begins with {wanted}"),
        )),
        (None, _) => {
            let named = all.iter().map(|(_, stored)| &stored.object);
            let named = named.filter(|object| object.tenant == viewer.tenant);
            let closest = closest(wanted, named.filter_map(|object| object.name.as_deref()));
            let error = not_found(wanted);
            Err(Error {
                what: format!("{}{closest}", error.what),
                ..error
            })
        }
    }
}

impl SnapshotStore {
    /// The snapshot with this id or name. Reads the directory of the store only if memory does not have it.
    fn exact(&self, wanted: &str, viewer: &Viewer) -> Option<Arc<Stored>> {
        let by_id = self.get(wanted).filter(|stored| viewer.reaches(&stored.object));
        if by_id.is_some() || is_id(wanted) {
            return by_id;
        }
        let named = |all: Vec<Arc<Stored>>| {
            all.into_iter()
                .find(|stored| viewer.names(&stored.object, wanted))
        };
        let known: Vec<Arc<Stored>> = self.0.index.locked().all().cloned().collect();
        // The record may have changed since.
        let known = named(known).and_then(|stored| self.get(&stored.object.id));
        let known = known.filter(|stored| viewer.names(&stored.object, wanted));
        known.or_else(|| named(self.list()))
    }
}
