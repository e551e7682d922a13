//! Spares: directories of machines that no sandbox has yet, and their change into a sandbox's.
//!
//! Invariant: a directory is locked by its owner all the time, so no cleaner takes it, wherever it is.

use std::fs::File;
use std::io;

use thaw_failpoint::{Failpoint, reach};

use super::{Record, RunDirectory, SandboxDirectory, lock_all, remove_if_empty};
use crate::error::{Error, ErrorKind};

/// The right to give a sandbox its name: the lock of the directory of all sandboxes. Nothing for a sandbox without a name.
#[derive(Debug)]
pub struct NameHeld {
    _lock: Option<File>,
}

impl RunDirectory {
    /// The run directory of spares, beside that of sandboxes. It is kept and cleaned in the same way.
    pub fn spares(&self) -> RunDirectory {
        RunDirectory {
            sandboxes: self.sandboxes.with_file_name("spares"),
        }
    }

    /// Lets no other sandbox take the record's name while the result is held.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`] when a running sandbox of the same tenant has it.
    pub fn hold_name(&self, record: &Record) -> Result<NameHeld, Error> {
        if record.name.is_none() {
            return Ok(NameHeld { _lock: None });
        }
        let place = self.sandboxes.display();
        let all = self.make_and_lock_all();
        let all = all.map_err(|e| Error::system(format!("cannot lock {place}"), &e))?;
        self.refuse_used_name(record)?;
        Ok(NameHeld { _lock: Some(all) })
    }

    /// Makes a spare's directory that of a sandbox, with this record, whose name is held. Its id is the spare's, or that of a paused sandbox
    /// that the spare continues. Takes no lock: the spare is locked already, so a cleaner leaves it alone wherever it is. If this process is
    /// killed meanwhile, the next one finds a sandbox that is not ready, or a spare, and removes it.
    ///
    /// # Errors
    /// The record cannot be written, or the directory cannot be moved: the sandbox of this id has one already. The spare is then removed.
    pub fn take(
        &self,
        mut spare: SandboxDirectory,
        record: &Record,
        name: NameHeld,
    ) -> Result<SandboxDirectory, Error> {
        let path = self.sandboxes.join(&record.id);
        let fail = |e: io::Error| Error::system(format!("cannot create {}", path.display()), &e);
        let (taken, done) = match spare.path().file_name() == path.file_name() {
            true => (Failpoint::SpareTaken, Failpoint::SpareMoved),
            false => (Failpoint::PausedSpareTaken, Failpoint::PausedSpareMoved),
        };
        spare.write(record)?;
        reach(taken);
        let mut moved = spare.move_to(path.clone());
        if matches!(&moved, Err(e) if e.kind() == io::ErrorKind::NotFound) {
            // The last sandbox has gone, and the directory of all of them with it. If a name is held, its lock keeps the directory.
            let _all = self.make_and_lock_all().map_err(fail)?;
            moved = spare.move_to(path.clone());
        }
        // Unlocked before the directory can be dropped: that waits for this lock.
        drop(name);
        moved.map_err(fail)?;
        reach(done);
        Ok(spare)
    }

    /// Removes the directory of all sandboxes if nothing is in it.
    pub fn remove_if_unused(&self) {
        if let Ok(all) = lock_all(&self.sandboxes) {
            remove_if_empty(&self.sandboxes, &all);
        }
    }

    /// The caller holds the lock of the directory of all sandboxes.
    pub(super) fn refuse_used_name(&self, record: &Record) -> Result<(), Error> {
        let Some(name) = &record.name else { return Ok(()) };
        // Ids are unique across tenants, and no name looks like an id.
        let has_it = |r: &Record| {
            r.id == *name || r.terms.tenant == record.terms.tenant && r.name.as_ref() == Some(name)
        };
        match self.list().iter().any(has_it) {
            true => {
                let what = format!("a sandbox is running under the name {name}");
                Err(Error::new(ErrorKind::NameInUse, what))
            }
            false => Ok(()),
        }
    }
}
