//! thawd's HTTP API, both ends. Types: [`thaw_protocol::api`]; for callers: docs/api.md.
//!
//! | module | noun |
//! |---|---|
//! | [`server`] | sockets and connections |
//! | [`peer`] | who is at the other end |
//! | [`router`] | the routes and their OpenAPI document |
//! | [`limits`] | how much is done at once, and for whom |
//! | [`problem`] | whatever goes wrong |
//! | [`extract`], [`check`] | what a request says, and whether it may |
//! | [`sandboxes`], [`health`], [`drain`], [`metrics`], [`usage`] | the handlers, by what they are about |
//! | [`timing`] | where the time of a creation went |
//! | [`idempotency`] | creations that happen once |
//! | [`daemon`] | what thawd holds |
//! | [`maker`] | what the API asks of the node |
//! | [`watch`] | every sandbox as it is, and the changes |
//! | [`client`] | the caller's end |

pub mod check;
pub mod client;
pub mod daemon;
pub mod drain;
pub mod extract;
#[cfg(test)]
mod fake;
pub mod health;
pub mod idempotency;
pub mod limits;
pub mod maker;
pub mod metrics;
pub mod patience;
pub mod peer;
pub mod problem;
pub mod router;
pub mod sandboxes;
pub mod server;
pub mod timing;
pub mod usage;
pub mod watch;
