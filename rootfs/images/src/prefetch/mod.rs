//! What a run of an image read, in order, and reading it ahead the next time.
//!
//! A [`Recorder`] makes a [`LoadOrder`] of the accesses a guest's root device tells; `thaw image convert` puts one into a
//! converted image; a later start fetches in that order.

mod ahead;
mod find;
mod journal;
mod order;
mod record;
mod saved;

pub use ahead::{Ahead, Prefetch, Wanted, wanted};
pub use find::{Provenance, find};
pub use journal::Journal;
pub use order::{LoadOrder, MAX_DOCUMENT, OrderedBlob, Run};
pub use record::Recorder;
pub use saved::{keep, write};
