//! What decides about a slot's packets now.
//!
//! Invariant: after a change that fails at any step, the policy before is in force as a whole. Its connections that the change has ended stay
//! ended.

use std::net::Ipv4Addr;
use std::time::Duration;

use thaw_sys::netlink::Socket;
use thaw_sys::nft::Transaction;

use crate::Error;
use crate::fast::FastPath;
use crate::policy::Policy;
use crate::resolved::Resolved;
use crate::slot::{Change, TABLE};

pub(super) const PUT: &str = "put a network policy in force";

#[derive(Debug)]
pub(super) struct InForce {
    pub policy: Policy,
    /// A socket in the slot's namespace.
    pub filter: Socket,
    /// `None` if nftables decides every packet. With a fast path, the policy is the default one.
    pub fast: Option<FastPath>,
    /// What was resolved for the guest, if the policy has domains.
    pub resolved: Resolved,
}

impl InForce {
    /// Replaces the rules of the slot with the address `own` by those of a policy, with these resolved addresses if its domains are others,
    /// and does the `rest` of the change.
    ///
    /// # Errors
    /// Those of the rest and of the kernel.
    pub fn change<T>(
        &mut self,
        policy: &Policy,
        own: Ipv4Addr,
        kept: &[(Ipv4Addr, Duration)],
        rest: impl FnOnce(&mut InForce) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (before, after) = (self.resolved.set.clone(), policy.resolved_set());
        let is_same_set = before == after;
        let change = Change {
            policy,
            own,
            resolved: if is_same_set { &[] } else { kept },
            unused_set: None,
        };
        let put = change.transaction().commit(&mut self.filter);
        put.map_err(Error::system(PUT))?;
        let done = rest(self);
        let unused_set = if done.is_ok() { before } else { after.clone() };
        let unused_set = unused_set.filter(|_| !is_same_set);
        let is_changed = match &done {
            Ok(_) => {
                self.remove_unused(unused_set);
                true
            }
            Err(_) => !self.undo(own, unused_set),
        };
        if is_changed {
            if !is_same_set {
                self.resolved.replace(after, kept);
            }
            self.policy = policy.clone();
        }
        done
    }

    /// Removes the set of the policy before. If that fails, its addresses are removed when their time is over.
    fn remove_unused(&mut self, set: Option<String>) {
        let Some(set) = set else { return };
        let mut removal = Transaction::new(TABLE);
        removal.delete_set(&set);
        if let Err(e) = removal.commit(&mut self.filter) {
            tracing::warn!("the resolved addresses of a replaced network policy stay for a time: {e}");
        }
    }

    /// Returns to the policy before, whose set is still there. Returns false if that fails too.
    fn undo(&mut self, own: Ipv4Addr, unused_set: Option<String>) -> bool {
        let change = Change {
            policy: &self.policy,
            own,
            resolved: &[],
            unused_set,
        };
        let undone = change.transaction().commit(&mut self.filter);
        if let Err(e) = &undone {
            tracing::error!("a network policy whose change failed cannot be undone, and is in force: {e}");
        }
        undone.is_ok()
    }
}
