//! thawd's HTTP API, both ends. Types: [`thaw_protocol::api`]; for callers: docs/api.md.
//!
//! | module | noun |
//! |---|---|
//! | [`server`] | the unix socket, and all sockets together |
//! | [`tcp`], [`credentials`], [`tokens`], [`client_roles`] | the API over TCP, and authentication there |
//! | [`scrape`] | metrics and health over TCP, without authentication |
//! | [`listener`], [`connection_set`], [`connection`], [`http2`], [`write_timeout`] | a TCP socket, its connections, and their bounds |
//! | [`held_body`], [`body_timeout`] | what is held until an answer has been read, and how long |
//! | [`peer`], [`grant`] | the caller, and its role |
//! | [`lease`] | how long a caller may keep streams open |
//! | [`scope`] | which sandboxes a caller may reach |
//! | [`reserved`] | fields that only an administrator may set |
//! | [`router`] | the routes, the least role of each, and the OpenAPI document |
//! | [`request_gate`] | how many requests are served at once, in total and of one caller |
//! | [`unread_body`] | the rest of a body that a handler did not read |
//! | [`problem`] | errors as problem documents |
//! | [`extract`], [`check`] | parsing and validating requests |
//! | [`sandboxes`], [`listing`], [`exec`], [`life`], [`logs`], [`transfer`], [`directory`], [`images`], [`snapshots`], [`health`], [`drain`], [`metrics`], [`usage`] | the handlers, by subject |
//! | [`processes`], [`kept`] | processes that outlive who started them |
//! | [`session`], [`process`] | a process of a container, and the caller that runs it |
//! | [`files`], [`archive`] | the files of a container, and tar streams of them |
//! | [`file_stream`], [`open_watch`] | a file that is being read or written, a directory that is being watched |
//! | [`container_monitor`], [`readiness`] | the containers that the API started: output, exit, readiness |
//! | [`timing`] | where the time of a creation went |
//! | [`idempotency`] | creations that happen once |
//! | [`daemon`] | thawd's state |
//! | [`period`] | the time for which something stays as it is, for others to refer to |
//! | [`factory`] | creating sandboxes; images, templates and stored snapshots |
//! | [`machine`], [`microvm`] | a sandbox; the sandboxes of this node |
//! | [`watch`] | the current state of every sandbox, and the changes |
//! | [`client`] | the client |

pub mod archive;
pub mod body_timeout;
pub mod check;
pub mod client;
pub mod client_roles;
pub mod connection;
pub mod connection_set;
pub mod container_monitor;
pub mod credentials;
pub mod daemon;
pub mod directory;
pub mod directory_watch;
pub mod drain;
pub mod exec;
pub mod extract;
pub mod factory;
#[cfg(test)]
pub(crate) mod fake;
pub mod file_stream;
pub mod files;
#[cfg(test)]
mod fork_test;
pub mod grant;
pub mod health;
pub mod held_body;
pub mod http2;
pub mod idempotency;
pub mod images;
pub mod kept;
pub mod lease;
pub mod life;
pub mod listener;
pub mod listing;
pub mod logs;
pub mod machine;
pub mod metrics;
pub mod microvm;
pub mod open_watch;
pub mod peer;
pub mod period;
pub mod problem;
pub mod process;
pub mod processes;
pub mod quotas;
#[cfg(test)]
mod rate_limits_test;
pub mod readiness;
pub mod request_gate;
pub mod reserved;
#[cfg(test)]
mod roles_test;
pub mod router;
pub mod sandboxes;
pub mod scope;
pub mod scrape;
pub mod server;
pub mod session;
mod signal;
pub mod snapshots;
pub mod status_page;
pub mod tcp;
#[cfg(test)]
pub(crate) mod test_client;
#[cfg(test)]
mod test_document;
pub mod timing;
pub mod tokens;
pub mod transfer;
pub mod unread_body;
pub mod usage;
pub mod watch;
pub mod write_timeout;
