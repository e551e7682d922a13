//! Thaw for containerd: its remote snapshotter, and the installation of Thaw as one of its runtimes.
//!
//! | module | noun |
//! |---|---|
//! | [`install`] | Thaw as a runtime of containerd, and that undone |
//! | [`snapshotter`] | containerd's remote snapshotter |

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod install;
pub mod snapshotter;
