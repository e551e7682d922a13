//! Packs a directory tree as a tar stream, and unpacks one: `thaw cp` on the host, and the agent in the guest.
//!
//! Invariants: no name and no link leads out of the [`Root`] that is read or written; of an entry's header, names and extensions at most
//! [`bounded::MAX_HEADERS`] are held, and of its contents one piece.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bounded;
mod contents;
mod entry_name;
mod error;
mod pack;
mod pipe;
mod root;
mod unpack;

pub use error::Error;
pub use pack::{is_of_the_kernel, pack};
pub use pipe::{Feed, PIECE, Part, Sink};
pub use root::{Links, Root};
pub use unpack::{Unpacking, unpack};

/// The result of packing and unpacking.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod archive_test;
