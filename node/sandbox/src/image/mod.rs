//! Operations on images besides running them: recordings of reads, summaries of pulls, indexes and conversions.

pub mod account;
pub mod convert;
pub mod destination;
pub mod index;
pub mod record;
