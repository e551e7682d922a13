//! The stock of each tenant: its images, templates, parked machines and forks, below `THAW_DATA/tenants/TENANT`.
//!
//! Without `[api] separate_tenants`, every sandbox is made from the node's stock, and a guest can measure which shared pages
//! another guest has read. With it, a tenant's sandboxes are made from a [`Node`] with a stock of its own; the run directory, the
//! cgroups, the pools of shells, networks and disks, and the disk budget are the node's.
//!
//! Invariants: a process has one such node for each tenant, so that the tenant's sandboxes share one copy. No lock is held while
//! it is opened. A sandbox's record names its stock, whatever the setting becomes later.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use thaw_pools::statistics::PoolStatistics;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use super::Node;
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::paths::Paths;
use crate::snapshot::{Scratch, SnapshotStore};
use crate::tenant::Tenant;
use thaw_sys::lock::Lock;

/// Under the data directory.
pub(super) const TENANTS: &str = "tenants";
/// Most snapshots that one tenant pushes and pulls at once.
const TRANSFERS: usize = 2;
/// Most claims of deleted sandboxes that are written at once.
const CLAIMS: usize = 8;

/// The node, and the nodes of tenants with a stock of their own. Clones share them.
#[derive(Clone, Debug)]
pub struct Tenants {
    shared: Node,
    /// Whether new sandboxes of a tenant are made from its own stock.
    separate: bool,
    opened: Arc<Mutex<BTreeMap<Tenant, Opened>>>,
    /// The stored snapshots of tenants with a stock of their own, whether the stock is open or not.
    pub(super) stores: Arc<Mutex<BTreeMap<Tenant, SnapshotStore>>>,
    /// Limits the snapshots that each tenant pushes and pulls at once.
    transfers: Arc<Mutex<BTreeMap<Option<Tenant>, Arc<Semaphore>>>>,
    /// Limits the claims of deleted sandboxes that are written at once.
    pub(super) claims: Arc<Semaphore>,
}

/// Empty until the node is opened, and after a failure to open it.
type Opened = Arc<OnceCell<Node>>;

impl Tenants {
    /// Opens the tenants that the configuration sets. Removes the forks that dead owners left in tenants' stocks, without opening the
    /// stocks.
    pub fn open(shared: Node) -> Tenants {
        sweep(&shared.paths.data);
        Tenants {
            separate: shared.images.config.api.separate_tenants,
            shared,
            opened: Arc::default(),
            stores: Arc::default(),
            transfers: Arc::default(),
            claims: Arc::new(Semaphore::new(CLAIMS)),
        }
    }

    /// Waits until this tenant, or the node, may push or pull another snapshot. Each transfer takes threads, which a slow registry keeps.
    ///
    /// # Errors
    /// None in practice: the limit is never closed.
    pub(super) async fn transfer(&self, of: Option<&Tenant>) -> Result<OwnedSemaphorePermit, Error> {
        let limit = || Arc::new(Semaphore::new(TRANSFERS));
        let limit = self
            .transfers
            .locked()
            .entry(of.cloned())
            .or_insert_with(limit)
            .clone();
        let permit = limit.acquire_owned().await;
        permit.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))
    }

    /// The node: what all tenants share, and the stock of those that are not separate.
    pub fn shared(&self) -> &Node {
        &self.shared
    }

    /// The node to make a new sandbox of this tenant from.
    ///
    /// # Errors
    /// Its stock cannot be opened. The next call tries again.
    pub async fn for_new(&self, tenant: Option<&Tenant>) -> Result<Node, Error> {
        self.with_stock(tenant.filter(|_| self.separate)).await
    }

    /// The node with the stock that an existing sandbox's record names, also if the setting has changed since.
    ///
    /// # Errors
    /// Those of [`Tenants::for_new`].
    pub async fn with_stock(&self, stock: Option<&Tenant>) -> Result<Node, Error> {
        let Some(tenant) = stock else {
            return Ok(self.shared.clone());
        };
        let cell = self.opened.locked().entry(tenant.clone()).or_default().clone();
        let node = cell.get_or_try_init(|| self.open_one(tenant.clone())).await?;
        Ok(node.clone())
    }

    /// The shared node, then the nodes of all tenants opened so far.
    pub fn all(&self) -> Vec<Node> {
        let opened = self.opened.locked();
        let nodes = opened.values().filter_map(|cell| cell.get()).cloned();
        std::iter::once(self.shared.clone()).chain(nodes).collect()
    }

    /// Statistics of all pools. Those of parked machines, one for each opened tenant with its own stock, are added up.
    pub fn pool_statistics(&self) -> Vec<PoolStatistics> {
        let node = self.shared();
        let mut all = Vec::from(node.pools.statistics());
        all.push(node.shells.statistics());
        let of_node = |node: Node| node.parked.statistics().and(&node.parked_snapshots.statistics());
        let parked = self.all().into_iter().map(of_node);
        all.extend(parked.reduce(|sum, more| sum.and(&more)));
        all
    }

    /// Ends all parked machines, and parks no more. Blocks until that is done.
    pub fn close(&self) {
        for node in self.all() {
            node.parked.close();
            node.parked_snapshots.close();
        }
    }

    async fn open_one(&self, tenant: Tenant) -> Result<Node, Error> {
        let shared = self.shared.clone();
        let tenants = self.clone();
        let node = blocking(move || {
            let stored = tenants.store_of(&tenant)?;
            shared.with_stock_of(tenant, stored)
        })
        .await?;
        tokio::spawn(node.images.clone().keep_measured());
        tokio::spawn(node.clone().collect_components());
        Ok(node)
    }
}

impl Node {
    /// A node that shares everything with this one but the stock, which is this tenant's alone. Blocks.
    fn with_stock_of(&self, tenant: Tenant, stored: SnapshotStore) -> Result<Node, Error> {
        let paths = Paths {
            data: data(&self.paths.data, &tenant),
            ..self.paths.clone()
        };
        let templates = self.templates.below(&paths.data)?;
        templates.sweep();
        Ok(Node {
            images: self.images.beside(&paths.images())?,
            parked: Arc::new(self.parked.others()),
            larger: Arc::new(self.larger.others()),
            templates,
            parked_snapshots: Arc::new(self.parked_snapshots.others()),
            snapshots: self.snapshots.others(),
            stored,
            stock: Some(tenant),
            paths,
            ..self.clone()
        })
    }
}

/// The data directory of a tenant: a name is one component of a path, and never `..` ([`Tenant`]).
pub(super) fn data(shared: &Path, tenant: &Tenant) -> PathBuf {
    shared.join(TENANTS).join(tenant.as_str())
}

/// Removes the forks that dead owners left in the stocks of all tenants on disk.
fn sweep(shared: &Path) {
    for entry in fs::read_dir(shared.join(TENANTS)).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if let Some(Ok(tenant)) = name.to_str().map(str::parse::<Tenant>) {
            Scratch::sweep(&data(shared, &tenant));
        }
    }
}

#[cfg(test)]
#[path = "tenants_test.rs"]
mod tests;
