//! What a watch follows: a cache of objects whose changes have versions.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::ring::{Change, Gone};
use super::watched::Watched;

/// The state that watchers wait for.
#[derive(Clone, Copy, Debug)]
pub struct Newest {
    pub version: u64,
    /// No more changes will come: thawd shuts down.
    pub closed: bool,
}

/// A cache whose changes can be followed.
pub trait Source: std::fmt::Debug + Send + Sync + 'static {
    type Object: Watched;

    /// The last change's version.
    fn version(&self) -> u64;
    /// The version before the first change of the last `age`, or before the first change that is kept.
    fn version_before(&self, age: Duration) -> u64;
    /// The changes after a version, oldest first, at most `most`.
    fn changes(&self, after: u64, most: usize) -> Result<Vec<Arc<Change<Self::Object>>>, Gone>;
    /// Changes with each version, and when thawd shuts down.
    fn follow(&self) -> watch::Receiver<Newest>;
}
