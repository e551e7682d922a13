//! What every kind of resource has in common: it is made, checked, handed out once, and destroyed. [`crate::pool`] makes resources ahead
//! of time.

use std::fmt;
use std::time::Duration;

/// A kind of resource: how one is made, checked and destroyed.
pub trait Kind: Send + Sync + 'static {
    /// Its name in traces and metrics.
    const NAME: &'static str;
    /// A caller's specification of a resource.
    type Want: PartialEq + Send + Sync + 'static;
    /// A resource. If it is dropped without [`Kind::destroy`], the next start finds everything that remains of it.
    type Resource: Send + 'static;
    /// Why a resource could not be made.
    type Error: fmt::Display;

    /// Makes a resource. Blocks for as long as the kernel takes.
    fn make(&self, want: &Self::Want) -> Result<Self::Resource, Self::Error>;

    /// Checks that a resource made ahead is still as it was made, before it is handed out. Must be quick and take no host-wide lock.
    fn check(&self, resource: &Self::Resource) -> Result<(), Unfit>;

    /// Destroys a resource. Blocks for as long as the kernel takes: not for a caller's path.
    fn destroy(&self, resource: Self::Resource);
}

/// Why a resource must not be handed out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unfit: {0}")]
pub struct Unfit(pub String);

/// Why a caller had to wait until a resource was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SlowReason {
    /// No pool makes resources of this kind ahead of time.
    NoPool,
    /// The pool was empty: more were claimed than were made in time.
    Empty,
    /// The pool's resources do not match the caller's specification.
    OtherWant,
    /// The ready resource failed its check.
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

    /// Its name in metrics and records.
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

/// A resource that was handed out.
#[derive(Debug)]
pub struct Claim<R> {
    pub resource: R,
    /// Why the caller waited; `None` if the resource was ready.
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
