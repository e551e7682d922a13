//! The agent's ttrpc API, generated from `protocol/proto`: messages, async clients and async server traits.
//!
//! Package, service, method and field numbers are those of Kata Containers 3.15.0, so that either side may be Kata's.
//! `docs/agent-api.md` says what Thaw's agent makes of each method, and the calls of a container's life.
//!
//! | module | holds |
//! |---|---|
//! | [`agent`] | requests and responses of `grpc.AgentService` |
//! | [`agent_ttrpc`] | `AgentServiceClient`, the `AgentService` trait, `create_agent_service` |
//! | [`health`], [`health_ttrpc`] | the same for `grpc.Health` |
//! | [`oci`] | the OCI runtime specification as messages |
//! | [`types`] | interfaces, routes, neighbours |
//! | [`csi`] | volume statistics |
//! | [`files`], [`files_ttrpc`] | `thaw.Files`, which is Thaw's own |
//! | [`readiness`], [`readiness_ttrpc`] | `thaw.Readiness`, likewise |
//! | [`answers`] | what may come from a guest's agent |
//! | [`layout`] | where a guest has what its containers share |

#![allow(
    missing_docs,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    rustdoc::all
)]

include!(concat!(env!("OUT_DIR"), "/agent/mod.rs"));

pub mod answers;
pub mod layout;

/// The empty message several methods answer with.
pub use protobuf::well_known_types::empty::Empty;
/// What messages are made with: sub-messages are `MessageField`s.
pub use protobuf::{EnumOrUnknown, Message, MessageField};

#[cfg(test)]
#[path = "agent_test.rs"]
mod tests;

#[cfg(test)]
#[path = "kata_test.rs"]
mod kata;
