//! Places of the queries that wait for a name server, and of the connections that relays carry.
//!
//! Invariant: a guest takes a place only while it has fewer than are free, so no guest takes the last half, and each that has none finds
//! one. Of guests that all take what they can, each has about as many as they leave free, once the queries that waited before are over.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

/// The places of one guest among those of all.
#[derive(Debug)]
pub(crate) struct Places {
    all: &'static Semaphore,
    taken: AtomicUsize,
}

/// A place of one query or connection.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    _permit: SemaphorePermit<'a>,
    taken: &'a AtomicUsize,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Places {
    /// Of a guest that has none yet.
    pub fn among(all: &'static Semaphore) -> Places {
        Places {
            all,
            taken: AtomicUsize::new(0),
        }
    }

    /// Takes a place; `None` if this guest must leave those that are free to others.
    pub fn take(&self) -> Option<Place<'_>> {
        // Counted first, so that queries of one guest at once do not share a look.
        let before = self.taken.fetch_add(1, Ordering::Relaxed);
        let permit = (before < self.all.available_permits()).then(|| self.all.try_acquire());
        let Some(Ok(permit)) = permit else {
            self.taken.fetch_sub(1, Ordering::Relaxed);
            return None;
        };
        Some(Place {
            _permit: permit,
            taken: &self.taken,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_that_take_all_they_can_leave_places_to_others() {
        static ALL: Semaphore = Semaphore::const_new(512);
        let guests: Vec<Places> = (0..9).map(|_| Places::among(&ALL)).collect();
        let mut held: Vec<Vec<Place<'_>>> = Vec::new();
        // As if the first came alone.
        held.push(std::iter::from_fn(|| guests[0].take()).collect());
        assert_eq!(held[0].len(), 256);
        for guest in &guests[1..8] {
            held.push(std::iter::from_fn(|| guest.take()).collect());
            assert!(held.last().is_some_and(|taken| !taken.is_empty()));
        }
        // Their queries are answered in turn, and they ask again at once.
        for at in (0..8).cycle().take(8 * 256) {
            held[at].pop();
            while let Some(place) = guests[at].take() {
                held[at].push(place);
            }
        }
        let most = held.iter().map(Vec::len).max();
        assert!(most < Some(64), "{most:?}");
        let taken: Vec<Place<'_>> = std::iter::from_fn(|| guests[8].take()).collect();
        assert!(taken.len() > 16, "{}", taken.len());
        drop((held, taken));
        assert_eq!(ALL.available_permits(), 512);
        assert!(guests[8].take().is_some());
    }
}
