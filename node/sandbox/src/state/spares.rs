//! Spares: directories of machines that no sandbox has yet, and their change into a sandbox's.
//!
//! Invariant: a directory is locked by its owner all the time, so no cleaner takes it, wherever it is.

use std::io;

use thaw_failpoint::{Failpoint, reach};

use super::{NameHeld, Record, RunDirectory, SandboxDirectory, lock_all, remove_if_empty};
use crate::error::Error;

impl RunDirectory {
    /// The run directory of spares, beside that of sandboxes. It is kept and cleaned in the same way.
    pub fn spares(&self) -> RunDirectory {
        RunDirectory {
            sandboxes: self.sandboxes.with_file_name("spares"),
        }
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
        name.write(&record.id).map_err(fail)?;
        reach(taken);
        let mut moved = spare.move_to(path.clone());
        if matches!(&moved, Err(e) if e.kind() == io::ErrorKind::NotFound) {
            // The last sandbox has gone, and the directory of all of them with it.
            let _all = self.make_and_lock_all().map_err(fail)?;
            moved = spare.move_to(path.clone());
        }
        moved.map_err(fail)?;
        spare.set_name(name.settle());
        reach(done);
        Ok(spare)
    }

    /// Removes the directory of all sandboxes if nothing is in it.
    pub fn remove_if_unused(&self) {
        if let Ok(all) = lock_all(&self.sandboxes) {
            remove_if_empty(&self.sandboxes, &all);
        }
    }
}
