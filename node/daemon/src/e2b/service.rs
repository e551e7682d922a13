//! What all handlers of E2B's API share: the sandboxes of thawd, and what the configuration says of this API.

use std::sync::Arc;

use thaw_protocol::api::Sandbox;
use thaw_sandbox::id;

use super::builds::engine::Builds;
use super::failure::Failure;
use super::members::{Members, Owner};
use super::notes::Notes;
use super::target::Domain;
use super::template::{BUILD_LABEL, Templates};
use super::token::AccessTokens;
use super::whole_id::{Tag, WholeId};
use crate::api::daemon::Daemon;
use crate::api::problem::Refusal;
use crate::api::scope::Wanted;

/// See the module.
#[derive(Debug)]
pub struct Service {
    pub daemon: Arc<Daemon>,
    pub tokens: AccessTokens,
    pub templates: Templates,
    pub builds: Arc<Builds>,
    pub domain: Option<Domain>,
    /// Whether callers connect with TLS.
    pub is_encrypted: bool,
    /// The nodes that answer as one with this node. `None`: it answers alone.
    pub members: Option<Arc<Members>>,
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

    /// Finishes `work` even if the caller hangs up.
    ///
    /// # Errors
    /// Those of the work.
    pub async fn finish<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, Failure> {
        let done = async move { Ok::<_, Refusal>(work.await) };
        self.daemon.finish(done).await?
    }

    /// The id in this API of a sandbox of this node, of which this API knows these notes.
    pub fn whole_id(&self, id: &str, notes: Option<&Notes>) -> WholeId {
        let own = self.members.as_ref().map(|members| members.tag());
        let home = notes.and_then(|notes| notes.home);
        WholeId {
            id: id.to_owned(),
            home: own.map(|own| home.unwrap_or(own)),
        }
    }

    /// Which node has the sandbox of an id that names this node.
    pub fn owner(&self, home: Option<Tag>) -> Owner {
        let members = self.members.as_ref();
        members.map_or(Owner::Here, |members| members.owner(home))
    }

    /// What this API knows of a sandbox. One that thawd's own API created has a template named as its image.
    pub fn notes(&self, sandbox: &Sandbox) -> Notes {
        self.own_notes(&sandbox.id).unwrap_or_else(|| Notes {
            template: sandbox.image.clone(),
            ..Notes::default()
        })
    }

    /// Whether this API created a sandbox, or the one that it is a clone of. Each request to a port asks this, so the notes are not read.
    pub fn is_own(&self, id: &str) -> bool {
        let is_own = self.daemon.read_record(id, |record| Notes::are_in(&record.terms));
        is_own == Some(true)
    }

    /// What this API knows of a sandbox that it created, or of a clone of one.
    pub fn own_notes(&self, id: &str) -> Option<Notes> {
        let notes = self.daemon.read_record(id, |record| Notes::of(&record.terms));
        notes.flatten()
    }
}

/// Whether a sandbox exists in E2B's API. One whose container is started again counts as running; that of a build does not exist.
pub fn is_living(sandbox: &Sandbox) -> bool {
    let is_there = ["running", "restarting", PAUSED].contains(&sandbox.state.as_str());
    is_there && !sandbox.labels.contains_key(BUILD_LABEL)
}

/// The state of a paused sandbox.
const PAUSED: &str = "paused";

/// Whether a sandbox is paused.
pub fn is_paused(sandbox: &Sandbox) -> bool {
    sandbox.state == PAUSED
}
