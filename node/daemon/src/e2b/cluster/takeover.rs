//! Paused sandboxes of a node that is no member any more, of which a registry has [copies](super::copying). The node that a caller asks to resume
//! one takes it over. The one that a caller asks to delete it claims it, so that no node takes it over.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use axum::extract::Request;
use axum::http::Method;
use thaw_sandbox::CopyPlace;
use thaw_sandbox::error::ErrorKind;
use thaw_sys::lock::Lock;

use super::super::failure::Failure;
use super::super::service::Service;
use super::super::whole_id::WholeId;
use crate::api::problem::Refusal;
use crate::api::scope::Scope;

/// For one takeover of a sandbox at a time.
type Turn = Arc<tokio::sync::Mutex<()>>;

/// The takeovers in progress, by id: of several requests for one sandbox, one takes it over.
#[derive(Clone, Debug, Default)]
pub struct Takeovers(Arc<Mutex<HashMap<String, Turn>>>);

/// A takeover, or one that waits for its turn. The last of a sandbox removes the sandbox's entry.
struct Taking {
    all: Takeovers,
    id: String,
    turn: Turn,
}

impl Drop for Taking {
    fn drop(&mut self) {
        let mut all = self.all.0.locked();
        drop(std::mem::take(&mut self.turn));
        if all.get(&self.id).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            all.remove(&self.id);
        }
    }
}

impl Takeovers {
    fn begin(&self, id: &str) -> Taking {
        Taking {
            all: self.clone(),
            id: id.to_owned(),
            turn: self.0.locked().entry(id.to_owned()).or_default().clone(),
        }
    }

    /// Takes a paused sandbox over from its copy, if there are copies, for a caller of this scope. Without a copy that the caller reaches
    /// nothing happens.
    ///
    /// # Errors
    /// The registry failed, or this node has no room for the sandbox's files.
    pub async fn take(&self, service: &Service, whole: &WholeId, scope: &Scope) -> Result<(), Failure> {
        let (daemon, id, viewer) = (service.daemon.clone(), whole.id.clone(), scope.viewer());
        let take = move |place: CopyPlace| async move { daemon.take_paused(&id, &place, &viewer).await };
        self.alone(service, whole, take).await.map(drop)
    }

    /// Deletes a paused sandbox by its copy, if there are copies, for a caller of this scope. Returns whether it was deleted: there is no
    /// copy that the caller reaches, or this node has taken the sandbox over meanwhile.
    ///
    /// # Errors
    /// The registry failed. The call can be repeated.
    pub async fn discard(&self, service: &Service, whole: &WholeId, scope: &Scope) -> Result<bool, Failure> {
        let (daemon, id, viewer) = (service.daemon.clone(), whole.id.clone(), scope.viewer());
        let discard = move |place: CopyPlace| async move { daemon.discard_copy(&id, &place, &viewer).await };
        let discarded = self.alone(service, whole, discard).await?;
        Ok(discarded == Some(true))
    }

    /// Does something with the copy of a sandbox while no other call here does, and to its end. `None`: there is no copy.
    async fn alone<T, W>(
        &self,
        service: &Service,
        whole: &WholeId,
        work: impl FnOnce(CopyPlace) -> W,
    ) -> Result<Option<T>, Failure>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, Refusal>> + Send + 'static,
    {
        let members = service.members.as_ref();
        let Some(place) = members.and_then(|members| members.copy_place(whole)) else {
            return Ok(None);
        };
        let work = work(place);
        let taking = self.begin(&whole.id);
        let alone = taking.turn.clone().lock_owned().await;
        let done = async move {
            // The turn lasts as long as the work, also if the caller hangs up, and ends before the entry is removed.
            let _turn = (alone, taking);
            Ok::<_, Failure>(work.await?)
        };
        match service.finish(done).await {
            Ok(done) => Ok(Some(done)),
            Err(Failure::Refused(refusal)) if has_no_copy(&refusal) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// Whether there is no copy of a sandbox for the caller, or another node has claimed it.
fn has_no_copy(refusal: &Refusal) -> bool {
    let is_one = |kind| matches!(kind, ErrorKind::SandboxNotFound | ErrorKind::SandboxClaimed);
    matches!(refusal, Refusal::Failure(e) if is_one(e.kind))
}

/// Whether a request resumes a paused sandbox.
pub fn resumes(request: &Request) -> bool {
    let path = request.uri().path();
    request.method() == Method::POST && (path.ends_with("/connect") || path.ends_with("/resume"))
}

/// Whether a request deletes this sandbox.
pub fn deletes(request: &Request, whole: &WholeId) -> bool {
    let path = request.uri().path();
    request.method() == Method::DELETE && path.strip_prefix("/sandboxes/") == Some(whole.to_string().as_str())
}

#[cfg(test)]
#[path = "takeover_test.rs"]
mod tests;
