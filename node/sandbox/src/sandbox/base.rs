//! The snapshot that the memory of a sandbox is frozen over: its template, or a stored snapshot.
//!
//! A paused sandbox has only what differs from that base. If the sandbox was thawed from more layers, the data of those above the base
//! is written again, so that repeated pauses lie on the base as one layer. Invariants: a base is kept ([`Kept`]) until the manifest
//! that names it is in its place, and is not removed while that exists ([`BaseUsers`]). What nothing would keep, such as a user's directory,
//! is no base of a paused sandbox.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use thaw_protocol::control::FreezeKind;

use super::{Node, Sandbox};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::snapshot::kept::Kept;
use crate::snapshot::manifest::MAX_LAYERS;
use crate::snapshot::store::User;
use crate::snapshot::{Base, Hash, SnapshotDir, SnapshotStore, Stored};
use crate::state::PausedSandboxes;
use crate::tenant::Tenant;

/// What a freeze writes memory over.
#[derive(Debug)]
pub(super) struct Below {
    pub base: Base,
    pub kind: FreezeKind,
    /// `None` if its owner alone decides how long it is there.
    _kept: Option<Kept>,
}

/// What lies on the templates and stored snapshots of a stock.
#[derive(Clone, Debug)]
pub struct BaseUsers {
    pub stored: SnapshotStore,
    pub paused: PausedSandboxes,
}

impl BaseUsers {
    /// What lies on the snapshot whose manifest has this hash, in words. Blocks.
    pub fn find(&self, base: Hash) -> Option<String> {
        let stored = self.stored.over(base);
        let stored = stored.map(|stored| format!("snapshot {}", stored.object.id));
        let paused = || {
            let paused = self.paused.over(base);
            paused.map(|id| format!("sandbox {id}, which is paused with its memory released"))
        };
        stored.or_else(paused)
    }
}

impl Sandbox {
    /// What a pause writes memory over. `None`: it writes all memory. Its VMM is of an earlier release, its memory comes page by page, or
    /// what it was thawed from is not kept here.
    pub(super) async fn base_of_pause(&self, node: &Node) -> Option<Below> {
        let origin = self.origin.as_ref()?;
        let over = |layers| FreezeKind::DeltaOver { layers };
        let speaks = self.resources.control().ok()?.version();
        if self.resources.pages.is_some() || speaks < over(1).since() || is_copied(node) {
            return None;
        }
        let own = Base {
            manifest: origin.manifest,
            place: origin.directory.clone(),
        };
        // It was thawed from a snapshot that is removed, as that of each resumed sandbox is: what that lay on may be there.
        let under = origin.subject.base.as_ref().map(|under| Base {
            manifest: under.manifest,
            place: plain(&origin.directory.join(&under.place)),
        });
        let (node, tenant) = (node.clone(), self.record().terms.tenant.clone());
        let found = blocking(move || {
            let mut bases = [Some(own), under].into_iter().flatten();
            Ok(bases.find_map(|base| kept_base(&node, tenant.as_ref(), &base)))
        });
        let (base, layers, kept) = found.await.ok().flatten()?;
        Some(Below {
            base,
            kind: over(layers),
            _kept: Some(kept),
        })
    }

    /// What a delta lies on: what the sandbox was thawed from, or, if that has the most layers allowed, only the lowest of these. `None` if
    /// the sandbox cannot be frozen.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotNotFound`]; those of [`crate::snapshot::Registry::chain`].
    pub(super) async fn base_of_delta(&self, node: &Node) -> Result<Option<Below>, Error> {
        let Some(origin) = self.origin.clone() else {
            return Ok(None);
        };
        let lowest = FreezeKind::DeltaOver { layers: 1 };
        let may_merge = self.resources.control()?.version() >= lowest.since();
        let (node, id) = (node.clone(), self.record().id.clone());
        blocking(move || {
            let removed = || {
                let what = format!(
                    "sandbox {id} cannot be frozen as a delta: what it was thawed from was removed, or is not stored yet"
                );
                Error::new(ErrorKind::SnapshotNotFound, what).remedy("freeze it without a delta")
            };
            if !origin.directory.exists() || node.paused.holds(&origin.directory) {
                return Err(removed());
            }
            let chain = node.templates.registry().chain(&origin.directory)?;
            let is_it = chain.first().is_some_and(|own| own.hash() == origin.manifest);
            let is_full = chain.len() >= MAX_LAYERS && may_merge;
            let (found, kind) = match (chain.last(), chain.first()) {
                (Some(bottom), _) if is_it && is_full => (bottom, lowest),
                (_, Some(own)) if is_it => (own, FreezeKind::Delta),
                _ => return Err(removed()),
            };
            let place = found.path().canonicalize();
            let place = place.unwrap_or_else(|_| found.path().to_owned());
            Ok(Some(Below {
                _kept: node.keep(&place, found.hash()),
                base: Base {
                    manifest: found.hash(),
                    place,
                },
                kind,
            }))
        })
        .await
    }
}

impl Node {
    /// The stored snapshot in this directory. Blocks.
    fn stored_in(&self, snapshot: &Path) -> Option<Arc<Stored>> {
        self.stored.get(&self.stored.id_of(snapshot)?)
    }

    /// Keeps a template or a stored snapshot, which are not removed while something lies on them, if it is the one with this hash. `None` for
    /// anything else. Blocks.
    fn keep(&self, snapshot: &Path, hash: Hash) -> Option<Kept> {
        let is_template = self.templates.holds(snapshot);
        let is_there = || is_template || self.stored_in(snapshot).is_some();
        let directory = match is_template {
            true => snapshot,
            false => snapshot.parent()?,
        };
        let kept = is_there().then(|| Kept::take(directory).ok())??;
        // Before it was locked, it may have been removed, or begun to be.
        let found = self.templates.registry().find(snapshot).ok()?;
        (found.hash() == hash && is_there()).then_some(kept)
    }

    /// Whom a stored snapshot serves. Blocks.
    pub fn user_of(&self, stored: &Stored) -> Option<User> {
        let paused = stored.hash().and_then(|hash| self.paused.over(hash));
        let running = || super::stored::thawed_from(&self.run, &stored.directory);
        paused.map(User::Paused).or_else(|| running().map(User::Running))
    }

    /// What lies on its templates and stored snapshots.
    pub fn base_users(&self) -> BaseUsers {
        BaseUsers {
            stored: self.stored.clone(),
            paused: self.paused.clone(),
        }
    }
}

/// The highest of `top` and the snapshots that it lies on that may have another layer over it, and that this node keeps with all below it for a
/// sandbox of this tenant. A tenant does not keep another's snapshots from removal. Returns how many layers that has. Blocks.
fn kept_base(node: &Node, tenant: Option<&Tenant>, top: &Base) -> Option<(Base, u8, Kept)> {
    let chain = node.templates.registry().chain(&top.place).ok()?;
    chain.first().filter(|found| found.hash() == top.manifest)?;
    let is_its = |stored: Arc<Stored>| {
        let owner = stored.object.tenant.as_ref();
        owner.is_none() || owner == tenant
    };
    let is_keepable = |found: &SnapshotDir| {
        let place = found.path().canonicalize();
        place.is_ok_and(|place| node.templates.holds(&place) || node.stored_in(&place).is_some_and(is_its))
    };
    let keep = |(at, found): (usize, &SnapshotDir)| {
        let layers = u8::try_from(chain.len() - at).ok()?;
        if usize::from(layers) >= MAX_LAYERS || !chain[at..].iter().all(is_keepable) {
            return None;
        }
        let place = found.path().canonicalize().ok()?;
        let kept = node.keep(&place, found.hash())?;
        let base = Base {
            manifest: found.hash(),
            place: node.paused.place_of(&place),
        };
        Some((base, layers, kept))
    };
    chain.iter().enumerate().find_map(keep)
}

/// Whether paused sandboxes are copied to a registry, which takes whole snapshots alone.
fn is_copied(node: &Node) -> bool {
    let cluster = node.images.config.e2b.cluster.as_ref();
    cluster.is_some_and(|cluster| cluster.paused_registry.is_some())
}

/// A path without its `..` parts. The directories before them may be gone; they were not symbolic links.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = plain.pop(),
            part => plain.push(part),
        }
    }
    plain
}

#[cfg(test)]
#[path = "base_test.rs"]
mod tests;
