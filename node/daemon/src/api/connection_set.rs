//! The connections that a listener serves.
//!
//! Invariant: the set never has more connections than its limits, in total and of one peer, as long as its owner asks
//! [`ConnectionSet::has_room`] first.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tokio::task::JoinSet;

/// How long to wait after a failed accept: most likely the process has no descriptors left.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The connections being served. `K` tells one peer from another.
pub struct ConnectionSet<K> {
    serving: JoinSet<K>,
    by_peer: HashMap<K, usize>,
    most: usize,
    most_of_one: usize,
}

impl<K: Clone + Eq + Hash + Send + 'static> ConnectionSet<K> {
    /// Allows at most `most` connections at once, and `most_of_one` of one peer.
    pub fn new(most: usize, most_of_one: usize) -> ConnectionSet<K> {
        ConnectionSet {
            serving: JoinSet::new(),
            by_peer: HashMap::new(),
            most,
            most_of_one,
        }
    }

    /// Whether this peer may have one more.
    pub fn has_room(&self, peer: &K) -> bool {
        let mine = self.by_peer.get(peer).copied().unwrap_or(0);
        self.serving.len() < self.most && mine < self.most_of_one
    }

    /// Serves one more connection.
    pub fn add(&mut self, peer: K, connection: impl Future<Output = ()> + Send + 'static) {
        *self.by_peer.entry(peer.clone()).or_default() += 1;
        self.serving.spawn(async move {
            connection.await;
            peer
        });
    }

    /// Forgets connections that have ended.
    pub fn reap(&mut self) {
        while let Some(ended) = self.serving.try_join_next() {
            // A panicked connection stays counted. Panics must not happen, and the error is on the safe side.
            let Ok(peer) = ended else { continue };
            if let Some(count) = self.by_peer.get_mut(&peer) {
                *count -= 1;
                if *count == 0 {
                    self.by_peer.remove(&peer);
                }
            }
        }
    }

    /// Waits for the last connections for at most `limit`, then cuts those that are left.
    pub async fn finish(mut self, limit: Duration) {
        let all_ended = async { while self.serving.join_next().await.is_some() {} };
        if tokio::time::timeout(limit, all_ended).await.is_err() {
            tracing::warn!("connections were cut");
        }
        self.serving.shutdown().await;
    }
}
