//! E2B's in-sandbox protocol ("envd"), served by thawd for each sandbox (docs/e2b-sandbox.md).
//!
//! The guest knows nothing of it: each call becomes calls of the guest's agent, through what the daemon has for its own API.
//!
//! | module | noun |
//! |---|---|
//! | [`access`], [`signature`] | who may use a sandbox, and signed URLs |
//! | [`open_sandbox`] | what thawd keeps for a sandbox whose protocol is in use, and its bounds |
//! | [`call`] | one call: the sandbox, the user, the deadline |
//! | [`failure`] | errors |
//! | [`accounts`], [`paths`] | the users of a container, and paths as callers write them |
//! | [`connect`] | the Connect protocol: codecs, frames, errors |
//! | [`rpc`] | functions as the routes of a Connect service |
//! | [`process`], [`relay`] | the service of processes, and the processes whose output is relayed |
//! | [`filesystem`], [`watcher`] | the service of files, and the watches whose events are asked for |
//! | [`http`] | file transfers and the sandbox's condition over plain HTTP |

use std::sync::Arc;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};

use crate::api::daemon::Daemon;
use crate::api::unread_body::read_rest;
use open_sandbox::OpenSandboxes;

pub mod access;
pub mod accounts;
pub mod call;
pub mod connect;
pub mod failure;
pub mod filesystem;
pub mod http;
pub mod open_sandbox;
pub mod paths;
pub mod process;
pub mod relay;
pub mod rpc;
pub mod signature;
pub mod watcher;

#[cfg(test)]
mod local_files;
#[cfg(test)]
pub mod local_guest;
#[cfg(test)]
mod sdk_test;
#[cfg(test)]
mod test_client;

/// The version of the protocol that is served. Clients use only what it has: entry information in watch events since 0.6.3, watches of
/// network mounts since 0.6.4.
pub const VERSION: &str = "0.6.4";

/// The routes. Each request must have the extensions [`access::ForSandbox`] and [`access::Access`]; it is refused
/// otherwise.
pub fn router(daemon: Arc<Daemon>) -> Router {
    let open = Arc::new(OpenSandboxes::new(daemon));
    Router::new()
        .nest("/process.Process", process::routes())
        .nest("/filesystem.Filesystem", filesystem::routes())
        .merge(http::routes())
        .fallback(failure::no_such_route)
        .layer(from_fn_with_state(open.clone(), access::admit))
        .layer(from_fn(read_rest))
        .with_state(open)
}
