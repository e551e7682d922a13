//! Requests on a node that answers as one with others: docs/scale.md.
//!
//! | module | noun |
//! |---|---|
//! | [`mark`] | the mark of a request that another node has passed on |
//! | [`calls`] | which node a call is for |
//! | [`forward`] | the way to another node |
//! | [`placement`], [`room`] | the node that a new sandbox is made on |
//! | [`lists`] | a list of the sandboxes of all nodes |
//! | [`holder`] | the node that has a sandbox |
//! | [`copying`] | copies of paused sandboxes |
//! | [`takeover`] | paused sandboxes of nodes that are gone |
//!
//! Invariant: a request that a node has passed on is answered by the node that gets it, or by one that has taken the sandbox over.

pub mod calls;
pub mod copying;
pub mod forward;
pub mod holder;
mod lists;
pub mod mark;
mod placement;
pub mod room;
pub mod takeover;
#[cfg(test)]
mod test_nodes;

#[cfg(test)]
#[path = "cluster_test.rs"]
mod tests;
