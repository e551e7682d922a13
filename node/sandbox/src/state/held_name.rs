//! The names of sandboxes in the run directory.

use std::path::{Path, PathBuf};

use super::names::{Claim, Claimed, Names};
use super::record::RECORD;
use super::{Record, RunDirectory};
use crate::error::{Error, ErrorKind};

/// The directory of entries, beside that of sandboxes.
const NAMES: &str = "names";

/// The right to give a sandbox its name. Nothing for a sandbox without a name.
#[derive(Debug)]
pub struct NameHeld(Option<Claim>);

impl NameHeld {
    /// Writes which sandbox gets the name. It does not exist yet.
    pub(super) fn write(&self, id: &str) -> std::io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |claim| claim.write(id))
    }

    /// The sandbox exists. Returns the entry, to be removed after the sandbox.
    pub(super) fn settle(self) -> Option<PathBuf> {
        self.0.map(Claim::settle)
    }
}

impl RunDirectory {
    /// Lets no other sandbox take the record's name while the result is held. Waits while another creation holds it.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`] when a running sandbox of the same tenant has it.
    pub fn hold_name(&self, record: &Record) -> Result<NameHeld, Error> {
        let (Some(name), Some(entry)) = (&record.name, self.names().entry(record)) else {
            return Ok(NameHeld(None));
        };
        let used = || {
            let what = format!("a sandbox is running under the name {name}");
            Err(Error::new(ErrorKind::NameInUse, what))
        };
        // Ids are unique across tenants, and no name looks like an id.
        if Path::new(name)
            .file_name()
            .is_some_and(|file| file == name.as_str())
            && self.has(name)
        {
            return used();
        }
        let fail = |e: std::io::Error| Error::system(format!("cannot lock {}", entry.display()), &e);
        match self
            .names()
            .claim(entry.clone(), |id| self.has(id))
            .map_err(fail)?
        {
            Claimed::Free(claim) => Ok(NameHeld(Some(claim))),
            Claimed::Used(_) => used(),
        }
    }

    /// Writes the entries of sandboxes that an earlier release made, which wrote none. Blocks while it reads every record.
    pub fn index_names(&self) {
        for record in self.list() {
            if let Err(e) = self.names().add(&record, |id| self.has(id)) {
                tracing::warn!("the name of sandbox {} can be taken again: {e}", record.id);
            }
        }
    }

    /// Removes the entries that dead processes left.
    pub(super) fn sweep_names(&self) {
        self.names().sweep(|id| self.has(id));
    }

    /// The names of its sandboxes.
    pub(super) fn names(&self) -> Names {
        Names::in_directory(self.sandboxes.with_file_name(NAMES))
    }

    /// Whether there is a sandbox with this id: it has a record.
    fn has(&self, id: &str) -> bool {
        self.directory(id).join(RECORD).exists()
    }
}
