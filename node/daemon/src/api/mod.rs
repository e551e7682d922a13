//! thawd's HTTP API, both ends. Types: [`thaw_protocol::api`]; for callers: docs/api.md.
//!
//! | module | noun |
//! |---|---|
//! | [`server`] | sockets and connections |
//! | [`tcp`], [`credentials`], [`tokens`], [`client_roles`] | the same over TCP, and who may ask there |
//! | [`listener`] | a TCP socket and its connections |
//! | [`peer`], [`grant`] | the caller, and what it may do |
//! | [`lease`] | how long it may keep what it has open |
//! | [`scope`] | which sandboxes it may reach |
//! | [`reserved`] | what only an administrator may say |
//! | [`router`] | the routes, which role each takes, and their OpenAPI document |
//! | [`scrape`] | metrics and health for callers without access to the API |
//! | [`limits`] | how much is done at once, and for whom |
//! | [`rest`] | what comes of a body after its answer |
//! | [`problem`] | whatever goes wrong |
//! | [`extract`], [`check`] | what a request says, and whether it may |
//! | [`sandboxes`], [`exec`], [`logs`], [`transfer`], [`stock`], [`health`], [`drain`], [`metrics`], [`usage`] | the handlers, by what they are about |
//! | [`session`], [`process`] | a process of a container, and who attends it |
//! | [`files`] | the files of a container |
//! | [`attendance`], [`readying`] | containers thawd itself attends, and waits for |
//! | [`timing`] | where the time of a creation went |
//! | [`idempotency`] | creations that happen once |
//! | [`daemon`] | what thawd holds |
//! | [`maker`], [`machine`], [`microvm`] | what the API asks of the node, and of a sandbox; the sandboxes of this node |
//! | [`watch`] | every sandbox as it is, and the changes |
//! | [`client`] | the caller's end |

#[cfg(test)]
mod asking;
pub mod attendance;
pub mod check;
pub mod client;
pub mod client_roles;
pub mod credentials;
pub mod daemon;
pub mod drain;
pub mod exec;
pub mod extract;
#[cfg(test)]
pub(crate) mod fake;
pub mod files;
#[cfg(test)]
mod fork_test;
pub mod grant;
pub mod health;
pub mod idempotency;
pub mod lease;
pub mod limits;
pub mod listener;
pub mod logs;
pub mod machine;
pub mod maker;
pub mod metrics;
pub mod microvm;
pub mod patience;
pub mod peer;
pub mod problem;
pub mod process;
#[cfg(test)]
mod rate_limits_test;
pub mod readying;
pub mod reserved;
pub mod rest;
#[cfg(test)]
mod roles_test;
pub mod router;
pub mod sandboxes;
pub mod scope;
pub mod scrape;
pub mod server;
pub mod session;
pub mod stock;
pub mod tcp;
pub mod timing;
pub mod tokens;
pub mod transfer;
pub mod usage;
pub mod watch;
