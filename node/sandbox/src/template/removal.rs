//! Removes templates that nothing lies on.
//!
//! Deltas and paused sandboxes have only what they changed of a template's memory, so a template is not removed before them. A damaged template
//! is removed and built again in any case ([`Templates::discard`]), because what lies on it is already lost.

use std::io;
use std::path::Path;

use super::key::Key;
use super::store::Templates;
use crate::error::{Error, ErrorKind};
use crate::snapshot::Hash;
use crate::snapshot::kept::Doomed;

/// What lies on a snapshot, by the hash of its manifest, in words: `snapshot ID`.
pub type UserOf<'a> = &'a dyn Fn(Hash) -> Option<String>;

impl Templates {
    /// Whether a snapshot's directory is that of a template of this store.
    pub(crate) fn holds(&self, snapshot: &Path) -> bool {
        let parent = snapshot.parent().and_then(|parent| parent.canonicalize().ok());
        parent.is_some_and(|parent| self.root().canonicalize().is_ok_and(|root| root == parent))
    }

    /// Removes a template, complete or damaged. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotInUse`]: something lies on it, or is being made over it.
    pub fn remove(&self, key: &Key, user_of: UserOf<'_>) -> Result<(), Error> {
        let directory = self.directory(key);
        let in_use = |what: String| Err(Error::new(ErrorKind::SnapshotInUse, what));
        let fail = |e: io::Error| Error::system(format!("cannot lock {}", directory.display()), &e);
        let Some(_doomed) = Doomed::take(&directory).map_err(fail)? else {
            return in_use(format!("a sandbox is being frozen over template {key}"));
        };
        let user = match self.registry().find(&directory) {
            Ok(template) => user_of(template.hash()),
            // Whether something lies on it cannot be told.
            Err(e) if e.is_passing() => return Err(e.into()),
            Err(_) => None,
        };
        match user {
            Some(user) => in_use(format!("template {key} is the base of {user}")),
            None => self.discard(key),
        }
    }
}
