//! The agent's ttrpc API, generated from `protocol/proto`: messages, async clients and async server traits.
//!
//! Packages, services, methods and field numbers are those of Kata Containers 3.15.0, so that either side may
//! be Kata's. `docs/agent-api.md` describes each method and the calls of a container's life.
//!
//! | module | contents |
//! |---|---|
//! | [`agent`] | requests and responses of `grpc.AgentService` |
//! | [`agent_ttrpc`] | `AgentServiceClient`, the `AgentService` trait, `create_agent_service` |
//! | [`health`], [`health_ttrpc`] | the same for `grpc.Health` |
//! | [`oci`] | the OCI runtime specification as messages |
//! | [`types`] | interfaces, routes, neighbours |
//! | [`csi`] | volume statistics |
//! | [`files`], [`files_ttrpc`] | `thaw.Files`, Thaw's own service |
//! | [`hooks`], [`hooks_ttrpc`] | `thaw.Hooks`, Thaw's own service |
//! | [`mounts`], [`mounts_ttrpc`] | `thaw.Mounts`, Thaw's own service |
//! | [`processes`], [`processes_ttrpc`] | `thaw.Processes`, Thaw's own service |
//! | [`readiness`], [`readiness_ttrpc`] | `thaw.Readiness`, Thaw's own service |
//! | [`capabilities`] | the names of capabilities |
//! | [`answers`] | a bounded reader of a guest agent's answers |
//! | [`annotations`] | a container's annotations that the agent reads |
//! | [`layout`] | paths and mounts that all containers of a guest share |
//! | [`seccomp`] | the words of a seccomp section that the agent accepts |

#![allow(
    missing_docs,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    rustdoc::all
)]

include!(concat!(env!("OUT_DIR"), "/agent/mod.rs"));

pub mod annotations;
pub mod answers;
pub mod capabilities;
pub mod layout;
pub mod seccomp;

/// The empty response of several methods.
pub use protobuf::well_known_types::empty::Empty;
/// Parts of generated messages: a sub-message is a `MessageField`.
pub use protobuf::{EnumOrUnknown, Message, MessageField};

#[cfg(test)]
#[path = "agent_test.rs"]
mod tests;

#[cfg(test)]
#[path = "kata_test.rs"]
mod kata;
