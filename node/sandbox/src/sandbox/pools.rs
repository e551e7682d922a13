//! The pools of a node, one for each kind of resource, and the report of what each claim found.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use thaw_network::{Networks, Setup};
use thaw_pools::cgroup::{Cgroups, Hierarchy};
use thaw_pools::disk::Disks;
use thaw_pools::foreground::{Active, Foreground};
use thaw_pools::plan::Plan;
use thaw_pools::pool::Pool;
use thaw_pools::resource::Kind;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::DEFAULT_DISK_MIB;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::blocking::blocking;
use crate::config::pools::{Marks, PoolsConfig};
use crate::error::Error;
use crate::paths::Paths;
use crate::slow::Slow;
use crate::trace::Trace;

/// Size in bytes of the largest disk that is made ahead. On the host it occupies only what is written.
const DISK_SIZE: u64 = (DEFAULT_DISK_MIB as u64) << 20;

/// How long after a creation or a deletion its pools may work: its caller gets the answer first, and the next creation of a burst its machine.
const ANSWERED: Duration = Duration::from_millis(5);

/// The size to make for a disk of `size` bytes: the next smaller power of two, so that there are few templates.
pub(super) fn made_size(size: u64) -> u64 {
    size.checked_ilog2().map_or(0, |log| 1 << log).min(DISK_SIZE)
}

/// One pool for each kind of resource.
#[derive(Debug)]
pub struct Pools {
    pub disks: Pool<Disks>,
    pub networks: Pool<Networks>,
    pub cgroups: Pool<Cgroups>,
    /// Creations and deletions in progress: pools do not work beside them.
    pub awaited: Arc<Foreground>,
    /// Each claim and each pending claim holds a receiver.
    claimed: watch::Sender<()>,
}

impl Pools {
    /// Pools that never make anything ahead.
    pub fn empty(paths: &Paths, hierarchy: Hierarchy, network: Setup) -> Pools {
        Pools {
            disks: Pool::empty(disks(paths)),
            networks: Pool::empty(Networks::new(network)),
            cgroups: Pool::empty(Cgroups::new(hierarchy)),
            awaited: Arc::default(),
            claimed: watch::Sender::default(),
        }
    }

    /// Pools that are kept filled to the configured marks.
    pub fn filled(
        paths: &Paths,
        hierarchy: Hierarchy,
        network: Setup,
        config: &PoolsConfig,
    ) -> Result<Pools, Error> {
        let failed = |e: std::io::Error| Error::system("cannot start the threads of the pools", &e);
        let has_cgroups = hierarchy != Hierarchy::None;
        let cgroups = Cgroups::new(hierarchy);
        let networks = Networks::new(network);
        let awaited = Arc::default();
        Ok(Pools {
            disks: Pool::filled(disks(paths), plan(DISK_SIZE, config.disks, config, &awaited))
                .map_err(failed)?,
            networks: Pool::filled(networks, plan((), config.networks, config, &awaited)).map_err(failed)?,
            cgroups: match has_cgroups {
                true => Pool::filled(cgroups, plan((), config.cgroups, config, &awaited)).map_err(failed)?,
                // This host cannot make any.
                false => Pool::empty(cgroups),
            },
            awaited,
            claimed: watch::Sender::default(),
        })
    }

    /// Begins a creation or a deletion that a caller waits for, beside which the pools do not work. Must be called within a tokio runtime.
    pub fn begin_awaited(&self) -> Awaited {
        Awaited(Some(self.awaited.begin()))
    }

    /// The statistics of each pool.
    pub fn statistics(&self) -> [PoolStatistics; 3] {
        [
            self.disks.statistics(),
            self.networks.statistics(),
            self.cgroups.statistics(),
        ]
    }

    /// Waits until all claimed resources are released, including those of cancelled claims.
    pub async fn unclaimed(&self) {
        self.claimed.closed().await;
    }

    /// Stops making resources ahead, and destroys the ready ones. Blocks until that is done.
    pub fn close(&self) {
        self.disks.close();
        self.networks.close();
        self.cgroups.close();
        for pool in self.statistics() {
            let (kind, claims, hits, made) = (pool.kind, pool.claims, pool.hits, pool.made);
            tracing::info!(kind, claims, hits, made, failed = pool.failed, "pool closed");
        }
    }
}

/// A creation or a deletion that a caller waits for. It counts until a moment after this is dropped.
pub struct Awaited(Option<Active>);

impl Drop for Awaited {
    fn drop(&mut self) {
        // Without a runtime, this process ends.
        if let (Some(active), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(async move {
                tokio::time::sleep(ANSWERED).await;
                drop(active);
            });
        }
    }
}

fn disks(paths: &Paths) -> Disks {
    Disks {
        directory: paths.disks(),
    }
}

fn plan<W>(want: W, marks: Marks, config: &PoolsConfig, awaited: &Arc<Foreground>) -> Plan<W> {
    Plan {
        makers: config.makers.get().into(),
        yields_to: Some(awaited.clone()),
        ..Plan::new(want, marks.into())
    }
}

/// A resource claimed from a pool. Dropping it releases it, even if the sandbox failed before it got the resource.
pub(super) struct Claimed<K: Kind> {
    /// `None` once the resource was kept or released.
    resource: Option<K::Resource>,
    pools: Arc<Pools>,
    of: fn(&Pools) -> &Pool<K>,
    _claimed: watch::Receiver<()>,
}

impl<K: Kind> Claimed<K> {
    /// Wraps a resource that was not claimed; it is released to the pool of its kind.
    pub(super) fn new(resource: K::Resource, pools: &Arc<Pools>, of: fn(&Pools) -> &Pool<K>) -> Claimed<K> {
        Claimed {
            resource: Some(resource),
            _claimed: pools.claimed.subscribe(),
            pools: pools.clone(),
            of,
        }
    }

    /// Keeps the resource for a later owner.
    pub(super) fn keep(mut self) {
        drop(self.resource.take());
    }
}

impl<K: Kind> Deref for Claimed<K> {
    type Target = K::Resource;

    fn deref(&self) -> &K::Resource {
        self.resource.as_ref().expect("only what ends it takes it out")
    }
}

impl<K: Kind> DerefMut for Claimed<K> {
    fn deref_mut(&mut self) -> &mut K::Resource {
        self.resource.as_mut().expect("only what ends it takes it out")
    }
}

impl<K: Kind> fmt::Debug for Claimed<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claimed({})", K::NAME)
    }
}

impl<K: Kind> Drop for Claimed<K> {
    fn drop(&mut self) {
        if let Some(resource) = self.resource.take() {
            (self.of)(&self.pools).release(resource);
        }
    }
}

/// A kind whose claims are reported.
pub(super) trait Claimable: Kind {
    /// The reason to report if none was ready and one had to be made.
    const MISSED: Slow;
}

impl Claimable for Disks {
    const MISSED: Slow = Slow::DiskMade;
}

impl Claimable for Networks {
    const MISSED: Slow = Slow::NetworkMade;
}

impl Claimable for Cgroups {
    const MISSED: Slow = Slow::CgroupMade;
}

/// Claims a resource. If none was ready, a blocking thread makes one, and the start's account gives the reason.
pub(super) async fn claim<K: Claimable>(
    pools: &Arc<Pools>,
    of: fn(&Pools) -> &Pool<K>,
    want: K::Want,
    failed: fn(K::Error) -> Error,
    trace: &Trace,
) -> Result<Claimed<K>, Error> {
    let miss = match of(pools).ready(&want) {
        Ok(claim) => {
            trace.note(K::NAME, "was ready in its pool");
            return Ok(Claimed::new(claim.resource, pools, of));
        }
        Err(miss) => miss,
    };
    let (pools, claimed) = (pools.clone(), pools.claimed.subscribe());
    let made = blocking(move || {
        let _claimed = claimed;
        let claim = of(&pools).make(&want, miss).map_err(failed)?;
        Ok((Claimed::new(claim.resource, &pools, of), claim.took))
    });
    let (claimed, took) = made.await?;
    let (kind, took) = (K::NAME, took.as_secs_f64() * 1e3);
    let text = format!(
        "no {kind} was ready ({}): one was made now, in {took:.1} ms",
        miss.reason
    );
    trace.reason(K::MISSED, &text);
    Ok(claimed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::error::ErrorKind;
    use thaw_pools::cgroup::Unavailable;

    fn place(root: &std::path::Path) -> (Paths, Hierarchy) {
        let paths = Paths {
            data: root.join("d"),
            run: root.join("r"),
            kernel: root.join("k"),
            guest_image: root.join("g"),
        };
        let hierarchy = Hierarchy::V2 {
            root: root.join("cgroup"),
            favordynmods: false,
        };
        (paths, hierarchy)
    }

    async fn claimed(pools: &Arc<Pools>, trace: &Trace) -> Claimed<Cgroups> {
        let failed = |e: Unavailable| Error::new(ErrorKind::Runtime, e.to_string());
        claim(pools, |p| &p.cgroups, (), failed, trace).await.unwrap()
    }

    #[test]
    fn few_sizes_of_disk_are_made_and_none_is_too_large() {
        assert_eq!(
            [1, 64 << 20, 100 << 20, 8 << 30].map(made_size),
            [1, 64 << 20, 64 << 20, 8 << 30]
        );
        assert_eq!(
            [(8 << 30) - 1, 9 << 30, 1 << 40].map(made_size),
            [4 << 30, 8 << 30, 8 << 30]
        );
    }

    #[tokio::test]
    async fn the_account_says_what_was_ready_and_why_what_was_not() {
        let root = tempfile::tempdir().unwrap();
        let (paths, hierarchy) = place(root.path());
        let text = "[pools]\ndisks = { high = 0 }\nnetworks = { high = 0 }\ncgroups = { high = 1 }";
        let config = Config::parse(text).unwrap().pools;
        let pools = Arc::new(Pools::filled(&paths, hierarchy.clone(), Setup::default(), &config).unwrap());
        while pools.cgroups.statistics().ready == 0 {
            tokio::task::yield_now().await;
        }
        // Files that the kernel would provide; an ordinary directory has none.
        for name in hierarchy.names() {
            std::fs::write(
                root.path().join("cgroup/thaw").join(name).join("cgroup.procs"),
                "",
            )
            .unwrap();
        }
        let (ready, late) = (Trace::new(), Trace::new());
        claimed(&pools, &ready).await;
        let account = ready.account();
        assert_eq!(account.notes["cgroup"], "was ready in its pool");
        assert!(account.reasons.is_empty());
        pools.close();
        claimed(&pools, &late).await;
        let account = late.account();
        assert!(account.notes.is_empty());
        assert_eq!(account.reasons[0].code, "cgroup-made");
        assert!(account.reasons[0].text.contains("the pool is closed"));
        let [disks, networks, cgroups] = pools.statistics();
        assert_eq!((disks.high, networks.high, cgroups.high), (0, 0, 1));
        assert_eq!((cgroups.claims, cgroups.hits), (2, 1));
    }

    #[tokio::test]
    async fn what_is_made_for_a_claim_nobody_waits_for_any_more_goes_back() {
        let root = tempfile::tempdir().unwrap();
        let (paths, hierarchy) = place(root.path());
        let pools = Arc::new(Pools::empty(&paths, hierarchy.clone(), Setup::default()));
        let trace = Trace::new();
        let mut claim = Box::pin(claimed(&pools, &trace));
        std::future::poll_fn(|context| {
            // Its thread may have made it already, or not.
            drop(claim.as_mut().poll(context));
            std::task::Poll::Ready(())
        })
        .await;
        drop(claim);
        pools.unclaimed().await;
        assert_eq!(pools.cgroups.statistics().destroyed, 1);
        assert!(hierarchy.names().is_empty());
    }
}
