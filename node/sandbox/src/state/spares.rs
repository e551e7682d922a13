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

    /// Makes a spare's directory that of a sandbox, with this record, whose id is the spare's and whose name is held. Takes no lock: the
    /// spare is locked already, so a cleaner leaves it alone wherever it is.
    ///
    /// # Errors
    /// The record cannot be written, or the directory cannot be moved. The spare is then removed.
    pub fn take(
        &self,
        mut spare: SandboxDirectory,
        record: &Record,
        name: NameHeld,
    ) -> Result<SandboxDirectory, Error> {
        let path = self.sandboxes.join(&record.id);
        let fail = |e: io::Error| Error::system(format!("cannot create {}", path.display()), &e);
        spare.write(record)?;
        name.write(&record.id).map_err(fail)?;
        reach(Failpoint::SpareTaken);
        let mut moved = spare.move_to(path.clone());
        if matches!(&moved, Err(e) if e.kind() == io::ErrorKind::NotFound) {
            // The last sandbox has gone, and the directory of all of them with it.
            let _all = self.make_and_lock_all().map_err(fail)?;
            moved = spare.move_to(path.clone());
        }
        moved.map_err(fail)?;
        spare.set_name(name.settle());
        reach(Failpoint::SpareMoved);
        Ok(spare)
    }

    /// Removes the directory of all sandboxes if nothing is in it.
    pub fn remove_if_unused(&self) {
        if let Ok(all) = lock_all(&self.sandboxes) {
            remove_if_empty(&self.sandboxes, &all);
        }
    }
}
