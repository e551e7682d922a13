//! What one tenant has, and its creations of the last minute.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use thaw_protocol::api::TenantUse;

/// The time in which creations are counted.
const MINUTE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Account {
    pub used: TenantUse,
    /// Oldest first; no more than the limit, which is at most
    /// [`CREATIONS_PER_MINUTE`](thaw_protocol::api::CREATIONS_PER_MINUTE).
    creations: VecDeque<Instant>,
}

impl Account {
    /// Creations within the last minute.
    pub fn creations(&mut self, now: Instant) -> usize {
        while self
            .creations
            .front()
            .is_some_and(|first| now.duration_since(*first) >= MINUTE)
        {
            self.creations.pop_front();
        }
        self.creations.len()
    }

    pub fn note_creation(&mut self, now: Instant) {
        self.creations.push_back(now);
    }

    /// Seconds until `count` more creations are within the limit, at least 1; `None` if they are now. More than the limit never are: for them
    /// it is the time until there are no others.
    pub fn wait(&mut self, limit: usize, count: usize, now: Instant) -> Option<u64> {
        let made = self.creations(now);
        let over = (made + count).checked_sub(limit).filter(|over| *over > 0)?;
        let last = over.min(made).checked_sub(1).map(|at| self.creations[at]);
        let left = last.map_or(MINUTE, |last| MINUTE.saturating_sub(now.duration_since(last)));
        Some(left.as_secs() + 1)
    }

    pub fn usage(&mut self, now: Instant) -> TenantUse {
        TenantUse {
            creations_per_minute: self.creations(now) as u64,
            ..self.used
        }
    }

    /// Whether nothing must be remembered of it.
    pub fn is_empty(&mut self, now: Instant) -> bool {
        self.used == TenantUse::default() && self.creations(now) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creations_are_counted_for_a_minute() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut account = Account::default();
        for second in [0, 10, 20] {
            assert_eq!(account.wait(3, 1, at(second)), None, "{second}");
            account.note_creation(at(second));
        }
        assert_eq!(account.wait(3, 1, at(20)), Some(41));
        // Two have room once the second has left too.
        assert_eq!(account.wait(3, 2, at(20)), Some(51));
        assert_eq!(
            account.wait(3, 4, at(20)),
            Some(61),
            "never: four are more than three"
        );
        assert_eq!(account.wait(3, 1, at(59)), Some(2));
        assert_eq!(account.wait(3, 1, at(60)), None);
        assert_eq!(account.creations(at(75)), 1);
        assert!(!account.is_empty(at(79)) && account.is_empty(at(80)));
    }
}
