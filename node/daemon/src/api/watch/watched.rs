//! The kinds of objects that callers can watch.

use std::collections::BTreeMap;

use thaw_protocol::api::{
    Bookmark, Problem, Sandbox, SandboxEvent, Snapshot, SnapshotEvent, SnapshotManifest, WatchEvent,
};

use super::selector::Selector;

/// An object that callers can watch. Values are its states.
pub trait Watched: Clone + Default + std::fmt::Debug + Send + Sync + 'static {
    /// One line of a watch.
    type Event: serde::Serialize;

    fn id(&self) -> &str;
    /// Whether it matches a selector, and is in its scope.
    fn is_wanted(&self, selector: &Selector) -> bool;
    /// Its approximate size in memory, bytes.
    fn weight(&self) -> usize;
    fn added(self) -> Self::Event;
    fn modified(self) -> Self::Event;
    /// `version` is that of its deletion. `end` is set if it is gone, and `None` if it only matches a selector no longer.
    fn deleted(self, version: u64, end: Option<SandboxEvent>) -> Self::Event;
    fn bookmark(bookmark: Bookmark) -> Self::Event;
    fn error(problem: Problem) -> Self::Event;
}

impl Watched for Sandbox {
    type Event = WatchEvent;

    fn id(&self) -> &str {
        &self.id
    }

    fn is_wanted(&self, selector: &Selector) -> bool {
        selector.wants(self)
    }

    fn weight(&self) -> usize {
        weight(self)
    }

    fn added(self) -> WatchEvent {
        WatchEvent::Added(self)
    }

    fn modified(self) -> WatchEvent {
        WatchEvent::Modified(self)
    }

    fn deleted(self, version: u64, end: Option<SandboxEvent>) -> WatchEvent {
        WatchEvent::Deleted(Sandbox {
            resource_version: version,
            event: end,
            ..self
        })
    }

    fn bookmark(bookmark: Bookmark) -> WatchEvent {
        WatchEvent::Bookmark(bookmark)
    }

    fn error(problem: Problem) -> WatchEvent {
        WatchEvent::Error(problem)
    }
}

impl Watched for Snapshot {
    type Event = SnapshotEvent;

    fn id(&self) -> &str {
        &self.id
    }

    fn is_wanted(&self, selector: &Selector) -> bool {
        selector.wants_snapshot(self)
    }

    fn weight(&self) -> usize {
        let texts = [
            Some(&self.id),
            self.tenant.as_ref(),
            self.name.as_ref(),
            Some(&self.sandbox),
            self.parent.as_ref(),
            self.error.as_ref(),
        ];
        let texts: usize = texts.into_iter().flatten().map(String::len).sum();
        let manifest = self.manifest.as_ref().map_or(0, manifest_weight);
        size_of::<Snapshot>() + texts + labels_weight(&self.labels) + manifest
    }

    fn added(self) -> SnapshotEvent {
        SnapshotEvent::Added(self)
    }

    fn modified(self) -> SnapshotEvent {
        SnapshotEvent::Modified(self)
    }

    fn deleted(self, version: u64, _: Option<SandboxEvent>) -> SnapshotEvent {
        SnapshotEvent::Deleted(Snapshot {
            resource_version: Some(version),
            ..self
        })
    }

    fn bookmark(bookmark: Bookmark) -> SnapshotEvent {
        SnapshotEvent::Bookmark(bookmark)
    }

    fn error(problem: Problem) -> SnapshotEvent {
        SnapshotEvent::Error(problem)
    }
}

fn texts_weight(texts: &[String]) -> usize {
    texts.iter().map(|text| text.len() + size_of::<String>()).sum()
}

fn labels_weight(labels: &BTreeMap<String, String>) -> usize {
    labels.iter().map(|(k, v)| k.len() + v.len() + 64).sum()
}

fn manifest_weight(manifest: &SnapshotManifest) -> usize {
    // Hashes and names, of which the longest are the command and the images.
    1024 + manifest.image.len() + texts_weight(&manifest.command) + texts_weight(&manifest.images)
}

fn weight(sandbox: &Sandbox) -> usize {
    let texts = [
        Some(&sandbox.id),
        sandbox.tenant.as_ref(),
        sandbox.name.as_ref(),
        Some(&sandbox.image),
        sandbox.reason.as_ref(),
        sandbox.volumes_error.as_ref(),
        Some(&sandbox.vsock),
    ];
    let texts: usize = texts.into_iter().flatten().map(String::len).sum();
    let failure = sandbox.failure.as_ref().map_or(0, |f| {
        let lines = [&f.console, &f.log, &f.output].into_iter().flatten();
        f.message.len() + lines.map(|l| l.len() + size_of::<String>()).sum::<usize>()
    });
    let (command, labels) = (texts_weight(&sandbox.command), labels_weight(&sandbox.labels));
    size_of::<Sandbox>() + texts + command + labels + failure
}
