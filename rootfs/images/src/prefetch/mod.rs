//! What a run of an image read, in order, and reading it ahead the next time.
//!
//! A [`Recorder`] makes a [`LoadOrder`](crate::load_order::LoadOrder) of the accesses a guest's root device tells; `thaw image convert` puts one into a
//! converted image; a later start fetches in that order.

mod ahead;
mod find;
mod journal;
mod record;
mod saved;

pub use ahead::{Ahead, Prefetch, Wanted, wanted};
pub use find::{Provenance, find};
pub use journal::Journal;
pub use record::Recorder;
pub use saved::{keep, write};
