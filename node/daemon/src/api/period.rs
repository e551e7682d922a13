//! A period that ends once, such as the time for which a sandbox runs without interruption, and references to it.
//!
//! Invariants: two periods are never equal; one that is over does not begin again.

use tokio::sync::watch;

/// A period. It is over when this is dropped.
#[derive(Debug, Default)]
pub struct Period(watch::Sender<()>);

impl Period {
    /// A reference to it.
    pub fn refer(&self) -> During {
        During(self.0.subscribe())
    }
}

/// A reference to a period. Two are equal if they refer to the same one.
#[derive(Clone, Debug)]
pub struct During(watch::Receiver<()>);

impl During {
    /// Whether the period is over.
    pub fn is_over(&self) -> bool {
        self.0.has_changed().is_err()
    }

    /// Waits until the period is over.
    pub async fn over(&mut self) {
        // Nothing is ever sent: the only change is that the sender is dropped.
        while self.0.changed().await.is_ok() {}
    }
}

impl PartialEq for During {
    fn eq(&self, other: &During) -> bool {
        self.0.same_channel(&other.0)
    }
}

impl Eq for During {}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reference_tells_its_period_from_others() {
        let (one, other) = (Period::default(), Period::default());
        let mut during = one.refer();
        assert!(during == one.refer() && during != other.refer());
        assert!(!during.is_over());
        drop(one);
        during.over().await;
        assert!(during.is_over() && !other.refer().is_over());
    }
}
