//! A node whose guests are a few instructions long: thawd as it is shipped, over a directory of its own, making sandboxes of
//! a `bare` template wherever /dev/kvm opens (or of the real guest, for what is measured with both); and a count of
//! everything it has on the host.
//!
//! | module | noun |
//! |---|---|
//! | [`place`] | the directory: a kernel, an image, thawd's data |
//! | [`daemon`] | a thawd over it |
//! | [`asked`] | a request to it, and its answer if there is one |
//! | [`callers`] | requests to it on behalf of tenants |
//! | [`e2b`] | several that answer E2B's API as one, and requests to them |
//! | [`counts`] | what exists of it, as the kernel and the disk see it |
//! | [`kernel`] | what the kernel has of each kind of object, for all processes together |

// A test helper that cannot do its work must fail the test at once, where it happened.
#![allow(clippy::unwrap_used)]

pub mod asked;
pub mod callers;
pub mod counts;
pub mod daemon;
pub mod e2b;
pub mod kernel;
pub mod place;

pub use counts::Counts;
pub use daemon::Thawd;
pub use place::{Linux, Place, make_image, without_limits};
