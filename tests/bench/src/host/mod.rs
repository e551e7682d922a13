//! What many VMMs that end together do to their host, with tiny guests.

pub mod filters;
pub mod health;
