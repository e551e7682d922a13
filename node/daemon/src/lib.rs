//! thawd: the sandboxes of a node behind an HTTP API, and behind the API of containerd's shim.
//!
//! | module | noun |
//! |---|---|
//! | [`api`] | thawd's HTTP API, both ends |
//! | [`exit`] | exit codes: what each means, and what to do about it |
//! | [`pods`] | what thawd does for containerd's shim |
//! | [`metrics`] | what thawd counts |
//! | [`spans`] | creations as OpenTelemetry spans |
//! | [`service`] | what systemd is told of thawd |

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod api;
pub mod exit;
pub mod metrics;
pub mod pods;
pub mod service;
pub mod spans;
