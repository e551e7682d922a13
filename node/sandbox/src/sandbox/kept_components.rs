//! The components of this node that snapshots need and that an upgrade replaces: kept when a snapshot is frozen or thawed, found when it is
//! thawed, removed when nothing needs them ([`Components`](crate::snapshot::Components)).

use std::collections::HashSet;
use std::fs::File;
use std::time::{Duration, SystemTime};

use super::Node;
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::paths::Paths;
use crate::snapshot::{Hash, Registered, Scratch, SnapshotDir, Subject};
use crate::template::Templates;

/// Interval between two searches for components that nothing needs.
const EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// Keeps the components of a new snapshot while the snapshot exists. Does nothing for a snapshot that is removed with this process.
pub(super) fn note(node: &Node, made: &SnapshotDir) {
    if Scratch::holds(&node.paths.data, made.path()) {
        return;
    }
    let subject = &made.manifest().subject;
    node.templates.keep_components(subject);
    let components = node.templates.registry().components();
    let image = subject.guest_image;
    if image.is_some_and(|image| !components.path(image).exists()) {
        tracing::warn!(
            "the guest image of the snapshot in {} is not here any more: it thaws only where THAW_GUEST_IMAGE names that image",
            made.path().display()
        );
    }
    refer(node, made.path(), made.hash(), subject);
}

fn refer(node: &Node, directory: &std::path::Path, manifest: Hash, subject: &Subject) {
    let components = node.templates.registry().components();
    if let Err(e) = components.refer(directory, manifest, subject.components()) {
        tracing::warn!("what a snapshot needs is kept for a day only: {e}");
    }
}

/// The guest image a snapshot was frozen with, which its guest has mapped and which therefore must not change. `None` if it is
/// this node's. Blocks while it is verified.
///
/// # Errors
/// [`ErrorKind::SnapshotIncompatible`] if this node does not have it.
pub(super) fn guest_image(
    templates: &Templates,
    paths: &Paths,
    frozen: Option<Hash>,
) -> Result<Option<File>, Error> {
    let registry = templates.registry();
    let Some(frozen) = frozen else {
        return Ok(None);
    };
    let here = registry.stamps().hash_file(&paths.guest_image)?;
    let found = match here == frozen {
        true => None,
        false => Some(registry.components().find(frozen)?.ok_or_else(|| {
            let what = format!(
                "the snapshot was frozen with guest image {frozen}; {} is {here}, and {} is not there",
                paths.guest_image.display(),
                registry.components().path(frozen).display()
            );
            Error::new(ErrorKind::SnapshotIncompatible, what)
                .remedy("name the right image in THAW_GUEST_IMAGE, or copy it to the second place")
        })?),
    };
    Ok(found)
}

/// Keeps the components of a thawed snapshot while the snapshot exists: it may come from another node, or from a release that kept none.
/// Does nothing for a snapshot that is removed with this process. Blocks.
pub(super) fn note_thawed(node: &Node, of: &Registered) {
    if Scratch::holds(&node.paths.data, &of.directory) {
        return;
    }
    let subject = &of.manifest.subject;
    node.templates.keep_components(subject);
    refer(node, &of.directory, of.hash, subject);
}

/// If a snapshot of another thaw-vmm cannot be restored, adds the path of that thaw-vmm to the error, if this node keeps it.
pub(super) fn name_vmm(node: &Node, of: &Registered, failure: Error) -> Error {
    let Some(vmm) = of.manifest.subject.vmm else {
        return failure;
    };
    let kept = node.templates.registry().components().path(vmm);
    let is_another = !node.templates.makes_with(vmm);
    match failure.kind {
        ErrorKind::SnapshotIncompatible if failure.remedy.is_none() && is_another && kept.exists() => {
            let remedy = format!(
                "the thaw-vmm that froze it is kept: try THAW_VMM={}",
                kept.display()
            );
            failure.remedy(remedy)
        }
        _ => failure,
    }
}

impl Node {
    /// Removes components that nothing on this node needs, and lets go of removed snapshots, now and once a day. Never returns.
    pub async fn collect_components(self) {
        loop {
            let node = self.clone();
            node.snapshots.let_go_of_removed(&node);
            match blocking(move || collect(&node)).await {
                Ok(0) => {}
                Ok(removed) => tracing::info!(
                    removed,
                    "removed guest images, kernels and VMMs that nothing needs"
                ),
                Err(e) => tracing::warn!("guest images, kernels and VMMs are all kept: {e}"),
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}

fn collect(node: &Node) -> Result<usize, Error> {
    if let Some(unreadable) = node.run.unreadable().first() {
        let what = format!(
            "nobody knows what sandbox {} needs: {}",
            unreadable.id, unreadable.why
        );
        return Err(Error::new(ErrorKind::Runtime, what));
    }
    let registry = node.templates.registry();
    let mut needed: HashSet<Hash> = node.templates.components().collect();
    for record in node.run.list() {
        let Some(provenance) = record.provenance else {
            continue;
        };
        if let Some(manifest) = provenance.kept_manifest(&node.run.directory(&record.id)) {
            needed.extend(manifest.subject.components());
        } else if let Ok(snapshot) = registry.find(provenance.snapshot()) {
            needed.extend(snapshot.manifest().subject.components());
        }
    }
    let collected = registry.components().collect(needed, SystemTime::now());
    collected.map_err(|e| Error::system("cannot look through what snapshots need", &e))
}

#[cfg(test)]
mod tests {
    use super::super::freeze::Workload;
    use crate::snapshot::Manifest;

    #[test]
    fn manifest_of_the_previous_release_is_read_and_written_alike() {
        let bytes = thaw_record_fixtures::PREVIOUS_MANIFEST;
        let manifest = Manifest::decode(bytes).unwrap();
        assert_eq!(manifest.subject.components().count(), 3);
        assert_eq!(
            String::from_utf8(manifest.encode()).unwrap(),
            String::from_utf8_lossy(bytes)
        );
        let workload: Workload = serde_json::from_value(manifest.subject.workload.unwrap()).unwrap();
        assert_eq!(workload.containers[0].container_id, "1f2e3d4c5b6a");
        assert!(workload.network_policy.is_some());
    }
}
