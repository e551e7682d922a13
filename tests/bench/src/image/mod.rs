//! Images: what a start costs in time and in bytes fetched, by the form the image has; what a guest's reads cost; what is
//! stored and pushed.
//!
//! The registry is Debian's docker-registry behind a proxy that carries 100 Mbit/s and answers after 5 ms; bytes are
//! counted there. `tests/bench/images` makes what it serves, before.

pub mod guest;
pub mod pivot;
pub mod starts;

/// The report's name.
pub const NAME: &str = "image";
