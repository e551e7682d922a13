//! What all handlers of E2B's API share: the sandboxes of thawd, and what the configuration says of this API.

use std::sync::Arc;

use thaw_protocol::api::Sandbox;
use thaw_sandbox::id;

use super::failure::Failure;
use super::notes::Notes;
use super::target::Domain;
use super::template::Templates;
use super::token::AccessTokens;
use crate::api::daemon::Daemon;
use crate::api::scope::Wanted;

/// See the module.
#[derive(Debug)]
pub struct Service {
    pub daemon: Arc<Daemon>,
    pub tokens: AccessTokens,
    pub templates: Templates,
    pub domain: Option<Domain>,
}

impl Service {
    /// A sandbox that is running or paused, which are E2B's two states. Others do not exist.
    ///
    /// # Errors
    /// There is none with this id in the caller's scope. Names are not ids.
    pub fn living(&self, wanted: &Wanted) -> Result<Arc<Sandbox>, Failure> {
        let found = self.daemon.cache.find(wanted).filter(|_| id::is_id(&wanted.text));
        found
            .filter(|found| is_living(found))
            .ok_or_else(|| Failure::no_sandbox(&wanted.text))
    }

    /// A running sandbox.
    ///
    /// # Errors
    /// See [`Service::living`]; or it is paused.
    pub fn running(&self, wanted: &Wanted) -> Result<Arc<Sandbox>, Failure> {
        let sandbox = self.living(wanted)?;
        match is_paused(&sandbox) {
            true => Err(Failure::Conflict(format!(
                "sandbox {} is paused: connect to it first",
                sandbox.id
            ))),
            false => Ok(sandbox),
        }
    }

    /// What this API knows of a sandbox. One that thawd's own API created has a template named as its image.
    pub fn notes(&self, sandbox: &Sandbox) -> Notes {
        self.own_notes(&sandbox.id).unwrap_or_else(|| Notes {
            template: sandbox.image.clone(),
            ..Notes::default()
        })
    }

    /// What this API knows of a sandbox that it created, or of a clone of one.
    pub fn own_notes(&self, id: &str) -> Option<Notes> {
        let notes = self.daemon.read_record(id, |record| Notes::of(&record.terms));
        notes.flatten()
    }
}

/// Whether a sandbox exists in E2B's API. One whose container is started again counts as running.
pub fn is_living(sandbox: &Sandbox) -> bool {
    ["running", "restarting", PAUSED].contains(&sandbox.state.as_str())
}

/// The state of a paused sandbox.
const PAUSED: &str = "paused";

/// Whether a sandbox is paused.
pub fn is_paused(sandbox: &Sandbox) -> bool {
    sandbox.state == PAUSED
}
