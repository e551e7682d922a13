//! containerd's snapshots service, generated from `protocol/proto/containerd`: what a remote snapshotter serves over gRPC.
//!
//! Packages, methods and field numbers are those of containerd 1.6 to 2.x.

#![allow(missing_docs, clippy::all, clippy::unwrap_used, rustdoc::all)]

/// `containerd.types`.
pub mod types {
    include!(concat!(env!("OUT_DIR"), "/containerd.types.rs"));
}

/// `containerd.services`, as deep as the packages are named: generated code refers to its neighbours by that.
pub mod services {
    /// `containerd.services.snapshots`.
    pub mod snapshots {
        /// `containerd.services.snapshots.v1`.
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/containerd.services.snapshots.v1.rs"));
        }
    }
}

pub use services::snapshots::v1::*;
