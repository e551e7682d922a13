//! What is kept of a template: its name, its tags and its builds.
//!
//! Invariants: only a build that is ready and has a tag has a snapshot, because sandboxes are created by a tag; a template has at most
//! [`MAX_BUILDS`] builds.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::tenant::Tenant;

use super::super::context::Context;

/// The tag of a build that is requested without one, and of a name without one.
pub const DEFAULT_TAG: &str = "default";
/// Most builds of a template that are kept.
pub const MAX_BUILDS: usize = 32;
/// Most tags of a template.
pub const MAX_TAGS: usize = 32;

/// A template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    pub id: String,
    /// `None`: an administrator without a tenant made it.
    #[serde(default)]
    pub tenant: Option<Tenant>,
    /// Unique among those of its tenant.
    pub name: String,
    /// Whether other tenants can create sandboxes from it, by its id.
    #[serde(default)]
    pub public: bool,
    /// Seconds since the Unix epoch, as all times here.
    pub created: u64,
    pub updated: u64,
    #[serde(default)]
    pub tags: BTreeMap<String, Tag>,
    /// The first one first.
    #[serde(default)]
    pub builds: Vec<Build>,
}

/// A tag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    /// The id of the build that has it.
    pub build: String,
    pub assigned: u64,
}

/// A build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    pub id: String,
    pub status: Status,
    /// The tags that it gets when it is ready.
    pub tags: Vec<String>,
    #[serde(default)]
    pub machine: Shape,
    pub created: u64,
    pub updated: u64,
    #[serde(default)]
    pub finished: Option<u64>,
    /// The stored snapshot that its sandboxes are thawed from.
    #[serde(default)]
    pub snapshot: Option<String>,
    /// BLAKE3 of all that it was made from, in hexadecimal. `None`: not known.
    #[serde(default)]
    pub key: Option<String>,
    #[serde(default)]
    pub context: Context,
    /// Why it failed.
    #[serde(default)]
    pub reason: Option<Reason>,
}

/// The status of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It was requested, or waits for others to end.
    Waiting,
    Building,
    Ready,
    Error,
}

impl Status {
    /// Whether it does not change any more.
    pub fn is_final(self) -> bool {
        matches!(self, Status::Ready | Status::Error)
    }
}

/// The machine of a build: what was asked for, and once it is ready what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shape {
    pub cpus: Option<u8>,
    pub memory_mib: Option<u32>,
    /// `None` also if it is that of a snapshot.
    pub disk_mib: Option<u32>,
}

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    pub message: String,
    /// The number of the step, from 1; or `base`, before the first; or `finalize`, after the last.
    pub step: String,
}

/// What a build has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    pub snapshot: String,
    pub key: Option<String>,
    pub machine: Shape,
    pub context: Context,
}

impl Template {
    /// Whether it exists for this caller.
    pub fn exists_for(&self, viewer: &Viewer) -> bool {
        viewer.is_node || (self.tenant.is_some() && viewer.tenant == self.tenant)
    }

    /// Who sees its snapshots.
    pub fn owner(&self) -> Viewer {
        Viewer {
            tenant: self.tenant.clone(),
            is_node: self.tenant.is_none(),
        }
    }

    /// A build by its id.
    pub fn build(&self, id: &str) -> Option<&Build> {
        self.builds.iter().find(|build| build.id == id)
    }

    /// The same, to change it.
    pub fn build_mut(&mut self, id: &str) -> Option<&mut Build> {
        self.builds.iter_mut().find(|build| build.id == id)
    }

    /// The build that has a tag.
    pub fn tagged(&self, tag: &str) -> Option<&Build> {
        self.build(&self.tags.get(tag)?.build)
    }

    /// The newest build that is ready, or else the newest.
    pub fn newest(&self) -> Option<&Build> {
        let is_ready = |build: &&Build| build.status == Status::Ready;
        self.builds
            .iter()
            .rev()
            .find(is_ready)
            .or_else(|| self.builds.last())
    }

    /// The snapshots of its builds.
    pub fn snapshots(&self) -> impl Iterator<Item = &String> {
        self.builds.iter().filter_map(|build| build.snapshot.as_ref())
    }

    /// Records that a build is ready, and gives it its tags.
    pub fn complete(&mut self, id: &str, built: Built, now: u64) {
        let Some(build) = self.build_mut(id) else { return };
        build.status = Status::Ready;
        (build.updated, build.finished) = (now, Some(now));
        (build.snapshot, build.key) = (Some(built.snapshot), built.key);
        (build.machine, build.context) = (built.machine, built.context);
        let tags = build.tags.clone();
        self.assign(id, &tags, now);
    }

    /// Gives a build tags, also those that others have.
    pub fn assign(&mut self, id: &str, tags: &[String], now: u64) {
        let tag = Tag {
            build: id.to_owned(),
            assigned: now,
        };
        self.tags
            .extend(tags.iter().map(|name| (name.clone(), tag.clone())));
        self.updated = now;
        self.tidy();
    }

    /// Takes the snapshots from builds without a tag, and forgets the first builds if there are too many.
    pub fn tidy(&mut self) {
        let tagged: BTreeSet<&String> = self.tags.values().map(|tag| &tag.build).collect();
        for build in &mut self.builds {
            if !tagged.contains(&build.id) {
                (build.snapshot, build.key) = (None, None);
            }
        }
        let mut surplus = self.builds.len().saturating_sub(MAX_BUILDS);
        self.builds.retain(|build| {
            let goes = surplus > 0 && build.status.is_final() && !tagged.contains(&build.id);
            surplus -= usize::from(goes);
            !goes
        });
    }
}

#[cfg(test)]
#[path = "record_test.rs"]
mod tests;
