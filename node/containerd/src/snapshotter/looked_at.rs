//! The files of an image that are looked at on the host: containerd and its clients mount a container's root to look its user
//! and groups up, and CRI copies from it what the image has where its config declares volumes. So these are had from the image,
//! and put where an overlay can have them. All of an image is put there where containerd itself unpacks layers onto it.
//!
//! Invariant: a directory of an image's is whole, or not there: it is made beside and renamed. Nobody but root
//! gets to it: programs of an image are as it has them, those that become another user among them.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use thaw_sandbox::exit::Failure;
use thaw_sandbox::images::part::Part;

use super::copied;
use super::remote::Layers;

/// What is looked into, all of it text.
pub const FILES: [&str; 2] = ["etc/passwd", "etc/group"];
/// Larger ones are left out.
pub const MOST: u64 = 1 << 20;
/// After the name of each image's directory. Those without it are of a thawd that left volumes out.
const FORM: &str = ".volumes";
/// What the name of one that is being made begins with.
const MAKING: &str = ".making-";

/// Where they are for each image.
#[derive(Clone, Debug)]
pub struct LookedAt {
    root: PathBuf,
}

impl LookedAt {
    /// Beside the snapshots, whose directory holds nothing else. What a thawd that died was making is removed.
    pub fn beside(snapshots: &Path) -> LookedAt {
        let mut name = snapshots.file_name().unwrap_or_default().to_owned();
        name.push("-files");
        let root = snapshots.with_file_name(name);
        let left = std::fs::read_dir(&root).into_iter().flatten().flatten();
        for entry in left.filter(|entry| entry.file_name().as_bytes().starts_with(MAKING.as_bytes())) {
            if let Err(e) = std::fs::remove_dir_all(entry.path()) {
                tracing::warn!("cannot remove {}: {e}", entry.path().display());
            }
        }
        LookedAt { root }
    }

    fn of(&self, digest: &str) -> PathBuf {
        self.root.join(format!("{}{FORM}", plain(digest)))
    }

    /// The directory of an image, made where it is missing.
    pub async fn get(&self, layers: &dyn Layers, digest: &str) -> Result<PathBuf, Failure> {
        let place = self.of(digest);
        if place.is_dir() {
            return Ok(place);
        }
        let mut files = Vec::new();
        for path in FILES {
            if let Some(data) = layers.file(digest, path).await? {
                files.push((path, data));
            }
        }
        let volumes = layers.volumes(digest).await?;
        self.make(volumes, files, place.clone()).await?;
        Ok(place)
    }

    /// All of an image, at `place`, which is on the same file system; made where it is missing.
    pub async fn whole(&self, layers: &dyn Layers, digest: &str, place: PathBuf) -> Result<PathBuf, Failure> {
        if !place.is_dir() {
            let whole = layers.whole(digest).await?;
            self.make(whole, Vec::new(), place.clone()).await?;
        }
        Ok(place)
    }

    async fn make(
        &self,
        part: Part,
        files: Vec<(&'static str, Vec<u8>)>,
        place: PathBuf,
    ) -> Result<(), Failure> {
        let root = self.root.clone();
        let runtime = tokio::runtime::Handle::current();
        thaw_sandbox::blocking::blocking(move || {
            let fail = |e: io::Error| Failure::system(format!("cannot make {}", place.display()), &e);
            let draft = begin(&root).map_err(fail)?;
            copied::copy(draft.path(), &part, &runtime)?;
            add(draft.path(), &files).map_err(fail)?;
            copied::finish(draft.path(), &part).map_err(fail)?;
            end(draft, &place).map_err(fail)
        })
        .await
    }

    /// Nobody needs those of an image any more.
    pub fn forget(&self, digest: &str) {
        for place in [self.of(digest), self.root.join(plain(digest))] {
            match std::fs::remove_dir_all(&place) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!("cannot remove {}: {e}", place.display());
                }
                _ => {}
            }
        }
    }
}

fn plain(digest: &str) -> String {
    digest.replace(':', "-")
}

fn begin(root: &Path) -> io::Result<tempfile::TempDir> {
    std::fs::create_dir_all(root)?;
    std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o700))?;
    tempfile::Builder::new().prefix(MAKING).tempdir_in(root)
}

/// Adds those that are of no volume. An image that has one has directories above it, not links.
fn add(draft: &Path, files: &[(&str, Vec<u8>)]) -> io::Result<()> {
    for (path, data) in files {
        let path = draft.join(path);
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        if std::fs::symlink_metadata(&path).is_err() {
            std::fs::write(path, data)?;
        }
    }
    Ok(())
}

fn end(draft: tempfile::TempDir, place: &Path) -> io::Result<()> {
    // As an image's root has it: whoever is root in a container may be nobody here.
    std::fs::set_permissions(draft.path(), std::fs::Permissions::from_mode(0o755))?;
    match std::fs::rename(draft.path(), place) {
        Ok(()) => {
            // It is not there any more to be removed.
            let _ = draft.keep();
            Ok(())
        }
        // Somebody else was faster with the same.
        Err(_) if place.is_dir() => Ok(()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
#[path = "looked_at_test.rs"]
mod tests;
