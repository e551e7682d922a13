//! E2B's API for thawd's sandboxes, so that E2B's SDKs work with this node: docs/e2b.md.
//!
//! One listener serves all of it. A request that names a sandbox, in its host or in headers, goes to that sandbox; every other is for the
//! control plane, where an API key is required.
//!
//! | module | noun |
//! |---|---|
//! | [`listener`] | the TCP socket, and the layers that every request passes |
//! | [`target`], [`route`], [`proxy`] | which port of which sandbox a request is for, and the way there |
//! | [`head`], [`sender`], [`places`] | what the proxy changes in a request, the connection that it sends it over, and how many there are |
//! | [`idle_connections`], [`quick_ack`] | connections that requests left for later ones, and their acknowledgements |
//! | [`envd`] | the protocol for processes and files in a sandbox |
//! | [`cluster`], [`members`] | requests for sandboxes of other nodes, and which nodes there are |
//! | [`whole_id`] | the ids of sandboxes in this API |
//! | [`router`] | the routes of the control plane, and those of E2B's API that are not implemented |
//! | [`create`], [`sandboxes`], [`list`], [`fork`], [`snapshots`], [`usage`], [`logs`] | its handlers for sandboxes and snapshots |
//! | [`templates`], [`build_calls`], [`upload_calls`], [`tags`] | its handlers for templates |
//! | [`service`] | what the handlers share |
//! | [`lifecycle`] | timeouts, pausing and resuming |
//! | [`template`], [`found`] | what sandboxes are made from, and the one that a caller names |
//! | [`builds`] | the templates that callers build |
//! | [`context`] | what processes of a template's sandboxes start with |
//! | [`network`] | where a sandbox may connect to |
//! | [`notes`] | what is kept with a sandbox's record |
//! | [`token`], [`api_key`] | the access tokens of sandboxes, and the keys of callers |
//! | [`answer`], [`moment`] | sandboxes and times in answers |
//! | [`extract`] | parsing requests |
//! | [`failure`] | errors |

mod answer;
mod api_key;
mod build_calls;
pub mod builds;
mod cluster;
pub mod context;
mod create;
pub mod envd;
mod extract;
pub mod failure;
mod fork;
mod found;
mod head;
mod idle_connections;
mod lifecycle;
mod list;
pub mod listener;
mod logs;
pub mod members;
mod moment;
mod network;
pub mod notes;
mod places;
mod proxy;
mod quick_ack;
pub mod route;
mod router;
mod sandboxes;
mod sender;
pub mod service;
mod snapshots;
mod tags;
pub mod target;
pub mod template;
mod templates;
#[cfg(test)]
mod test_api;
#[cfg(test)]
mod test_sdk;
pub mod token;
mod upload_calls;
mod usage;
pub mod whole_id;
