//! The watch cache: the current state of all sandboxes, and the last changes, in memory.
//!
//! | module | noun |
//! |---|---|
//! | [`cache`] | the sandboxes, their names and labels, their changes |
//! | [`version`] | resource versions, which grow and never repeat, not even after a restart |
//! | [`ring`] | the last changes, as many as their rate requires, within bounds |
//! | [`index`] | ids by label |
//! | [`selector`] | which sandboxes a caller wants |
//! | [`page`] | lists in pages, all as of the version of the first |
//! | [`watcher`] | a caller that follows the changes |
//!
//! Invariants: reads never touch a disk or a VMM; a list plus the changes after its version equals the next list; a caller costs only a
//! cursor, however slow it is. A caller that is too slow gets an error.

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
