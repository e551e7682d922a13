//! Writing into an OCI image layout directory.
//!
//! Invariants: a file under `blobs/sha256/` is complete from the moment it has its name. `index.json` is always
//! complete, and writers of one directory take turns. A process that writes a blob holds a shared lock on
//! `blobs/sha256`, so that unfinished files that exist while the lock is free were left by killed processes.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::{MAX_MANIFEST, OCI_INDEX};
use crate::source::section::read_limited;

use super::Document;
use super::content::Content;

const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// How the name of a file begins that is being written.
const WRITING: &str = ".writing-";
const MARKER: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;

#[derive(Clone)]
pub struct Writer {
    directory: PathBuf,
}

impl Writer {
    pub async fn open(directory: PathBuf) -> Result<Self, Error> {
        let writer = Self { directory };
        let made = writer.clone();
        blocking(move || made.prepare()).await?;
        Ok(writer)
    }

    fn blobs(&self) -> PathBuf {
        self.directory.join("blobs/sha256")
    }

    fn prepare(&self) -> Result<(), Error> {
        let blobs = self.blobs();
        let made = DirBuilder::new().recursive(true).mode(0o755).create(&blobs);
        made.map_err(|error| Error::io(&blobs, error))?;
        reach(Failpoint::LayoutMade);
        let lock = self.lock()?;
        self.sweep()?;
        let marker = self.directory.join("oci-layout");
        if !marker.exists() {
            self.replace(&marker, MARKER.as_bytes())?;
        }
        if !self.directory.join("index.json").exists() {
            let empty = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []});
            self.replace(&self.directory.join("index.json"), empty.to_string().as_bytes())?;
        }
        drop(lock);
        Ok(())
    }

    /// Held by a process while it changes the index.
    fn lock(&self) -> Result<File, Error> {
        let locked = locked(&self.directory, FlockOperation::LockExclusive);
        locked.map_err(|error| Error::io(&self.directory, error))
    }

    /// Removes the unfinished files of killed writers. The caller holds the lock of the index. Blobs are checked only while none is being
    /// written.
    fn sweep(&self) -> Result<(), Error> {
        remove_writing(&self.directory).map_err(|error| Error::io(&self.directory, error))?;
        let blobs = self.blobs();
        match locked(&blobs, FlockOperation::NonBlockingLockExclusive) {
            Ok(_alone) => remove_writing(&blobs).map_err(|error| Error::io(&blobs, error)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(Error::io(&blobs, error)),
        }
    }

    /// Replaces a file atomically.
    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        self.write(path, |file| {
            file.write_all(bytes).map_err(|error| Error::io(path, error))
        })
    }

    fn write(&self, path: &Path, fill: impl FnOnce(&mut File) -> Result<(), Error>) -> Result<(), Error> {
        let failed = |error: io::Error| Error::io(path, error);
        let parent = path.parent().unwrap_or(&self.directory);
        let blobs = self.blobs();
        // The writer of the index holds its lock.
        let _writing = match parent == blobs {
            true => Some(locked(&blobs, FlockOperation::LockShared).map_err(failed)?),
            false => None,
        };
        let mut file = NamedTempFile::with_prefix_in(WRITING, parent).map_err(failed)?;
        reach(Failpoint::LayoutFileMade);
        fill(file.as_file_mut())?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(mode).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        reach(Failpoint::LayoutFileWritten);
        file.persist(path).map_err(|error| failed(error.error))?;
        reach(Failpoint::LayoutFilePlaced);
        File::open(parent)
            .and_then(|parent| parent.sync_all())
            .map_err(failed)
    }

    pub fn blob_exists(&self, digest: &Digest) -> Result<Option<u64>, Error> {
        let path = self.blobs().join(digest.hex());
        match std::fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(&path, error)),
        }
    }

    pub async fn upload(&self, content: Content) -> Result<(), Error> {
        let writer = self.clone();
        blocking(move || {
            let path = writer.blobs().join(content.digest.hex());
            writer.write(&path, |file| content.read(|bytes| file.write_all(bytes)))
        })
        .await
    }

    pub async fn manifest(&self, tag: Option<&str>, document: &Document) -> Result<(), Error> {
        let (writer, tag, document) = (self.clone(), tag.map(str::to_owned), document.clone());
        blocking(move || {
            writer.replace(&writer.blobs().join(document.digest.hex()), &document.bytes)?;
            writer.list(tag.as_deref(), &document)
        })
        .await
    }

    /// Names the manifest in `index.json`: under its tag, which it takes from another, or only as being there.
    fn list(&self, tag: Option<&str>, document: &Document) -> Result<(), Error> {
        let _lock = self.lock()?;
        let path = self.directory.join("index.json");
        let what = path.display().to_string();
        let file = File::open(&path).map_err(|error| Error::io(&path, error))?;
        let bytes = read_limited(&what, &path, file, MAX_MANIFEST)?;
        let mut index: Value =
            serde_json::from_slice(&bytes).map_err(|error| Error::malformed(&what, error))?;
        let Some(manifests) = index.get_mut("manifests").and_then(Value::as_array_mut) else {
            return Err(Error::malformed(what, "it is no index: it has no manifests"));
        };
        let digest = json!(document.digest);
        let name = |entry: &Value| entry["annotations"][REF_NAME].as_str().map(str::to_owned);
        let mut descriptor = document.descriptor(document.subject.is_some());
        match tag {
            Some(tag) => {
                manifests.retain(|entry| {
                    let unnamed = entry["digest"] == digest && name(entry).is_none();
                    name(entry).as_deref() != Some(tag) && !unnamed
                });
                if !descriptor["annotations"].is_object() {
                    descriptor["annotations"] = json!({});
                }
                descriptor["annotations"][REF_NAME] = json!(tag);
            }
            None if manifests.iter().any(|entry| entry["digest"] == digest) => return Ok(()),
            None => {
                if let Some(annotations) = descriptor["annotations"].as_object_mut() {
                    annotations.remove(REF_NAME);
                }
            }
        }
        manifests.push(descriptor);
        let bytes = serde_json::to_vec(&index).map_err(|error| Error::malformed(&what, error))?;
        self.replace(&path, &bytes)
    }
}

/// A directory, locked.
fn locked(directory: &Path, how: FlockOperation) -> io::Result<File> {
    let file = File::open(directory)?;
    rustix::io::retry_on_intr(|| flock(&file, how))?;
    Ok(file)
}

fn remove_writing(directory: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(WRITING.as_bytes())
        {
            std::fs::remove_file(entry.path())?;
            reach(Failpoint::LayoutSwept);
        }
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Error::Cancelled)?
}
