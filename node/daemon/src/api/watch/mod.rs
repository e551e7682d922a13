//! The watch cache: every sandbox as it is now, and the last changes, in memory.
//!
//! | module | noun |
//! |---|---|
//! | [`cache`] | the objects, their names and labels, what changed |
//! | [`version`] | resource versions: they grow, and none comes twice, not even after a restart |
//! | [`ring`] | the last changes, as many as the rate of change asks for, within bounds |
//! | [`index`] | ids by label |
//! | [`selector`] | which objects a caller wants |
//! | [`page`] | lists in pieces, each as of the version the first began at |
//! | [`watcher`] | one caller that follows the changes |
//!
//! Invariants: reads never touch a disk or ask a VMM; a list and the changes after its version are the next list; no caller
//! has memory here but a cursor, so however slow it is, it holds nothing: it is told that it is too late.

pub mod cache;
pub mod index;
pub mod page;
pub mod ring;
pub mod selector;
pub mod version;
pub mod watcher;

pub use cache::{Cache, Counts, Gone};
pub use page::{Page, Query};
pub use selector::Selector;
pub use version::Versions;
pub use watcher::Watcher;
