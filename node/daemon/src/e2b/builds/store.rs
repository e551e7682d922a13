//! The templates that callers build, on disk below `THAW_DATA/e2b/templates` (docs/e2b.md has the format).
//!
//! Invariants: a record is replaced by a rename, so a reader never sees a part of one; what is in memory is on disk; a directory without a
//! record belongs to no template, and is removed by the next thawd.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::random;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::tenant::Tenant;
use thaw_sys::lock::Lock;

use super::super::failure::Failure;
use super::super::moment::now_s;
use super::log::{Entry, MAX_FILE};
use super::names::check_count;
use super::record::{Build, MAX_BUILDS, Reason, Shape, Status, Template};

/// Most templates of a tenant.
pub const MAX_TEMPLATES: usize = 100;
/// After how many seconds a build that waits counts as one that its client never starts. All builds of a tenant take less.
const MAX_WAIT_S: u64 = 24 * 3600;
/// The record in the directory of a template.
const RECORD: &str = "template.json";
/// A record that is being written.
const NEW: &str = "template.new";

/// The templates, in memory and on disk.
#[derive(Debug)]
pub struct TemplateStore {
    root: PathBuf,
    by_id: Mutex<BTreeMap<String, Arc<Template>>>,
    /// Held by who changes a template.
    turn: tokio::sync::Mutex<()>,
    /// Whether every record could be read.
    is_whole: bool,
}

impl TemplateStore {
    /// Reads all templates below a directory, which is made if there is none. A build that was not ready has failed: the thawd that made
    /// it has ended. Blocks.
    ///
    /// # Errors
    /// The directory cannot be read or written.
    pub fn open(root: PathBuf) -> Result<TemplateStore, Error> {
        let read = read_all(&root);
        let (by_id, is_whole) =
            read.map_err(|e| Error::system(format!("cannot use {}", root.display()), &e))?;
        Ok(TemplateStore {
            root,
            by_id: Mutex::new(by_id),
            turn: tokio::sync::Mutex::default(),
            is_whole,
        })
    }

    /// All of them, ordered by their ids.
    pub fn all(&self) -> Vec<Arc<Template>> {
        self.by_id.locked().values().cloned().collect()
    }

    /// A template that exists for a caller, by its id or its name. A name is one of the caller's tenant.
    pub fn find(&self, wanted: &str, viewer: &Viewer) -> Option<Arc<Template>> {
        let by_id = self.by_id.locked();
        let named = || {
            let is_it =
                |template: &&Arc<Template>| template.name == wanted && template.tenant == viewer.tenant;
            by_id.values().find(is_it)
        };
        let found = by_id.get(wanted).or_else(named);
        found.filter(|found| found.exists_for(viewer)).cloned()
    }

    /// The same, and public templates of other tenants by their ids: what a caller can create sandboxes from.
    pub fn find_usable(&self, wanted: &str, viewer: &Viewer) -> Option<Arc<Template>> {
        let public = || {
            self.by_id
                .locked()
                .get(wanted)
                .filter(|found| found.public)
                .cloned()
        };
        self.find(wanted, viewer).or_else(public)
    }

    /// Whether a build that is not over, or one that is ready, needs this snapshot. `of` is the build that made it.
    pub fn needs(&self, snapshot: &str, of: Option<&str>) -> bool {
        let of_build = |build: &Build| {
            build.snapshot.as_deref() == Some(snapshot)
                || (of == Some(build.id.as_str()) && !build.status.is_final())
        };
        let by_id = self.by_id.locked();
        by_id
            .values()
            .any(|template| template.builds.iter().any(of_build))
    }

    /// Whether it has all templates that are on the disk: a record that cannot be read may name snapshots.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Adds a build to the tenant's template of this name, which is made if there is none.
    ///
    /// # Errors
    /// There are too many templates, or too many builds that are not over; or the record cannot be written.
    pub async fn request(
        &self,
        tenant: Option<Tenant>,
        name: &str,
        tags: Vec<String>,
        machine: Shape,
    ) -> Result<(Arc<Template>, String), Failure> {
        let _turn = self.turn.lock().await;
        let mine: Vec<_> = self
            .all()
            .into_iter()
            .filter(|one| one.tenant == tenant)
            .collect();
        let now = now_s();
        let mut template = match mine.iter().find(|one| one.name == name) {
            Some(found) => Template::clone(found),
            None if mine.len() >= MAX_TEMPLATES => {
                let why =
                    format!("there are {MAX_TEMPLATES} templates already, which is the most: delete one");
                return Err(Failure::Conflict(why));
            }
            None => Template {
                id: new_template_id()?,
                tenant,
                name: name.to_owned(),
                public: false,
                created: now,
                updated: now,
                tags: BTreeMap::new(),
                builds: Vec::new(),
            },
        };
        let abandoned = |build: &Build| build.status == Status::Waiting && build.created + MAX_WAIT_S < now;
        fail_builds(&mut template, abandoned, "it was not started within a day");
        let all: BTreeSet<&String> = template.tags.keys().chain(&tags).collect();
        check_count(all.len())?;
        let open = template.builds.iter().filter(|build| !build.status.is_final());
        if open.count() >= MAX_BUILDS / 2 {
            let why = format!("{} builds of template {name:?} are not over", MAX_BUILDS / 2);
            return Err(Failure::Conflict(format!("{why}: wait for them, or delete it")));
        }
        let id = new_build_id()?;
        template.builds.push(Build {
            id: id.clone(),
            status: Status::Waiting,
            tags,
            machine,
            created: now,
            updated: now,
            finished: None,
            snapshot: None,
            key: None,
            context: Default::default(),
            reason: None,
        });
        template.tidy();
        Ok((self.keep(template).await?, id))
    }

    /// Changes a template. If `edit` fails, nothing is changed.
    ///
    /// # Errors
    /// [`Failure::NotFound`]: it does not exist any more. Those of `edit`; the record cannot be written.
    pub async fn change<T>(
        &self,
        id: &str,
        edit: impl FnOnce(&mut Template) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let _turn = self.turn.lock().await;
        let before = self.by_id.locked().get(id).cloned();
        let before = before.ok_or_else(|| no_template(id))?;
        let mut template = Template::clone(&before);
        let done = edit(&mut template)?;
        if template != *before {
            self.keep(template).await?;
        }
        Ok(done)
    }

    /// Writes a template, then shows it. The caller has the turn.
    async fn keep(&self, template: Template) -> Result<Arc<Template>, Failure> {
        let (directory, template) = (self.root.join(&template.id), Arc::new(template));
        let written = template.clone();
        blocking(move || {
            let fail = |e: io::Error| Error::system(format!("cannot write into {}", directory.display()), &e);
            write(&directory, &written).map_err(fail)
        })
        .await?;
        self.by_id.locked().insert(template.id.clone(), template.clone());
        Ok(template)
    }

    /// Removes a template. Its snapshots are the caller's to remove.
    ///
    /// # Errors
    /// See [`TemplateStore::change`].
    pub async fn remove(&self, id: &str) -> Result<Arc<Template>, Failure> {
        let _turn = self.turn.lock().await;
        let removed = self.by_id.locked().get(id).cloned();
        let removed = removed.ok_or_else(|| no_template(id))?;
        let directory = self.root.join(id);
        blocking(move || {
            match fs::remove_file(directory.join(RECORD)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::system(
                        format!("cannot remove {}", directory.display()),
                        &e,
                    ));
                }
                _ => {}
            }
            // Without the record, the next thawd removes the rest. A build that ends now may be writing its log there.
            if let Err(e) = fs::remove_dir_all(&directory) {
                tracing::warn!("{} is not removed completely: {e}", directory.display());
            }
            Ok(())
        })
        .await?;
        self.by_id.locked().remove(id);
        Ok(removed)
    }

    /// Keeps the log of a build that is over, and removes those of builds that the template does not have any more.
    pub async fn keep_log(&self, template: &str, build: &str, entries: Vec<Entry>) {
        let directory = self.root.join(template);
        let file = log_file(&directory, build);
        let Some(known) = self.by_id.locked().get(template).cloned() else {
            return;
        };
        let written = blocking(move || {
            let fail = |e: io::Error| Error::system(format!("cannot write {}", file.display()), &e);
            fs::write(&file, Entry::lines(&entries)).map_err(fail)?;
            remove_logs(&directory, &known).map_err(fail)
        });
        if let Err(e) = written.await {
            tracing::warn!(template, build, "the log of a build is lost: {e}");
        }
    }

    /// The log of a build that is over. Empty if there is none.
    pub async fn log(&self, template: &str, build: &str) -> Vec<Entry> {
        let file = log_file(&self.root.join(template), build);
        let read = blocking(move || {
            let is_small = fs::metadata(&file).is_ok_and(|metadata| metadata.len() <= MAX_FILE);
            let text = if is_small {
                fs::read(&file).unwrap_or_default()
            } else {
                Vec::new()
            };
            Ok(Entry::read(&text))
        });
        read.await.unwrap_or_default()
    }
}

/// The error for a template that does not exist for the caller.
pub fn no_template(wanted: &str) -> Failure {
    Failure::NotFound(format!("template {wanted:?} was not found"))
}

fn log_file(directory: &Path, build: &str) -> PathBuf {
    directory.join(format!("{build}.log"))
}

/// Removes the logs of builds that a template does not have.
fn remove_logs(directory: &Path, template: &Template) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let build = name.to_str().and_then(|name| name.strip_suffix(".log"));
        if build.is_some_and(|build| template.build(build).is_none()) {
            fs::remove_file(directory.join(&name))?;
        }
    }
    Ok(())
}

/// All templates, and whether every record could be read.
fn read_all(root: &Path) -> io::Result<(BTreeMap<String, Arc<Template>>, bool)> {
    DirBuilder::new().recursive(true).mode(0o700).create(root)?;
    let (mut by_id, mut is_whole) = (BTreeMap::new(), true);
    for entry in fs::read_dir(root)? {
        let directory = entry?.path();
        if !directory.is_dir() {
            continue;
        }
        match thaw_records::read::<Template>(&directory.join(RECORD)) {
            Ok(mut template) if directory.ends_with(&template.id) => {
                let why = "thawd ended before the build did: build the template again";
                if fail_builds(&mut template, |build| !build.status.is_final(), why) {
                    write(&directory, &template)?;
                }
                by_id.insert(template.id.clone(), Arc::new(template));
            }
            Ok(_) => {
                tracing::warn!("{} has the record of another template", directory.display());
                is_whole = false;
            }
            Err(thaw_records::RecordError::Missing) => fs::remove_dir_all(&directory)?,
            Err(e) => {
                tracing::warn!("the template in {} is not listed: {e}", directory.display());
                is_whole = false;
            }
        }
    }
    Ok((by_id, is_whole))
}

/// Records that some builds have failed before their first step. Returns whether there were any.
fn fail_builds(template: &mut Template, which: impl Fn(&Build) -> bool, why: &str) -> bool {
    let mut any = false;
    for build in template.builds.iter_mut().filter(|build| which(build)) {
        build.status = Status::Error;
        build.finished = Some(now_s());
        build.reason = Some(Reason {
            message: why.to_owned(),
            step: "base".into(),
        });
        any = true;
    }
    any
}

/// Writes a record, durably.
fn write(directory: &Path, template: &Template) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let new = directory.join(NEW);
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(&thaw_records::encode(template)?)?;
    file.sync_all()?;
    fs::rename(&new, directory.join(RECORD))?;
    File::open(directory)?.sync_all()
}

/// 20 hexadecimal digits: not the 12 of a snapshot's id.
fn new_template_id() -> Result<String, Error> {
    let bytes = random::<10>().map_err(|e| Error::system("cannot read random bytes", &e))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A random UUID (RFC 9562, version 4): clients parse it.
fn new_build_id() -> Result<String, Error> {
    let mut bytes = random::<16>().map_err(|e| Error::system("cannot read random bytes", &e))?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &digits[range]);
    Ok(parts.join("-"))
}

#[cfg(test)]
#[path = "store_test.rs"]
mod tests;
