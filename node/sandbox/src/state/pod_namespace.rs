//! The network namespace of a pod, which it brings in place of a slot.
//!
//! Invariant: the sandbox's record names the namespace before anything is made in it. So the process that ends the sandbox, or
//! finds it ended, can restore the namespace.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thaw_network::pod::{self, PodNetwork};

use super::FileIdentity;
use crate::error::{Error, ErrorKind};

/// A network namespace of the host, by its path. The path may later lead to another namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNamespace {
    path: PathBuf,
    is: FileIdentity,
}

impl PodNamespace {
    /// The namespace that is at this path now.
    ///
    /// # Errors
    /// The path leads to no namespace.
    pub fn find(path: PathBuf) -> Result<PodNamespace, Error> {
        let (_, is) = opened(&path)?;
        Ok(PodNamespace { path, is })
    }

    fn unavailable(&self, why: impl std::fmt::Display) -> Error {
        let what = format!("the pod's network namespace {}: {why}", self.path.display());
        Error::new(ErrorKind::NetworkUnavailable, what)
    }

    fn open(&self) -> Result<OwnedFd, Error> {
        let (namespace, is) = opened(&self.path)?;
        match is == self.is {
            true => Ok(namespace),
            false => Err(self.unavailable("another has its path now")),
        }
    }

    /// Connects the namespace to a guest. `None` if it has no interface. Blocks while others change networks of this host.
    ///
    /// # Errors
    /// Why the namespace cannot be used for a guest. It is then unchanged.
    pub(crate) fn attach(&self) -> Result<Option<PodNetwork>, Error> {
        PodNetwork::attach(self.open()?).map_err(|e| self.unavailable(e))
    }

    /// The namespace of an adopted sandbox. `None` if it no longer exists.
    pub(crate) fn adopt(&self) -> Option<PodNetwork> {
        let found = self.open();
        let found = found.inspect_err(|e| tracing::warn!("adopted, but its network is not there: {e}"));
        let adopted = PodNetwork::adopt(found.ok()?);
        adopted
            .inspect_err(|e| tracing::warn!("{}", self.unavailable(e)))
            .ok()
    }

    /// Restores the namespace to its state before the sandbox, which has ended. Does nothing if it no longer exists.
    pub(crate) fn leave(&self) {
        let Ok(namespace) = self.open() else { return };
        if let Err(e) = pod::detach(namespace.as_fd()) {
            tracing::warn!("{}", self.unavailable(e));
        }
    }
}

fn opened(path: &std::path::Path) -> Result<(OwnedFd, FileIdentity), Error> {
    let failed = |what: String| Error::new(ErrorKind::NetworkUnavailable, what);
    let namespace = pod::open(path).map_err(|e| failed(e.to_string()))?;
    let file = File::from(namespace);
    let is = file.metadata().map(|metadata| FileIdentity::of(&metadata));
    let is = is.map_err(|e| failed(format!("cannot look at {}: {e}", path.display())))?;
    Ok((file.into(), is))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_path_later_is_not_taken_for_what_had_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netns");
        let why = PodNamespace::find(path.clone()).unwrap_err();
        assert_eq!(why.kind, ErrorKind::NetworkUnavailable);
        assert!(why.what.contains(&path.display().to_string()), "{why}");
        std::fs::write(&path, "").unwrap();
        let found = PodNamespace::find(path.clone()).unwrap();
        found.open().unwrap();
        let kept = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(found.open().unwrap_err().what.contains("another has its path"));
        assert!(found.adopt().is_none());
        drop(kept);
    }

    #[test]
    fn what_is_no_namespace_is_an_error_that_names_it() {
        let why = PodNamespace::find("/dev/null".into())
            .unwrap()
            .attach()
            .unwrap_err();
        assert!(
            why.what.contains("/dev/null") && why.what.contains("is it one?"),
            "{why}"
        );
    }

    #[test]
    fn the_hosts_own_is_refused() {
        let host = PodNamespace::find("/proc/self/ns/net".into()).unwrap();
        let why = host.attach().unwrap_err();
        assert!(why.what.contains("hostNetwork"), "{why}");
    }
}
