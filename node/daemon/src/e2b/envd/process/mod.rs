//! The service `process.Process`: the processes that callers run in a sandbox.
//!
//! | module | noun |
//! |---|---|
//! | [`select`] | the process that a call names |
//! | [`start`] | starting one |
//! | [`events`] | its events as a stream |
//! | [`control`] | the list, input, signals and terminal sizes |

use std::sync::Arc;

use axum::Router;

use super::open_sandbox::OpenSandboxes;
use super::rpc::{client_stream, server_stream, unary};

pub mod control;
pub mod events;
pub mod select;
pub mod start;

#[cfg(test)]
#[path = "process_test.rs"]
mod tests;

/// Its routes.
pub fn routes() -> Router<Arc<OpenSandboxes>> {
    Router::new()
        .route("/List", unary(control::list))
        .route("/Start", server_stream(start::start))
        .route("/Connect", server_stream(start::connect))
        .route("/Update", unary(control::update))
        .route("/StreamInput", client_stream(control::stream_input))
        .route("/SendInput", unary(control::send_input))
        .route("/SendSignal", unary(control::send_signal))
        .route("/CloseStdin", unary(control::close_stdin))
}
