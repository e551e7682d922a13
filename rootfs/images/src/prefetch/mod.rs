//! Load orders in use: recording what a run of an image reads, and prefetching in that order at a later start.
//!
//! A [`Recorder`] makes a [`LoadOrder`](crate::load_order::LoadOrder) from the accesses that a guest's root device
//! reports. `thaw image convert` can put it into a converted image. A later start prefetches in that order.

mod find;
mod journal;
mod read_ahead;
mod record;
mod saved;

pub use find::{Provenance, find};
pub use journal::Journal;
pub use read_ahead::{Ahead, Prefetch, Wanted, wanted};
pub use record::Recorder;
pub use saved::{keep, write};
