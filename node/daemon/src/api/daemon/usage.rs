//! Resource usage of sandboxes and pools on the host, and thawd's metrics.

use thaw_protocol::api::{NodeUsage, PoolUsage, SandboxUsage, Usage};
use thaw_sandbox::error::Error;

use super::Daemon;
use crate::api::scope::{Scope, Wanted};
use crate::metrics::Families;

impl Daemon {
    /// The resource usage of one sandbox. Blocks while the kernel collects it.
    pub fn usage(&self, wanted: &Wanted) -> Result<Usage, Error> {
        let id = self.id(wanted)?;
        Ok(self.look_up(&id)?.usage())
    }

    /// The resource usage of all sandboxes in a scope; with the node's scope, also of the pools. Blocks likewise.
    pub fn usages(&self, scope: &Scope) -> NodeUsage {
        let held: Vec<_> = {
            let table = self.table();
            let machines = table.values().filter_map(|held| held.body.machine());
            machines.cloned().collect()
        };
        let sandboxes = held.iter().filter_map(|machine| {
            let shown = self.cache.get(&machine.record().id)?;
            scope.reaches(&shown).then(|| SandboxUsage {
                id: shown.id.clone(),
                name: shown.name.clone(),
                image: shown.image.clone(),
                state: shown.state.clone(),
                created: shown.created,
                cpus: shown.cpus,
                memory_mib: shown.memory_mib,
                usage: machine.usage(),
            })
        });
        let sandboxes = sandboxes.collect();
        let factory = self.factory.as_ref().filter(|_| scope.is_node());
        let pools = factory.map(|m| m.pools()).unwrap_or_default();
        let pools = pools.into_iter().map(|pool| PoolUsage {
            pool: pool.kind.into(),
            ready: pool.ready,
            high: pool.high,
            claims: pool.claims,
            hits: pool.hits,
        });
        NodeUsage {
            pools: pools.collect(),
            sandboxes,
        }
    }

    /// Adds thawd's metrics.
    pub fn count(&self, families: &mut Families) {
        self.metrics.collect(families);
        if let Some(spans) = &*self.spans() {
            spans.count(families);
        }
        if let Some(factory) = &self.factory {
            factory.count(self.metrics.endpoint_names(), families);
        }
    }
}
