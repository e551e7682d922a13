//! Fake copies of paused sandboxes: a registry in memory, which several fakes may share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use thaw_sandbox::CopyPlace;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::state::{Copied, Paused, Record};

use super::Fake;
use crate::api::factory::CopyTurn;

/// What happens to each copy of a sandbox that is made.
#[derive(Clone, Copy, Debug)]
pub enum Trouble {
    Hangs,
    Refused,
}

/// The registry.
#[derive(Debug, Default)]
pub struct Copies {
    /// By thawd's id of the sandbox.
    troubles: Mutex<BTreeMap<String, Trouble>>,
    /// Ids of the sandboxes of which a copy was begun.
    begun: Mutex<Vec<String>>,
    /// Records and claims, by reference.
    copies: Mutex<BTreeMap<String, (Record, String)>>,
    /// Nonces, by claim.
    claims: Mutex<BTreeMap<String, String>>,
}

impl Copies {
    /// Whether there is a copy.
    pub fn has(&self, reference: &str) -> bool {
        self.copies.lock().unwrap().contains_key(reference)
    }

    /// Lets copies of a sandbox fail.
    pub fn trouble(&self, id: &str, trouble: Trouble) {
        self.troubles.lock().unwrap().insert(id.to_owned(), trouble);
    }

    /// How many copies of a sandbox were begun.
    pub fn tries(&self, id: &str) -> usize {
        let begun = self.begun.lock().unwrap();
        begun.iter().filter(|begun| *begun == id).count()
    }

    async fn begin(&self, id: &str) -> Result<(), Error> {
        self.begun.lock().unwrap().push(id.to_owned());
        let trouble = self.troubles.lock().unwrap().get(id).copied();
        match trouble {
            None => Ok(()),
            Some(Trouble::Hangs) => std::future::pending().await,
            Some(Trouble::Refused) => Err(Error::new(ErrorKind::PushRefused, "too large")),
        }
    }
}

fn none() -> Error {
    Error::new(ErrorKind::SandboxNotFound, "no copy")
}

fn claimed() -> Error {
    Error::new(ErrorKind::SandboxClaimed, "another node has it")
}

impl Fake {
    fn copies(&self) -> Arc<Copies> {
        self.copies.lock().unwrap().clone()
    }

    fn nonce(&self) -> String {
        format!("{:p}", self.counts)
    }

    pub(super) async fn copy(&self, paused: &Paused, place: &CopyPlace, turn: CopyTurn) -> Result<(), Error> {
        let copies = self.copies();
        copies.begin(&paused.record().id).await?;
        let _turn = turn.await?;
        let mut all = copies.copies.lock().unwrap();
        let claim = format!("{}.{}", place.reference(), copies.claims.lock().unwrap().len());
        paused.note_copied(&Copied {
            claim: claim.clone(),
            nonce: self.nonce(),
            is_complete: false,
        })?;
        all.insert(place.reference(), (paused.record().clone(), claim));
        Ok(())
    }

    pub(super) fn claim(&self, paused: &Paused) -> Result<(), Error> {
        let Some(note) = paused.copied()? else {
            return Ok(());
        };
        let copies = self.copies();
        let mut claims = copies.claims.lock().unwrap();
        match *claims.entry(note.claim).or_insert(note.nonce.clone()) == note.nonce {
            true => paused.forget_copied(),
            false => Err(claimed()),
        }
    }

    /// The record of a copy that the viewer may see, and its claim. Fails if somebody has the claim.
    fn unclaimed(&self, place: &CopyPlace, viewer: &Viewer) -> Result<(Record, String), Error> {
        let copies = self.copies();
        let found = copies.copies.lock().unwrap().get(&place.reference()).cloned();
        let (record, claim) = found.ok_or_else(none)?;
        if !viewer.is_node && record.terms.tenant != viewer.tenant {
            return Err(none());
        }
        match copies.claims.lock().unwrap().contains_key(&claim) {
            true => Err(claimed()),
            false => Ok((record, claim)),
        }
    }

    pub(super) fn discard(&self, place: &CopyPlace, viewer: &Viewer) -> Result<(), Error> {
        let (_, claim) = self.unclaimed(place, viewer)?;
        let copies = self.copies();
        copies.claims.lock().unwrap().insert(claim, "deleted".into());
        Ok(())
    }

    pub(super) fn take(&self, place: &CopyPlace, viewer: &Viewer) -> Result<Paused, Error> {
        let (record, claim) = self.unclaimed(place, viewer)?;
        let draft = self.counts.paused.begin(&record.id)?;
        std::fs::create_dir(draft.snapshot()).unwrap();
        let nothing = tempfile::tempdir().unwrap();
        let paused = draft.finish(record, nothing.path())?;
        paused.note_copied(&Copied {
            claim,
            nonce: self.nonce(),
            is_complete: true,
        })?;
        Ok(paused)
    }
}
