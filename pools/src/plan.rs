//! How a pool is filled and emptied: how many resources it keeps ready, how many it makes at once, and how long it pauses after failures.

use std::sync::Arc;
use std::time::Duration;

use thaw_sys::backoff::Backoff;

use crate::foreground::Foreground;

/// How many resources a pool keeps ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermarks {
    low: usize,
    high: usize,
}

/// Why two numbers cannot be watermarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatermarksError {
    #[error("low is {low}, above high, which is {high}")]
    Crossed { low: usize, high: usize },
    #[error("low is 0, so nothing would ever be made ahead: high = 0 says that")]
    NoLow,
    #[error("high is {high}, and at most {} are kept ready", Watermarks::MOST)]
    TooHigh { high: usize },
}

impl Watermarks {
    /// The most a pool keeps ready.
    pub const MOST: usize = 4096;

    /// Refilling begins when fewer than `low` are ready and ends when `high` are. With 0 and 0 the pool is never filled.
    pub fn new(low: usize, high: usize) -> Result<Watermarks, WatermarksError> {
        match (low, high) {
            (_, high) if high > Watermarks::MOST => Err(WatermarksError::TooHigh { high }),
            (low, high) if low > high => Err(WatermarksError::Crossed { low, high }),
            (0, 1..) => Err(WatermarksError::NoLow),
            (low, high) => Ok(Watermarks { low, high }),
        }
    }

    /// Filled to `high`, or to [`Watermarks::MOST`] if that is less, once fewer than half of that are ready.
    pub fn half_of(high: usize) -> Watermarks {
        let high = high.min(Watermarks::MOST);
        Watermarks {
            low: high.div_ceil(2),
            high,
        }
    }

    /// The same low mark with another high one, which is at least the low one.
    pub fn up_to(self, high: usize) -> Watermarks {
        Watermarks {
            low: self.low,
            high: high.clamp(self.low, Watermarks::MOST),
        }
    }

    pub fn low(&self) -> usize {
        self.low
    }

    pub fn high(&self) -> usize {
        self.high
    }
}

/// How many resources a pool keeps ready, of those that its watermarks allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizing {
    /// All of them.
    Full,
    /// As many as were claimed within this time.
    Demand { within: Duration },
}

/// How a pool is filled and emptied.
#[derive(Clone, Debug)]
pub struct Plan<W> {
    /// The specification of the resources that the pool prepares.
    pub want: W,
    pub watermarks: Watermarks,
    pub sizing: Sizing,
    /// How many it makes at once.
    pub makers: usize,
    /// How many may wait to be destroyed before a caller that releases one destroys it itself.
    pub doomed: usize,
    pub backoff: Backoff,
    /// The work beside which it neither makes nor destroys at once.
    pub yields_to: Option<Arc<Foreground>>,
}

impl<W> Plan<W> {
    /// With two makers: more do not help where the kernel makes one at a time.
    pub fn new(want: W, watermarks: Watermarks) -> Plan<W> {
        Plan {
            want,
            watermarks,
            sizing: Sizing::Full,
            makers: 2,
            doomed: 256,
            backoff: Backoff::default(),
            yields_to: None,
        }
    }

    /// Whether nothing that the pool yields to is in progress.
    pub(crate) fn is_free(&self) -> bool {
        self.yields_to.as_ref().is_none_or(|work| work.is_idle())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watermarks_of_nothing_or_too_much_are_refused() {
        assert!(Watermarks::new(0, 0).is_ok() && Watermarks::new(3, 3).is_ok());
        let refused = [(2, 1), (0, 1), (1, Watermarks::MOST + 1)];
        for (low, high) in refused {
            Watermarks::new(low, high).unwrap_err();
        }
    }
}
