//! What `make bench-alternatives` measures: mechanisms that do one job in two ways, in turn, on this machine's own KVM with tiny guests.
//!
//! | module | job | ways |
//! |---|---|---|
//! | [`memory`] | gives a thawed machine its memory | mapped file; mapped and populated; filled over userfaultfd(2) |
//! | [`owners`] | owns the sandbox of `thaw run` | its own process; a thawd that runs; a thawd that is started for it |

pub mod memory;
pub mod owners;
