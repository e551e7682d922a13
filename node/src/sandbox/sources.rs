//! Where the parts of a sandbox come from: claimed, and told why where somebody had to wait for one to be made.

use thaw_pools::cgroup::{Cgroups, Hierarchy};
use thaw_pools::disk::Disks;
use thaw_pools::network::Networks;
use thaw_pools::resource::{Claim, Kind, Source};

use crate::paths::Paths;
use crate::trace::Trace;

/// One source a kind.
#[derive(Debug)]
pub struct Sources {
    pub disks: Source<Disks>,
    pub networks: Source<Networks>,
    pub cgroups: Source<Cgroups>,
}

impl Sources {
    /// With nothing ready.
    pub fn new(paths: &Paths, hierarchy: Hierarchy) -> Sources {
        Sources {
            disks: Source::new(Disks {
                directory: paths.disks(),
            }),
            networks: Source::new(Networks),
            cgroups: Source::new(Cgroups { hierarchy }),
        }
    }
}

/// The resource of a claim; if it was not ready, the start's account says why.
pub(super) fn taken<K: Kind>(_: &Source<K>, claim: Claim<K::Resource>, trace: &Trace) -> K::Resource {
    if let Some(slow) = claim.slow {
        let (kind, took) = (K::NAME, claim.took.as_secs_f64() * 1e3);
        let text = format!("no {kind} was ready ({slow}): one was made now, in {took:.1} ms");
        trace.reason(&format!("{kind}-made"), &text);
    }
    claim.resource
}
