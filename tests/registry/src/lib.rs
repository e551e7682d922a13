//! What tests and benchmarks put between Thaw and a registry, and the forms of images they put into it.
//!
//! [`proxy`] is the network: so many bits a second, so long a round trip, every byte counted, and faults on demand.
//! [`memory`] is a registry itself, for what needs no other: one can push to it, and have it lie.
//! [`estargz`] and [`frames`] write forms whose usual tools are not at hand where tests run; [`padded`] makes an image large.

// A test helper that cannot do its work must fail the test at once, where it happened.
#![allow(clippy::unwrap_used)]

pub mod estargz;
pub mod frames;
pub mod image;
pub mod memory;
pub mod padded;
pub mod proxy;
