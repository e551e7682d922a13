//! What every kind of resource has in common: it is made, checked, handed out once, and destroyed. [`crate::pool`] does
//! so ahead of time.

use std::fmt;
use std::time::Duration;

/// A kind of resource, and how one is made and ended.
pub trait Kind: Send + Sync + 'static {
    /// Its name in traces and metrics.
    const NAME: &'static str;
    /// What distinguishes those one asks for.
    type Want: PartialEq + Send + Sync + 'static;
    /// One of them. Dropped without [`Kind::destroy`], nothing of it stays that the next start cannot find.
    type Resource: Send + 'static;
    /// Why none can be made.
    type Error: fmt::Display;

    /// Makes one: the slow path, correct, and as slow as the kernel makes it. Blocks.
    fn make(&self, want: &Self::Want) -> Result<Self::Resource, Self::Error>;

    /// Whether it is still what was made. Asked before one made ahead is handed out. Quick: it takes no lock of the
    /// whole host.
    fn check(&self, resource: &Self::Resource) -> Result<(), Unfit>;

    /// Ends it. Blocks for as long as the kernel takes: not on a caller's path.
    fn destroy(&self, resource: Self::Resource);
}

/// Why a resource is not to be handed out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unfit: {0}")]
pub struct Unfit(pub String);

/// Why a resource had to be made while somebody waited for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SlowReason {
    /// Nobody makes resources of this kind ahead of time.
    NoPool,
    /// More were claimed than were made in time.
    Empty,
    /// Those made ahead are not what was wanted.
    OtherWant,
    /// What was ready did not pass its check.
    Unfit,
    /// The pool is being shut down.
    Closed,
}

impl SlowReason {
    /// All of them, in the order of their declaration.
    pub const ALL: [SlowReason; 5] = [
        SlowReason::NoPool,
        SlowReason::Empty,
        SlowReason::OtherWant,
        SlowReason::Unfit,
        SlowReason::Closed,
    ];

    /// As it is written in metrics and records.
    pub fn slug(self) -> &'static str {
        match self {
            SlowReason::NoPool => "no-pool",
            SlowReason::Empty => "empty",
            SlowReason::OtherWant => "other-want",
            SlowReason::Unfit => "unfit",
            SlowReason::Closed => "closed",
        }
    }
}

impl fmt::Display for SlowReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SlowReason::NoPool => "no pool",
            SlowReason::Empty => "the pool was empty",
            SlowReason::OtherWant => "the pool has others",
            SlowReason::Unfit => "what the pool had was unfit",
            SlowReason::Closed => "the pool is closed",
        })
    }
}

/// A resource, now the claimer's.
#[derive(Debug)]
pub struct Claim<R> {
    pub resource: R,
    /// None where it was ready.
    pub slow: Option<SlowReason>,
    /// How long the claimer waited.
    pub took: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_reasons_serialise_as_their_slugs() {
        for (n, reason) in SlowReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, n);
            assert_eq!(serde_json::json!(reason), reason.slug());
        }
    }
}
