//! The archives that clients upload for the COPY steps of builds, below `THAW_DATA/e2b/uploads/TENANT/HASH`.
//!
//! A client names an archive by a hash of the files in it, which thawd cannot check: so each tenant has its own, and no build of another
//! uses them. Invariants: a file with a hash as its name is complete; an archive that no build has asked for within [`KEPT`] goes.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use axum::body::BodyDataStream;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::id::new_id;
use thaw_sandbox::tenant::Tenant;
use thaw_sys::lock::Lock;
use tokio::io::AsyncWriteExt;

use super::super::failure::Failure;
use super::step::is_hash;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::transfer::next_data;

/// Largest archive, bytes.
pub const MAX_ARCHIVE: u64 = 2 << 30;
/// Most bytes of all archives of a tenant.
pub const MAX_OF_TENANT: u64 = 8 << 30;
/// Most archives of a tenant.
pub const MOST: usize = 1000;
/// Most archives that a tenant uploads at once.
pub const MOST_AT_ONCE: usize = 4;
/// How long an archive is kept after it was uploaded or asked for.
pub const KEPT: Duration = Duration::from_secs(24 * 3600);
/// The directory of callers without a tenant. No tenant has such a name.
const NOBODY: &str = "_";
/// What begins the name of an archive that is being uploaded.
const PART: &str = "part-";

/// The uploads.
#[derive(Debug)]
pub struct Uploads {
    root: PathBuf,
    receiving: Mutex<BTreeMap<PathBuf, Receiving>>,
}

/// What a tenant uploads now.
#[derive(Clone, Copy, Debug, Default)]
struct Receiving {
    count: usize,
    bytes: u64,
}

impl Uploads {
    /// Those below a directory, which is made if there is none. Removes what is old, and what was not complete when thawd ended. Blocks.
    ///
    /// # Errors
    /// The directory cannot be read or written.
    pub fn open(root: PathBuf) -> Result<Uploads, Error> {
        let opened = make_directory(&root).and_then(|()| sweep(&root, true));
        opened.map_err(|e| Error::system(format!("cannot use {}", root.display()), &e))?;
        Ok(Uploads {
            root,
            receiving: Mutex::default(),
        })
    }

    /// The archive of a hash, if it is there. It is kept for longer then.
    pub async fn find(&self, tenant: Option<&Tenant>, hash: &str) -> Option<PathBuf> {
        let file = self.file(tenant, hash)?;
        let found = blocking(move || {
            let touched = File::options().append(true).open(&file);
            let touched = touched.and_then(|file| file.set_modified(SystemTime::now()));
            Ok(touched.is_ok().then_some(file))
        });
        found.await.ok().flatten()
    }

    /// Where the archive of a hash is.
    fn file(&self, tenant: Option<&Tenant>, hash: &str) -> Option<PathBuf> {
        is_hash(hash).then(|| self.directory(tenant).join(hash))
    }

    fn directory(&self, tenant: Option<&Tenant>) -> PathBuf {
        self.root.join(tenant.map_or(NOBODY, Tenant::as_str))
    }

    /// Removes what is old.
    pub async fn expire(&self) {
        let root = self.root.clone();
        let expired = blocking(move || {
            sweep(&root, false).map_err(|e| Error::system(format!("cannot read {}", root.display()), &e))
        });
        if let Err(e) = expired.await {
            tracing::warn!("uploads of E2B's API do not expire: {e}");
        }
    }

    /// Receives the archive of a hash, which replaces an older one when it is complete.
    ///
    /// # Errors
    /// It is too large, there are too many, or it breaks off. Nothing is left of it then.
    pub async fn receive(
        &self,
        tenant: Option<&Tenant>,
        hash: &str,
        length: u64,
        mut body: BodyDataStream,
    ) -> Result<(), Failure> {
        let file = self.file(tenant, hash);
        let file = file.ok_or_else(|| Failure::Bad("the hash is not 64 hexadecimal digits".into()))?;
        if length > MAX_ARCHIVE {
            let why = format!("the archive has {length} bytes; it may have {MAX_ARCHIVE}");
            return Err(Failure::Refused(Refusal::new(ApiCode::BodyTooLarge, why)));
        }
        let directory = self.directory(tenant);
        let place = self.enter(&directory, length)?;
        // Read after it was counted: so no upload that ends meanwhile is in neither.
        let counted = directory.clone();
        place.check(blocking(move || Ok(Stored::of(&counted))).await?)?;
        let id = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
        let part = Part(directory.join(format!("{PART}{id}")));
        let path = part.0.clone();
        let open = blocking(move || {
            let made = make_directory(&directory).and_then(|()| File::create_new(&path));
            made.map_err(|e| Error::system(format!("cannot write {}", path.display()), &e))
        });
        let mut writing = tokio::fs::File::from_std(open.await?);
        let fail = |e: io::Error| Error::system("cannot write an upload", &e);
        let mut written = 0;
        while let Some(data) = next_data(&mut body).await? {
            written += data.len() as u64;
            if written > length {
                break;
            }
            writing.write_all(&data).await.map_err(fail)?;
        }
        if written != length {
            return Err(Failure::Bad(format!(
                "the body has not the {length} bytes that Content-Length says"
            )));
        }
        writing.flush().await.map_err(fail)?;
        drop(writing);
        blocking(move || fs::rename(&part.0, &file).map_err(fail)).await?;
        Ok(())
    }

    /// Counts an upload until the result is dropped.
    fn enter(&self, directory: &Path, bytes: u64) -> Result<Place<'_>, Failure> {
        let mut receiving = self.receiving.locked();
        let now = receiving.get(directory).copied().unwrap_or_default();
        if now.count == MOST_AT_ONCE {
            let why =
                format!("{MOST_AT_ONCE} uploads are in progress already, which is the most of a tenant");
            return Err(Failure::Refused(Refusal::new(ApiCode::TooMany, why)));
        }
        let entry = receiving.entry(directory.to_owned()).or_default();
        entry.count += 1;
        entry.bytes += bytes;
        Ok(Place {
            uploads: self,
            directory: directory.to_owned(),
            bytes,
        })
    }
}

/// The place of an upload among those in progress.
#[derive(Debug)]
struct Place<'a> {
    uploads: &'a Uploads,
    directory: PathBuf,
    bytes: u64,
}

impl Place<'_> {
    /// Checks that the tenant has room for all uploads in progress beside the complete archives.
    fn check(&self, stored: Stored) -> Result<(), Failure> {
        let receiving = self.uploads.receiving.locked();
        let now = receiving.get(&self.directory).copied().unwrap_or_default();
        let is_full = stored.bytes.saturating_add(now.bytes) > MAX_OF_TENANT;
        if is_full || stored.count + now.count > MOST {
            let why = format!(
                "the tenant's uploads would be more than {MOST}, or have more than {MAX_OF_TENANT} bytes: those not used for {} hours are removed",
                KEPT.as_secs() / 3600
            );
            return Err(Failure::Conflict(why));
        }
        Ok(())
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut receiving = self.uploads.receiving.locked();
        if let Some(entry) = receiving.get_mut(&self.directory) {
            entry.count -= 1;
            entry.bytes -= self.bytes;
            if entry.count == 0 {
                receiving.remove(&self.directory);
            }
        }
    }
}

/// A file that is removed unless it was renamed.
struct Part(PathBuf);

impl Drop for Part {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The complete archives of a tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Stored {
    count: usize,
    bytes: u64,
}

impl Stored {
    /// Those in a directory. Blocks.
    fn of(directory: &Path) -> Stored {
        let mut stored = Stored::default();
        // A directory that cannot be read has none.
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let size = entry.metadata().map_or(0, |metadata| metadata.len());
            if !is_part(&entry) {
                stored.count += 1;
                stored.bytes = stored.bytes.saturating_add(size);
            }
        }
        stored
    }
}

fn is_part(entry: &fs::DirEntry) -> bool {
    entry.file_name().as_encoded_bytes().starts_with(PART.as_bytes())
}

/// Removes old archives of all tenants; and also incomplete ones, if no one writes them.
fn sweep(root: &Path, with_parts: bool) -> io::Result<()> {
    let now = SystemTime::now();
    for tenant in fs::read_dir(root)?.flatten() {
        // Whatever is no directory is none of a tenant.
        for entry in fs::read_dir(tenant.path()).into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old = modified.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > KEPT));
            let goes = if is_part(&entry) { with_parts } else { is_old };
            if goes {
                // Another may have removed it.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "uploads_test.rs"]
mod tests;
