//! The last changes, oldest first.
//!
//! The ring adapts its capacity to hold the changes of the last [`FRESH`], so that a caller that was away for less misses nothing.
//! Invariant: it never exceeds [`MOST`] changes or [`MOST_BYTES`], whatever the rate; dropped changes are below [`Ring::floor`].

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::Bytes;
use thaw_protocol::api::{Sandbox, SandboxAction, SandboxEvent};

use super::selector::Selector;
use super::watched::Watched;

/// Minimum capacity, in changes.
pub const LEAST: usize = 256;
/// The largest capacity, in changes.
pub const MOST: usize = 65_536;
/// Most memory for changes, bytes, approximately.
pub const MOST_BYTES: usize = 64 << 20;
/// How long a change should be kept.
pub const FRESH: Duration = Duration::from_secs(75);

/// The changes after a version are no longer known, or the version never existed: the caller must list again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("resource version {asked} is too old or unknown: changes are kept from {floor} to {newest}")]
pub struct Gone {
    pub asked: u64,
    pub floor: u64,
    pub newest: u64,
}

/// An object changed: it was added, modified or deleted.
#[derive(Debug)]
pub struct Change<T = Sandbox> {
    pub version: u64,
    pub before: Option<Arc<T>>,
    pub after: Option<Arc<T>>,
    /// The end of an object that was removed.
    end: Option<SandboxEvent>,
    /// The line for watchers that match before and after, encoded once for all of them.
    line: OnceLock<Bytes>,
}

impl<T: Watched> Change<T> {
    /// At least one of the two is set.
    pub fn new(version: u64, before: Option<Arc<T>>, after: Option<Arc<T>>) -> Change<T> {
        Change {
            end: after.is_none().then(|| SandboxEvent::now(SandboxAction::Destroy)),
            version,
            before,
            after,
            line: OnceLock::new(),
        }
    }

    /// The object that changed.
    pub fn id(&self) -> &str {
        match self.after.as_ref().or(self.before.as_ref()) {
            Some(object) => object.id(),
            None => "",
        }
    }

    /// The line for a watcher with this selector: an object that begins to match was added, one that ceases to match was deleted.
    pub fn line(&self, selector: &Selector) -> Option<Bytes> {
        let wanted = |state: &Option<Arc<T>>| state.as_ref().filter(|it| it.is_wanted(selector)).cloned();
        let (before, after) = (wanted(&self.before), wanted(&self.after));
        if (before.is_some(), after.is_some()) == (self.before.is_some(), self.after.is_some()) {
            return Some(self.line.get_or_init(|| self.encode(before, after)).clone());
        }
        (before.is_some() || after.is_some()).then(|| self.encode(before, after))
    }

    fn encode(&self, before: Option<Arc<T>>, after: Option<Arc<T>>) -> Bytes {
        let event = match (before, after) {
            (None, Some(after)) => T::clone(&after).added(),
            (Some(_), Some(after)) => T::clone(&after).modified(),
            (before, None) => {
                let last = before.map(|before| T::clone(&before)).unwrap_or_default();
                // A change that only ceases to match is not its end.
                last.deleted(self.version, self.end)
            }
        };
        encode(&event)
    }

    /// Its approximate size in memory.
    fn weight(&self) -> usize {
        let weigh = |state: &Option<Arc<T>>| state.as_ref().map_or(0, |it| it.weight());
        // The line is about as long as the object.
        weigh(&self.before) + 2 * weigh(&self.after)
    }
}

/// One line of a watch.
pub fn encode(event: &impl serde::Serialize) -> Bytes {
    let mut line = serde_json::to_vec(event).expect("strings, numbers and maps of strings are JSON");
    line.push(b'\n');
    line.into()
}

#[derive(Debug)]
struct Kept<T> {
    change: Arc<Change<T>>,
    at: Duration,
    weight: usize,
}

/// The last changes.
#[derive(Debug)]
pub struct Ring<T = Sandbox> {
    kept: VecDeque<Kept<T>>,
    room: usize,
    bytes: usize,
    floor: u64,
    dropped: u64,
}

/// The size of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Changes.
    pub changes: usize,
    /// Its current capacity, in changes.
    pub room: usize,
    /// The approximate size of the changes in memory.
    pub bytes: usize,
    /// How many changes were dropped for newer ones.
    pub dropped: u64,
}

impl<T: Watched> Ring<T> {
    /// An empty ring for the changes after a version.
    pub fn new(floor: u64) -> Ring<T> {
        Ring {
            kept: VecDeque::new(),
            room: LEAST,
            bytes: 0,
            floor,
            dropped: 0,
        }
    }

    /// The lowest version after which the ring has all changes.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// Fails if not all changes after a version are known. `newest` is the last change's version.
    pub fn known(&self, asked: u64, newest: u64) -> Result<(), Gone> {
        let floor = self.floor;
        match (floor..=newest).contains(&asked) {
            true => Ok(()),
            false => Err(Gone { asked, floor, newest }),
        }
    }

    /// Its size.
    pub fn extent(&self) -> Extent {
        Extent {
            changes: self.kept.len(),
            room: self.room,
            bytes: self.bytes,
            dropped: self.dropped,
        }
    }

    /// Adds a change that happened `now`, by a monotonic clock.
    pub fn push(&mut self, change: Arc<Change<T>>, now: Duration) {
        let fresh = |kept: Option<&Kept<T>>| kept.is_some_and(|k| now.saturating_sub(k.at) < FRESH);
        let weight = change.weight();
        if self.kept.len() >= self.room || self.bytes + weight > MOST_BYTES {
            if fresh(self.kept.front()) {
                self.room = (self.room * 2).min(MOST);
            } else if !fresh(self.kept.get(self.kept.len() - self.kept.len() / 4)) {
                self.room = (self.room / 2).max(LEAST);
            }
        }
        self.bytes += weight;
        while self.kept.len() >= self.room || self.bytes > MOST_BYTES {
            let Some(oldest) = self.kept.pop_front() else {
                break;
            };
            self.bytes -= oldest.weight;
            self.dropped += 1;
            self.floor = oldest.change.version;
        }
        self.kept.push_back(Kept {
            change,
            at: now,
            weight,
        });
    }

    /// The version of the last change before a time, by the clock of [`Ring::push`], or the floor.
    pub fn version_at(&self, time: Duration) -> u64 {
        let before = self.kept.partition_point(|k| k.at < time);
        let last = before.checked_sub(1).and_then(|last| self.kept.get(last));
        last.map_or(self.floor, |kept| kept.change.version)
    }

    /// The changes after a version, oldest first.
    pub fn after(&self, version: u64) -> impl DoubleEndedIterator<Item = &Arc<Change<T>>> {
        let from = self.kept.partition_point(|k| k.change.version <= version);
        self.kept.range(from..).map(|k| &k.change)
    }
}

#[cfg(test)]
mod tests {
    use thaw_protocol::api::WatchEvent;

    use super::*;
    use crate::api::scope::Scope;

    fn change(version: u64, image: &str) -> Arc<Change> {
        let after = Sandbox {
            id: "a".into(),
            image: image.into(),
            ..Default::default()
        };
        Arc::new(Change::new(version, None, Some(after.into())))
    }

    /// Pushes `count` changes, `per_second` each second.
    fn feed(ring: &mut Ring, from: u64, count: u64, per_second: u64, began: Duration) -> Duration {
        let mut now = began;
        for i in 0..count {
            now = began + Duration::from_nanos(i * 1_000_000_000 / per_second);
            ring.push(change(from + i, ""), now);
        }
        now
    }

    #[test]
    fn it_grows_with_the_rate_of_change_and_shrinks_with_it() {
        let mut ring = Ring::new(0);
        let now = feed(&mut ring, 1, 1000, 1, Duration::ZERO);
        assert_eq!(ring.extent().room, LEAST, "1 a second: 75 of them are fresh");
        let now = feed(&mut ring, 1001, 100_000, 100, now);
        assert_eq!(ring.extent().room, 8192, "100 a second: 7500 of them are fresh");
        assert!(ring.after(ring.floor()).count() >= 7500);
        let now = feed(&mut ring, 101_001, 200_000, 5000, now);
        assert_eq!(ring.extent().room, MOST);
        feed(&mut ring, 301_001, 200_000, 1, now);
        assert_eq!(ring.extent().room, LEAST);
        let extent = ring.extent();
        assert_eq!((extent.changes, extent.dropped), (LEAST, 501_000 - LEAST as u64));
        assert_eq!(ring.floor(), 501_000 - LEAST as u64);
    }

    #[test]
    fn version_at_a_time_is_that_of_the_last_change_before() {
        let mut ring = Ring::new(4);
        for second in 1..=3 {
            ring.push(change(4 + second, ""), Duration::from_secs(second));
        }
        let at = |milliseconds| ring.version_at(Duration::from_millis(milliseconds));
        assert_eq!([at(0), at(1000), at(1001), at(9000)], [4, 4, 5, 7]);
    }

    #[test]
    fn large_changes_take_no_more_than_their_share_of_memory() {
        let mut ring = Ring::new(0);
        let image = "x".repeat(1 << 20);
        for version in 1..200 {
            ring.push(change(version, &image), Duration::ZERO);
            assert!(ring.bytes <= MOST_BYTES + (3 << 20));
        }
        assert!(ring.floor() > 100);
        assert_eq!(ring.after(ring.floor()).next().unwrap().version, ring.floor() + 1);
    }

    #[test]
    fn what_comes_to_match_is_added_and_what_ceases_to_is_deleted() {
        let of = |state: &str| {
            Some(Arc::new(Sandbox {
                id: "a".into(),
                state: state.into(),
                ..Default::default()
            }))
        };
        let seen = |before, after, fields: &str| {
            let line = Change::<Sandbox>::new(7, before, after)
                .line(&Selector::parse(Scope::node(), "", fields).unwrap())?;
            Some(serde_json::from_slice::<WatchEvent>(&line).unwrap())
        };
        use WatchEvent::{Added, Deleted, Modified};
        let running = "state=running";
        assert!(matches!(seen(None, of("running"), running), Some(Added(_))));
        assert!(seen(None, of("paused"), running).is_none());
        assert!(matches!(
            seen(of("paused"), of("running"), running),
            Some(Added(_))
        ));
        assert!(matches!(
            seen(of("running"), of("running"), running),
            Some(Modified(_))
        ));
        assert!(seen(of("paused"), of("ended"), running).is_none());
        for after in [None, of("paused")] {
            let Some(Deleted(last)) = seen(of("running"), after, running) else {
                panic!("not deleted")
            };
            assert_eq!((last.resource_version, last.state.as_str()), (7, "running"));
        }
        assert!(matches!(seen(of("paused"), None, ""), Some(Deleted(_))));
    }
}
