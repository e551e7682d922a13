//! ttrpc services between containerd, its shim and thawd, generated from `protocol/proto`: messages, async
//! clients and async server traits.
//!
//! | module | contents |
//! |---|---|
//! | [`task`], [`task_ttrpc`], [`task_types`] | `containerd.task.v2.Task`, served by a shim |
//! | [`sandbox`], [`sandbox_ttrpc`], [`platform`], [`metrics`] | `containerd.runtime.sandbox.v1.Sandbox`, served by a shim |
//! | [`pod_sandbox`] | Kubernetes' configuration of a pod |
//! | [`task_events`], [`event`], [`events`], [`events_ttrpc`] | events that a shim publishes, and the service that takes them |
//! | [`cgroup2`] | a container's resource usage |
//! | [`mount`], [`introspection`] | containerd's mounts; a runtime's description of itself |
//! | [`bootstrap`], [`runc_options`] | a shim's start parameters; options of containerd's own runtime |
//! | [`runtimeoptions`] | a runtime's options in containerd's configuration |
//! | [`pods`], [`pods_ttrpc`] | `thaw.Pods`, served by thawd to its shims |
//!
//! containerd's packages, methods and field numbers are those of containerd 1.6 to 2.x, Kubernetes' those of
//! its `runtime.v1`.

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
/// An event whose message is one string.
pub use protobuf::well_known_types::wrappers::StringValue;
/// Parts of generated messages: a sub-message is a `MessageField`.
pub use protobuf::{EnumOrUnknown, Message, MessageField};
