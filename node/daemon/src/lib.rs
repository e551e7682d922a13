//! thawd: the sandboxes of a node behind an HTTP API, and behind the API of containerd's shim.
//!
//! | module | noun |
//! |---|---|
//! | [`api`] | thawd's HTTP API, both ends |
//! | [`e2b`] | what clients of E2B speak to |
//! | [`exit`] | exit codes, their meanings and remedies |
//! | [`pods`] | the API for containerd's shim |
//! | [`metrics`] | thawd's metrics |
//! | [`spans`] | creations as OpenTelemetry spans |
//! | [`service`] | notifications to systemd |

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod api;
pub mod e2b;
pub mod exit;
pub mod metrics;
pub mod pods;
pub mod service;
pub mod spans;
