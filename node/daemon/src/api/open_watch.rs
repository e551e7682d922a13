//! A directory of a container that is being watched.
//!
//! Invariant: dropping an [`OpenWatch`] ends the watch in the guest, whatever its reader did. Events wait in the guest, at most one answer
//! of it is held.

use std::sync::Arc;

use thaw_protocol::agent::files::NextEventsResponse;
use thaw_sandbox::error::Error;
use thaw_sandbox::id::new_id;

use super::files::{DirectoryWatch, Files, forget};
use super::problem::Refusal;

/// A watch that the guest has begun.
#[derive(Debug)]
pub struct OpenWatch {
    files: Arc<dyn Files>,
    watch: DirectoryWatch,
    has_ended: bool,
}

impl OpenWatch {
    /// Begins to watch a directory; nothing that happens after this returns is missed.
    ///
    /// # Errors
    /// The guest refuses it.
    pub async fn begin(files: Arc<dyn Files>, path: String, recursive: bool) -> Result<OpenWatch, Refusal> {
        let name = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
        let watch = DirectoryWatch {
            path,
            recursive,
            name,
        };
        // Made first, so that a caller that leaves meanwhile leaves no watch in the guest.
        let open = OpenWatch {
            files,
            watch,
            has_ended: false,
        };
        open.files.watch(&open.watch).await?;
        Ok(open)
    }

    /// The next events. Waits for them, but not for long: an answer may be empty.
    ///
    /// # Errors
    /// The guest does not watch any more.
    pub async fn next(&mut self) -> Result<NextEventsResponse, Refusal> {
        let answer = self.files.next_events(&self.watch).await?;
        self.has_ended |= !answer.ended.is_empty();
        Ok(answer)
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        if !self.has_ended {
            let (files, watch) = (self.files.clone(), self.watch.clone());
            forget(async move { files.abandon_watch(&watch).await });
        }
    }
}
