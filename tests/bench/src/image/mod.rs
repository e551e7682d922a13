//! Images: what a start costs in time and in bytes fetched, by the form the image has; what a guest's reads cost; what is
//! stored and pushed.
//!
//! The registry is Debian's docker-registry behind a proxy that carries 100 Mbit/s and answers after 5 ms; bytes are
//! counted there. `tests/bench/images` makes what it serves, before.

pub mod guest;
pub mod pivot;
pub mod starts;

/// The reports' names: starts, file systems in a guest, what is stored and pushed. Each is written when it was measured.
pub const STARTS: &str = "image";
pub const GUEST: &str = "image-guest";
pub const BYTES: &str = "image-bytes";
