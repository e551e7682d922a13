//! What decides about a slot's packets now.

use thaw_sys::netlink::Socket;

use crate::fast::FastPath;
use crate::policy::Policy;
use crate::resolved::Resolved;

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
