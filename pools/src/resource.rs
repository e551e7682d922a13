//! What every kind of resource has in common: it is claimed, released, checked, destroyed, and made when none is ready.
//!
//! A caller claims from a [`Source`] and is told what came and, where it was made while the caller waited, why
//! ([`SlowReason`]): a slow path is never silent. Today no source has anything ready; a pool of any kind fills one ahead
//! of time without its callers changing.

use std::fmt;
use std::time::{Duration, Instant};

/// A kind of resource, and how one is made and ended.
pub trait Kind: Send + Sync {
    /// Its name in traces and metrics.
    const NAME: &'static str;
    /// What distinguishes those one asks for.
    type Want: ?Sized;
    /// One of them. Dropped without [`Kind::destroy`], nothing of it stays that the next start cannot find.
    type Resource;
    /// Why none can be made.
    type Error;

    /// Makes one: the slow path, correct, and as slow as the kernel makes it. Blocks.
    fn make(&self, want: &Self::Want) -> Result<Self::Resource, Self::Error>;

    /// Whether it is still what was made. Asked before one made earlier is handed out, and of what is released. Quick.
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
}

impl fmt::Display for SlowReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SlowReason::NoPool => "no pool",
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

/// Where resources of one kind come from and go to.
#[derive(Debug)]
pub struct Source<K> {
    kind: K,
}

impl<K: Kind> Source<K> {
    /// One that has nothing ready.
    pub fn new(kind: K) -> Source<K> {
        Source { kind }
    }

    /// Its kind.
    pub fn kind(&self) -> &K {
        &self.kind
    }

    /// Takes one, making it if none is ready. Blocks while it does.
    pub fn claim(&self, want: &K::Want) -> Result<Claim<K::Resource>, K::Error> {
        let began = Instant::now();
        let resource = self.kind.make(want)?;
        let took = began.elapsed();
        tracing::debug!(kind = K::NAME, ?took, reason = %SlowReason::NoPool, "made");
        Ok(Claim {
            resource,
            slow: Some(SlowReason::NoPool),
            took,
        })
    }

    /// Gives one back after use. It is ended, for what one sandbox has used no other gets; the answer says whether it
    /// was still as it should be. Blocks.
    pub fn release(&self, resource: K::Resource) -> Result<(), Unfit> {
        let checked = self.kind.check(&resource);
        if let Err(unfit) = &checked {
            tracing::debug!(kind = K::NAME, "released: {unfit}");
        }
        self.kind.destroy(resource);
        checked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Numbers; those above ten are unfit.
    #[derive(Default)]
    struct Numbers {
        alive: AtomicU32,
    }

    impl Kind for Numbers {
        const NAME: &'static str = "number";
        type Want = u32;
        type Resource = u32;
        type Error = String;

        fn make(&self, want: &u32) -> Result<u32, String> {
            if *want == 0 {
                return Err("zero".into());
            }
            self.alive.fetch_add(1, Ordering::Relaxed);
            Ok(*want)
        }

        fn check(&self, resource: &u32) -> Result<(), Unfit> {
            match resource {
                0..=10 => Ok(()),
                _ => Err(Unfit("too large".into())),
            }
        }

        fn destroy(&self, _: u32) {
            self.alive.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_is_claimed_says_why_it_was_slow_and_what_is_released_is_ended_fit_or_not() {
        let source = Source::new(Numbers::default());
        assert_eq!(source.claim(&0).unwrap_err(), "zero");
        let claims = [source.claim(&3).unwrap(), source.claim(&30).unwrap()];
        assert!(claims.iter().all(|c| c.slow == Some(SlowReason::NoPool)));
        assert_eq!(source.kind().alive.load(Ordering::Relaxed), 2);
        let fit: Vec<bool> = claims
            .into_iter()
            .map(|c| source.release(c.resource).is_ok())
            .collect();
        assert_eq!(fit, [true, false]);
        assert_eq!(source.kind().alive.load(Ordering::Relaxed), 0);
    }
}
