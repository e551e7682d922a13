//! What containerd's shim speaks over ttrpc, generated from `protocol/proto`: messages, async clients and async server traits.
//!
//! | module | holds |
//! |---|---|
//! | [`task`], [`task_ttrpc`], [`task_types`] | `containerd.task.v2.Task`, which a shim serves |
//! | [`sandbox`], [`sandbox_ttrpc`], [`platform`], [`metrics`] | `containerd.runtime.sandbox.v1.Sandbox`, likewise |
//! | [`pod_sandbox`] | what Kubernetes says of a pod |
//! | [`task_events`], [`event`], [`events`], [`events_ttrpc`] | what a shim tells, and where |
//! | [`cgroup2`] | what a container uses |
//! | [`mount`], [`introspection`] | containerd's mounts; what a runtime says of itself |
//! | [`bootstrap`], [`runc_options`] | what a shim is started with; options of containerd's own runtime |
//! | [`runtimeoptions`] | what containerd's file says of a runtime |
//! | [`pods`], [`pods_ttrpc`] | `thaw.Pods`, which thawd serves its shims |
//!
//! containerd's packages, methods and field numbers are those of containerd 1.6 to 2.x, Kubernetes' those of its `runtime.v1`.

#![allow(
    missing_docs,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    rustdoc::all
)]

include!(concat!(env!("OUT_DIR"), "/shim/mod.rs"));

pub use protobuf::well_known_types::any::Any;
/// The empty message several methods answer with.
pub use protobuf::well_known_types::empty::Empty;
pub use protobuf::well_known_types::timestamp::Timestamp;
/// A text that is an event's whole message.
pub use protobuf::well_known_types::wrappers::StringValue;
/// What messages are made with: sub-messages are `MessageField`s.
pub use protobuf::{EnumOrUnknown, Message, MessageField};
