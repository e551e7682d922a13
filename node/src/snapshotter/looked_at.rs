//! The files of an image that are looked at on the host: containerd and its clients mount a container's root to look its user
//! and groups up. So these are had from the image, and put where an overlay can have them.
//!
//! Invariant: a directory named after an image's digest is whole, or not there: it is made beside and renamed.

use std::io;
use std::path::{Path, PathBuf};

use super::remote::Layers;
use crate::exit::Failure;

/// What is looked into, all of it text.
pub const FILES: [&str; 2] = ["etc/passwd", "etc/group"];
/// Larger ones are left out.
pub const MOST: u64 = 1 << 20;

/// Where they are for each image.
#[derive(Clone, Debug)]
pub struct LookedAt {
    root: PathBuf,
}

impl LookedAt {
    /// Beside the snapshots, whose directory holds nothing else.
    pub fn beside(snapshots: &Path) -> LookedAt {
        let mut name = snapshots.file_name().unwrap_or_default().to_owned();
        name.push("-files");
        LookedAt {
            root: snapshots.with_file_name(name),
        }
    }

    fn of(&self, digest: &str) -> PathBuf {
        self.root.join(digest.replace(':', "-"))
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
        let made = place.clone();
        let root = self.root.clone();
        crate::sandbox::blocking(move || {
            let fail = |e: io::Error| Failure::system(format!("cannot make {}", made.display()), &e);
            make(&root, &made, &files).map_err(fail)
        })
        .await?;
        Ok(place)
    }

    /// Nobody needs those of an image any more.
    pub fn forget(&self, digest: &str) {
        let place = self.of(digest);
        match std::fs::remove_dir_all(&place) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {e}", place.display());
            }
            _ => {}
        }
    }
}

fn make(root: &Path, place: &Path, files: &[(&str, Vec<u8>)]) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(root)?;
    let draft = tempfile::Builder::new().prefix(".making-").tempdir_in(root)?;
    for (path, data) in files {
        let path = draft.path().join(path);
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        std::fs::write(path, data)?;
    }
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
