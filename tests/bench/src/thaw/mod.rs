//! Thawing: from a claim to the first byte the guest writes, against the system calls alone and against other VMMs.
//!
//! Everything is timed by the process that claims, from just before its first system call to having read the byte.

pub mod clone;
pub mod cost;
pub mod files;
pub mod floor;
pub mod linux;
pub mod pooled_floor;
pub mod qemu;
pub mod storm;
