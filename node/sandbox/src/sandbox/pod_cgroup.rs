//! The cgroup of a pod: the VMM of its sandbox moves into it and leaves the cgroup it was made in.

use super::pools::Claimed;
use super::{Node, Sandbox};
use crate::error::{Error, ErrorKind};
use crate::state::Record;

impl Sandbox {
    /// Moves the VMM into a cgroup, given by its path below the hierarchies' roots, and creates the cgroup if it is missing.
    /// Blocks, because a move waits for a lock of the whole host.
    pub fn enter(mut self, node: &Node, path: &str) -> Result<Sandbox, Error> {
        let unavailable = |why: &dyn std::fmt::Display| {
            let what = format!("sandbox {} cannot live in cgroup {path}: {why}", self.record.id);
            Error::new(ErrorKind::Runtime, what)
        };
        let vmm = self.record.vmm.ok_or_else(|| unavailable(&"its VMM has ended"))?;
        let cgroup = node.cgroups.make(path).map_err(|e| unavailable(&e))?;
        let cgroup = Claimed::new(cgroup, &node.pools, |p| &p.cgroups);
        let record = Record {
            cgroup: Some(path.to_owned()),
            ..self.record.clone()
        };
        // Recorded before the VMM moves in, so that whoever finds the record removes this cgroup too.
        self.resources.directory.write(&record)?;
        cgroup.add(vmm.pid).map_err(|e| unavailable(&e))?;
        self.record = record;
        if let Some(before) = &self.resources.cgroup {
            cgroup.take_from(before);
        }
        drop(self.resources.cgroup.replace(cgroup));
        Ok(self)
    }
}
