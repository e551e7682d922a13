//! E2B's API for thawd's sandboxes, so that E2B's SDKs work with this node: docs/e2b.md.
//!
//! One listener serves all of it. A request that names a sandbox, in its host or in headers, goes to that sandbox; every other is for the
//! control plane, where an API key is required.
//!
//! | module | noun |
//! |---|---|
//! | [`listener`] | the TCP socket, and the layers that every request passes |
//! | [`target`], [`route`], [`proxy`] | which port of which sandbox a request is for, and the way there |
//! | [`envd`] | the protocol for processes and files in a sandbox |
//! | [`router`] | the routes of the control plane, and those of E2B's API that are not implemented |
//! | [`create`], [`sandboxes`], [`list`], [`fork`], [`snapshots`], [`templates`], [`usage`], [`logs`] | its handlers, by subject |
//! | [`service`] | what the handlers share |
//! | [`lifecycle`] | timeouts, pausing and resuming |
//! | [`template`] | what sandboxes are made from |
//! | [`network`] | where a sandbox may connect to |
//! | [`notes`] | what is kept with a sandbox's record |
//! | [`token`] | the access tokens of sandboxes |
//! | [`answer`], [`moment`] | sandboxes and times in answers |
//! | [`extract`] | parsing requests |
//! | [`failure`] | errors |

mod answer;
mod create;
pub mod envd;
mod extract;
pub mod failure;
mod fork;
mod lifecycle;
mod list;
pub mod listener;
mod logs;
mod moment;
mod network;
pub mod notes;
mod proxy;
pub mod route;
mod router;
mod sandboxes;
pub mod service;
mod snapshots;
pub mod target;
pub mod template;
mod templates;
#[cfg(test)]
mod test_api;
pub mod token;
mod usage;
