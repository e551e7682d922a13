//! Sandboxes as E2B's API describes them.

use std::collections::BTreeMap;

use serde::Serialize;
use thaw_protocol::api::{Egress, OnTimeout, Sandbox};

use super::moment;
use super::network::Network;
use super::notes::Notes;
use super::service::{Service, is_paused};
use super::whole_id::WholeId;

/// The version of the protocol for processes and files, by which clients know what it can do: since 0.4.0 a client may leave out the user,
/// since 0.5.7 it sends a file as it is, since 0.6.2 files have metadata, and since 0.6.4 network mounts can be watched.
pub const ENVD_VERSION: &str = super::envd::VERSION;
/// The id of the node in answers, which clients ignore.
const CLIENT: &str = "thaw";

/// Which sandbox an answer describes, and what it is made from.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Named {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    envd_version: &'static str,
}

impl Named {
    fn new(id: &WholeId, template: String, alias: Option<String>) -> Named {
        Named {
            template_id: template,
            sandbox_id: id.to_string(),
            client_id: CLIENT,
            alias,
            envd_version: ENVD_VERSION,
        }
    }
}

/// A sandbox that was created, resumed or connected to: what a client needs to reach it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reached {
    #[serde(flatten)]
    named: Named,
    envd_access_token: String,
    /// If its ports are private.
    traffic_access_token: Option<String>,
    domain: Option<String>,
}

/// A sandbox in a list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    #[serde(flatten)]
    named: Named,
    started_at: String,
    end_at: String,
    cpu_count: u8,
    #[serde(rename = "memoryMB")]
    memory_mib: u32,
    #[serde(rename = "diskSizeMB")]
    disk_mib: u32,
    state: &'static str,
    metadata: BTreeMap<String, String>,
}

/// A sandbox with all that is known of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Detail {
    #[serde(flatten)]
    listed: Listed,
    envd_access_token: String,
    domain: Option<String>,
    allow_internet_access: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Network>,
    lifecycle: Lifecycle,
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_mode: Option<&'static str>,
}

/// What happens when a sandbox's time is over, and when it is asked for while it is paused.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    auto_resume: bool,
    on_timeout: &'static str,
}

impl Service {
    /// What a client needs to reach a sandbox.
    pub fn reached(&self, id: &str, template: String, alias: Option<String>) -> Reached {
        let notes = self.own_notes(id);
        let is_private = notes.as_ref().is_some_and(|notes| notes.is_private);
        Reached {
            named: Named::new(&self.whole_id(id, notes.as_ref()), template, alias),
            envd_access_token: self.tokens.access_token(id),
            traffic_access_token: is_private.then(|| self.tokens.traffic_token(id)),
            domain: self.domain(),
        }
    }

    /// The same for one that exists.
    pub fn reached_again(&self, sandbox: &Sandbox) -> Reached {
        let notes = self.notes(sandbox);
        self.reached(&sandbox.id, notes.template, notes.alias)
    }

    /// A sandbox with all that is known of it.
    pub fn detail(&self, sandbox: &Sandbox) -> Detail {
        let notes = self.notes(sandbox);
        let policy = sandbox.network.as_ref().map(|network| &network.policy);
        let is_denied = policy.is_some_and(|policy| policy.default == Egress::Deny);
        Detail {
            envd_access_token: self.tokens.access_token(&sandbox.id),
            domain: self.domain(),
            // The policy may have been changed since.
            allow_internet_access: match is_denied {
                true => Some(false),
                false => notes.allow_internet_access.filter(|is_allowed| *is_allowed),
            },
            network: Network::shown(policy, notes.is_private),
            lifecycle: Lifecycle {
                auto_resume: notes.auto_resume,
                on_timeout: match sandbox.on_timeout {
                    OnTimeout::Delete => "kill",
                    OnTimeout::Pause => "pause",
                },
            },
            pause_mode: is_paused(sandbox).then_some("full"),
            listed: self.listed(sandbox, notes),
        }
    }

    /// A sandbox in a list.
    pub fn listed(&self, sandbox: &Sandbox, notes: Notes) -> Listed {
        Listed {
            named: Named::new(
                &self.whole_id(&sandbox.id, Some(&notes)),
                notes.template,
                notes.alias,
            ),
            started_at: moment::of_seconds(sandbox.created),
            end_at: moment::of_end(sandbox.ends_at),
            cpu_count: sandbox.cpus,
            memory_mib: sandbox.memory_mib,
            disk_mib: notes.disk_mib.unwrap_or_default(),
            state: if is_paused(sandbox) { "paused" } else { "running" },
            metadata: notes.metadata,
        }
    }

    fn domain(&self) -> Option<String> {
        self.domain.as_ref().map(|domain| domain.as_str().to_owned())
    }
}
