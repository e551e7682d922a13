//! containerd's snapshots service, generated from `protocol/proto/containerd`. A remote snapshotter serves it
//! over gRPC.
//!
//! Packages, methods and field numbers are those of containerd 1.6 to 2.x.

#![allow(missing_docs, clippy::all, clippy::unwrap_used, rustdoc::all)]

/// `containerd.types`.
pub mod types {
    include!(concat!(env!("OUT_DIR"), "/containerd.types.rs"));
}

/// `containerd.services`. The modules nest as the packages do, because generated code refers to other
/// packages by relative path.
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
