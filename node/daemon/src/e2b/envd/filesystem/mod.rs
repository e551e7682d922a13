//! The service `filesystem.Filesystem`: the files of a sandbox's container, as its root user sees them.
//!
//! | module | noun |
//! |---|---|
//! | [`entry`] | what is said of a file |
//! | [`list`] | looking at a file, and listing directories |
//! | [`change`] | making, moving and removing files |
//! | [`watch`] | what happens in a directory |

use std::sync::Arc;

use axum::Router;

use super::open_sandbox::OpenSandboxes;
use super::rpc::{server_stream, unary};

pub mod change;
pub mod entry;
pub mod list;
pub mod watch;

#[cfg(test)]
#[path = "filesystem_test.rs"]
mod tests;

/// Its routes.
pub fn routes() -> Router<Arc<OpenSandboxes>> {
    Router::new()
        .route("/Stat", unary(list::stat))
        .route("/ListDir", unary(list::list))
        .route("/MakeDir", unary(change::make))
        .route("/Move", unary(change::rename))
        .route("/Remove", unary(change::remove))
        .route("/WatchDir", server_stream(watch::watch))
        .route("/CreateWatcher", unary(watch::create))
        .route("/GetWatcherEvents", unary(watch::events))
        .route("/RemoveWatcher", unary(watch::remove))
}
