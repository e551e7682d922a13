//! The handlers that create sandboxes.
//!
//! Invariant: a field that asks for something this node does not do is refused, never ignored.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thaw_protocol::api::{CreateSandbox, CreatedSandbox, NetworkPolicy, OnTimeout, ThawSandbox};
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::state::Behalf;

use super::extract::Body;
use super::failure::Failure;
use super::found::{Found, find};
use super::network::Network;
use super::notes::Notes;
use super::service::Service;
use super::template::Source;
use super::whole_id::Tag;
use crate::api::check;
use crate::api::extract::Key;
use crate::api::peer::Peer;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::sandboxes::{behalf, encoded, traced};
use crate::api::scope::Scope;
use crate::metrics::How;

/// The timeout of a sandbox whose request names none, seconds, in the first version of the API.
pub const FIRST_TIMEOUT_S: u32 = 15;
/// The same in the second.
pub const SECOND_TIMEOUT_S: u32 = 300;

/// A request for a sandbox.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NewSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    /// Seconds.
    timeout: Option<u32>,
    /// Pause it, not delete it, when its time is over.
    auto_pause: Option<bool>,
    auto_pause_memory: Option<bool>,
    auto_resume: Option<AutoResume>,
    /// Ignored: every sandbox requires its access token.
    secure: Option<bool>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    network: Option<Network>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    mcp: Option<Value>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<Value>>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct AutoResume {
    enabled: bool,
}

/// What is remembered for a repeated request with the same idempotency key. Without the access token, which is stored nowhere.
#[derive(Debug, Deserialize, Serialize)]
struct Made {
    id: String,
    template: String,
    alias: Option<String>,
}

impl NewSandbox {
    /// Checks that it asks for nothing that this node does not do.
    fn check(&self) -> Result<(), Failure> {
        let has_volumes = self
            .volume_mounts
            .as_ref()
            .is_some_and(|mounts| !mounts.is_empty());
        let pauses_without_memory = self.auto_pause == Some(true) && self.auto_pause_memory == Some(false);
        let unsupported = [
            ("mcp", self.mcp.is_some()),
            ("iam", self.iam.is_some()),
            ("volumeMounts", has_volumes),
            ("autoPauseMemory: false", pauses_without_memory),
        ];
        match unsupported.into_iter().find(|(_, is_there)| *is_there) {
            Some((what, _)) => Err(Failure::unsupported(what)),
            None => Ok(()),
        }
    }

    /// The network policy, if the request says anything of where the sandbox may connect to.
    fn policy(&self) -> Result<Option<NetworkPolicy>, Failure> {
        let network = self.network.clone().filter(|network| !network.is_of_ports());
        if network.is_none() && self.allow_internet_access.is_none() {
            return Ok(None);
        }
        let network = network.unwrap_or_default();
        network.policy(self.allow_internet_access).map(Some)
    }

    fn notes(&self, template: &Found, home: Option<Tag>) -> Notes {
        Notes {
            template: template.id.clone(),
            alias: template.alias.clone(),
            disk_mib: template.disk_mib,
            context: template.context.clone(),
            metadata: self.metadata.clone().unwrap_or_default(),
            env: self.env_vars.clone().unwrap_or_default(),
            allow_internet_access: self.allow_internet_access,
            home,
            auto_pause: self.auto_pause == Some(true),
            auto_resume: self.auto_resume.is_some_and(|auto| auto.enabled),
            is_private: self.network.as_ref().is_some_and(Network::is_private),
        }
    }

    fn on_timeout(&self) -> OnTimeout {
        match self.auto_pause {
            Some(true) => OnTimeout::Pause,
            _ => OnTimeout::Delete,
        }
    }
}

/// The creation, checked.
enum Creation {
    Create(Box<CreateSandbox>),
    Thaw(Box<ThawSandbox>, Viewer),
}

impl Creation {
    fn new(source: Source, asked: &NewSandbox, notes: &Notes, timeout: u32) -> Result<Creation, Failure> {
        let (policy, timeout_s) = (asked.policy()?, Some(timeout.max(1)));
        Ok(match source {
            Source::Image(mut request) => {
                (request.timeout_s, request.on_timeout) = (timeout_s, asked.on_timeout());
                request.network_policy = policy;
                if let Some(container) = &mut request.container {
                    container.env = notes.environment();
                }
                check::create(&request)?;
                Creation::Create(request)
            }
            Source::Snapshot(snapshot, viewer) => {
                let broken = |e: serde_json::Error| Refusal::new(ApiCode::Broken, e);
                let thaw = serde_json::from_value(json!({"snapshot": snapshot, "timeout_s": timeout_s}));
                let mut thaw: ThawSandbox = thaw.map_err(broken)?;
                (thaw.on_timeout, thaw.network_policy) = (asked.on_timeout(), policy);
                check::thaw(&thaw)?;
                check::environment(&notes.environment())?;
                Creation::Thaw(Box::new(thaw), viewer)
            }
        })
    }

    async fn run(
        self,
        service: &Service,
        headers: &HeaderMap,
        behalf: Behalf,
    ) -> Result<CreatedSandbox, Refusal> {
        let daemon = &service.daemon;
        match self {
            Creation::Create(request) => {
                traced(daemon, How::Create, headers, daemon.create(*request, behalf)).await
            }
            Creation::Thaw(request, viewer) => {
                traced(daemon, How::Thaw, headers, daemon.thaw(*request, behalf, viewer)).await
            }
        }
    }
}

/// `POST /v2/sandboxes` and `POST /sandboxes`, which differ in the timeout of a request that names none, in seconds.
pub async fn create<const TIMEOUT_S: u32>(
    State(service): State<Arc<Service>>,
    Extension(peer): Extension<Peer>,
    scope: Scope,
    Key(key): Key,
    headers: HeaderMap,
    Body(asked): Body<NewSandbox>,
) -> Result<Response, Failure> {
    asked.check()?;
    let template = find(&service, &asked.template_id, &scope).await?;
    let home = service.members.as_ref().map(|members| members.tag());
    let notes = asked.notes(&template, home);
    let creation = Creation::new(
        template.source,
        &asked,
        &notes,
        asked.timeout.unwrap_or(TIMEOUT_S),
    )?;
    let said = encoded(&("e2b", &asked))?;
    let behalf = Behalf {
        annotations: notes.annotations()?,
        ..behalf(&peer, key, &said, false)
    };
    let asked_with = behalf.asked.clone();
    let make = || async {
        let created = creation.run(&service, &headers, behalf).await?;
        let made = Made {
            id: created.sandbox.id,
            template: notes.template.clone(),
            alias: notes.alias.clone(),
        };
        let answer = encoded(&made)?;
        if asked_with.is_some() {
            service.daemon.note_answer(&made.id, &answer);
        }
        Ok(answer)
    };
    let answer = match &asked_with {
        Some(asked) => service.daemon.answers.once(asked, Instant::now(), make).await?,
        None => make().await?,
    };
    let made: Made = serde_json::from_slice(&answer).map_err(|e| Refusal::new(ApiCode::Broken, e))?;
    let reached = service.reached(&made.id, made.template, made.alias);
    Ok((StatusCode::CREATED, Json(reached)).into_response())
}

#[cfg(test)]
#[path = "create_test.rs"]
mod tests;
