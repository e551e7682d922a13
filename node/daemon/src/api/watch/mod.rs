//! The watch caches: the current state of all sandboxes and of all stored snapshots, and the last changes, in memory.
//!
//! | module | noun |
//! |---|---|
//! | [`cache`] | the sandboxes, their names and labels, their changes |
//! | [`snapshots`] | the stored snapshots and their changes |
//! | [`watched`] | the kinds of objects that callers can watch |
//! | [`source`] | what a watch follows: either cache |
//! | [`version`] | resource versions, which grow and never repeat, not even after a restart |
//! | [`ring`] | the last changes, as many as their rate requires, within bounds |
//! | [`index`] | ids by label |
//! | [`selector`] | which sandboxes or snapshots a caller wants |
//! | [`page`] | lists in pages, all as of the version of the first |
//! | [`watcher`] | a caller that follows the changes |
//!
//! Invariants: reads of sandboxes never touch a disk or a VMM; a list plus the changes after its version equals the next list; a caller
//! costs only a cursor, however slow it is. A caller that is too slow gets an error.

pub mod cache;
pub mod index;
pub mod page;
pub mod ring;
pub mod selector;
pub mod snapshots;
pub mod source;
pub mod version;
pub mod watched;
pub mod watcher;

pub use cache::{Cache, Counts};
pub use page::{Page, Query};
pub use ring::Gone;
pub use selector::Selector;
pub use snapshots::SnapshotCache;
pub use source::Source;
pub use version::Versions;
pub use watcher::Watcher;
