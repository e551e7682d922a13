//! Watches of a container's directories: the host hears what is created, written, removed, renamed and changed in them.
//!
//! | module | noun |
//! |---|---|
//! | [`tree`] | the directories of one watch, and what inotify(7) tells of them |
//! | [`queue`] | the events that the host has not read yet |
//!
//! Invariants: there are at most [`MAX_WATCHES`]; a watch costs no thread, and its events wait in the kernel until the host asks, so a slow
//! host costs at most the kernel's bounded queue; lost events show as OVERFLOW. A watch ends with the container's first process,
//! when its directory is removed or moved, or when its host asks no more.

mod queue;
mod tree;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use thaw_protocol::agent::files::{NextEventsResponse, WatchRequest};
use thaw_sys::lock::Lock;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use self::tree::Tree;
use super::files::checked_bytes;
use super::sessions::Sessions;
use crate::error::{Error, Result, WithContext};

/// Most watches at once.
const MAX_WATCHES: usize = 16;
/// How long a request for events waits. The host then asks again, which shows that it is still there.
const WAIT: Duration = Duration::from_secs(30);

/// The watches of this guest, by name.
#[derive(Clone, Debug)]
pub struct Watches(Sessions<Watch>);

impl Default for Watches {
    fn default() -> Watches {
        Watches(Sessions::new("watch", MAX_WATCHES))
    }
}

/// One watch.
struct Watch {
    /// Becomes readable when something happens.
    inotify: AsyncFd<OwnedFd>,
    /// Locked by a worker thread: the file systems of a container may block.
    tree: Arc<Mutex<Tree>>,
    /// The end of the container.
    end: BoxFuture<'static, ()>,
}

impl Watches {
    /// Begins to watch a directory below `root`. Blocks while it walks the directories. Must be called within the runtime.
    pub fn begin(
        &self,
        root: OwnedFd,
        r: &WatchRequest,
        end: impl Future<Output = ()> + Send + 'static,
    ) -> Result<()> {
        let tree = Tree::watch(root, checked_bytes(&r.path)?, r.recursive)?;
        let watch = Watch {
            inotify: crate::stdio::watch(tree.descriptor()?, Interest::READABLE)?,
            tree: Arc::new(Mutex::new(tree)),
            end: Box::pin(end),
        };
        self.0.begin(&r.watch, || Ok(watch))
    }

    /// The next events. Waits for them.
    pub async fn next_events(&self, name: &str) -> Result<NextEventsResponse> {
        let session = self.0.find(name)?;
        let next = session.lock().await.next().await;
        session.touch();
        let is_over = next.as_ref().map_or(true, |next| !next.ended.is_empty());
        if is_over {
            self.abandon(name);
        }
        next
    }

    /// Forgets a watch.
    pub fn abandon(&self, name: &str) {
        self.0.forget(name);
    }
}

impl Watch {
    async fn next(&mut self) -> Result<NextEventsResponse> {
        let timeout = tokio::time::sleep(WAIT);
        let mut timeout = std::pin::pin!(timeout);
        loop {
            let tree = self.tree.clone();
            let filled = tokio::task::spawn_blocking(move || tree.locked().fill()).await;
            filled.unwrap_or_else(|e| Err(Error::State(format!("the agent's worker failed: {e}"))))?;
            if let Some(answer) = self.answer() {
                return Ok(answer);
            }
            tokio::select! {
                ready = self.inotify.ready(Interest::READABLE) => {
                    ready.with_context(|| "wait for events".into())?.clear_ready();
                }
                () = &mut self.end => self.tree.locked().end("the container has ended"),
                () = &mut timeout => return Ok(NextEventsResponse::default()),
            }
        }
    }

    /// The queued events, or after them the watch's end.
    fn answer(&self) -> Option<NextEventsResponse> {
        let mut tree = self.tree.locked();
        let events = tree.queue.take();
        let ended = match events.is_empty() {
            true => tree.ended()?.to_owned(),
            false => String::new(),
        };
        Some(NextEventsResponse {
            events,
            ended,
            ..Default::default()
        })
    }
}

#[cfg(test)]
#[path = "watch_test.rs"]
mod tests;
