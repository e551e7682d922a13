//! The files of an image that are read on the host. containerd and its clients mount a container's root to look up its user and groups,
//! and CRI copies from it what the image has at the volumes of its config. So these files are copied out of the image into a directory
//! that an overlay can use. If containerd itself unpacks layers onto an image, all of its files are copied.
//!
//! Invariant: the directory of an image is complete or does not exist: it is made under another name and renamed. Only root may enter
//! it, because an image's programs keep their modes, setuid included.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use thaw_sandbox::error::Error;
use thaw_sandbox::images::part::Part;

use super::copy_out;
use super::remote::Layers;

/// The files that are read, all of them text.
pub const FILES: [&str; 2] = ["etc/passwd", "etc/group"];
/// The suffix of each image's directory. Directories without it are from earlier versions, which left volumes out.
const FORM: &str = ".volumes";
/// The prefix of a directory that is being made.
const MAKING: &str = ".making-";

/// The directories, one for each image.
#[derive(Clone, Debug)]
pub struct HostFiles {
    root: PathBuf,
}

impl HostFiles {
    /// Opens them beside the directory of the snapshots, which holds nothing else. Removes what a thawd that died had begun.
    pub fn beside(snapshots: &Path) -> HostFiles {
        let mut name = snapshots.file_name().unwrap_or_default().to_owned();
        name.push("-files");
        let root = snapshots.with_file_name(name);
        let left = std::fs::read_dir(&root).into_iter().flatten().flatten();
        for entry in left.filter(|entry| entry.file_name().as_bytes().starts_with(MAKING.as_bytes())) {
            if let Err(e) = std::fs::remove_dir_all(entry.path()) {
                tracing::warn!("cannot remove {}: {e}", entry.path().display());
            }
        }
        HostFiles { root }
    }

    fn of(&self, digest: &str) -> PathBuf {
        self.root.join(format!("{}{FORM}", plain(digest)))
    }

    /// The directory of an image. Makes it if it is missing.
    pub async fn get(&self, layers: &dyn Layers, digest: &str) -> Result<PathBuf, Error> {
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

    /// All files of an image at `place`, which is on the same file system. Makes it if it is missing.
    pub async fn whole(&self, layers: &dyn Layers, digest: &str, place: PathBuf) -> Result<PathBuf, Error> {
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
    ) -> Result<(), Error> {
        let root = self.root.clone();
        let runtime = tokio::runtime::Handle::current();
        thaw_sandbox::blocking::blocking(move || {
            let fail = |e: io::Error| Error::system(format!("cannot make {}", place.display()), &e);
            let draft = begin(&root).map_err(fail)?;
            copy_out::copy(draft.path(), &part, &runtime)?;
            add(draft.path(), &files).map_err(fail)?;
            copy_out::finish(draft.path(), &part).map_err(fail)?;
            end(draft, &place).map_err(fail)
        })
        .await
    }

    /// Removes the directory of an image that no snapshot needs any more.
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

/// Adds the files that are in no volume. The parents of a volume are directories, not links.
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
    // The mode of an image's root: a container's root user may have another user ID here.
    std::fs::set_permissions(draft.path(), std::fs::Permissions::from_mode(0o755))?;
    match std::fs::rename(draft.path(), place) {
        Ok(()) => {
            // Nothing is left to be removed.
            let _ = draft.keep();
            Ok(())
        }
        // Another request has made the same directory meanwhile.
        Err(_) if place.is_dir() => Ok(()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
#[path = "host_files_test.rs"]
mod tests;
