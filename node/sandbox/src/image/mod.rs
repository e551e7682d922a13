//! What a node does with images besides running them: recordings of what a run read, what a pull came to, indexes and
//! conversions.

pub mod account;
pub mod convert;
pub mod destination;
pub mod index;
pub mod record;
