//! Making a template: once, however many ask at once.
//!
//! The machine itself is booted and frozen by the caller; here is what is around it: the lock, the
//! directory, the hashes, the signature. Invariant: whatever ends a build, the store has the whole template or nothing.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use thaw_failpoint::{Failpoint, reach};

use super::Shape;
use super::command_line::{command_line, is_bare};
use super::key::{Ingredients, Key, Processor};
use super::store::{Found, Templates};
use crate::error::{Error, ErrorKind};
use crate::snapshot::{
    Cpu, Draft, Kind, Machine, Manifest, Registered, SigningKey, SnapshotError, Subject, inventory,
};

/// All that decides what a template becomes, but for the files of [`crate::paths::Paths`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    pub shape: Shape,
    /// Of the guest kernel.
    pub command_line: String,
}

impl Recipe {
    /// What a template of this shape is booted with.
    pub fn of(shape: Shape) -> Recipe {
        Recipe {
            shape,
            command_line: command_line(),
        }
    }
}

/// Where the VMM is to write: empty files, open for reading and writing.
#[derive(Debug)]
pub struct FrozenInto {
    pub state: File,
    pub memory: File,
    /// May be left empty: then the template has no working set.
    pub working_set: File,
}

/// How far a build is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Another process builds the same template; it is waited for.
    Waiting,
    /// A guest boots.
    Booting,
    /// Its agent has rung: memory and state are written.
    Freezing,
    /// A machine was lost and another is made: why.
    Again(String),
    /// What was written is hashed.
    Hashing,
    /// The template is there.
    Ready,
}

/// Who is told how far a build is.
pub type Progress = Arc<dyn Fn(Step) + Send + Sync>;

/// A template ready to be thawed.
#[derive(Clone, Debug)]
pub struct Template {
    pub key: Key,
    pub registered: Arc<Registered>,
    /// It was not there and had to be built.
    pub built: bool,
}

impl Templates {
    /// The template of this shape, if this process holds it already. Blocks as [`Templates::ingredients`] does.
    pub fn held(&self, shape: Shape) -> Option<Arc<Registered>> {
        let recipe = Recipe::of(shape);
        let ingredients = self.ingredients(&recipe).ok()?;
        let registered = self.in_memory(&ingredients.key())?;
        must_be(&subject(&recipe, &ingredients), &registered).ok()?;
        Some(registered)
    }

    /// The template of a recipe, made with `freeze` if it is not there.
    pub(crate) async fn get_by(
        &self,
        recipe: Recipe,
        key: Option<SigningKey>,
        progress: &Progress,
        freeze: impl AsyncFnOnce(FrozenInto) -> Result<(), Error>,
    ) -> Result<Template, Error> {
        let (store, asked) = (self.clone(), recipe.clone());
        let (ingredients, found) = blocking(move || {
            let ingredients = store.ingredients(&asked)?;
            let found = store.look(&ingredients.key())?;
            Ok((ingredients, found))
        })
        .await?;
        let name = ingredients.key();
        let wanted = subject(&recipe, &ingredients);
        let there = |registered: Arc<Registered>| {
            must_be(&wanted, &registered)?;
            Ok(Template {
                key: name.clone(),
                registered,
                built: false,
            })
        };
        match (found, self.may_build(key.as_ref())) {
            (Found::Whole(registered), _) => return there(registered),
            (_, Ok(())) => {}
            (Found::Absent, Err(refused)) => return Err(refused),
            // What is wrong with it says more than why no other can be built.
            (Found::Damaged(damaged), Err(_)) => return Err(damaged),
        }
        let (store, wanted, told) = (self.clone(), name.clone(), progress.clone());
        let (lock, found) = blocking(move || {
            let lock = store.lock(&wanted, &told)?;
            reach(Failpoint::TemplateLocked);
            // Whoever had the lock before may have built it, or built it again.
            let found = store.look(&wanted)?;
            if let Found::Damaged(damaged) = &found {
                tracing::warn!("{}: the template is removed and built again", damaged.what);
                store.remove(&wanted)?;
            }
            Ok((lock, found))
        })
        .await?;
        let template = match found {
            Found::Whole(registered) => there(registered),
            Found::Absent | Found::Damaged(_) => self.build(recipe, ingredients, key, progress, freeze).await,
        };
        drop(lock);
        template
    }

    /// Building what would then be refused is told before it is done.
    fn may_build(&self, key: Option<&SigningKey>) -> Result<(), Error> {
        let trusted = self.registry().trusted();
        let what = match key {
            None if trusted.required() => {
                "only signed snapshots are used here, and a template would have to be built".into()
            }
            Some(key) if !trusted.accepts(key) => {
                format!("{} is not a key trusted here", key.place().display())
            }
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::SnapshotSignature, what))
    }

    /// Builds it. The lock is held.
    async fn build(
        &self,
        recipe: Recipe,
        ingredients: Ingredients,
        key: Option<SigningKey>,
        progress: &Progress,
        freeze: impl AsyncFnOnce(FrozenInto) -> Result<(), Error>,
    ) -> Result<Template, Error> {
        let name = ingredients.key();
        let target = self.directory(&name);
        let draft = blocking(move || Ok(Draft::begin(&target)?)).await?;
        reach(Failpoint::TemplateDrafted);
        let files = || -> io::Result<FrozenInto> {
            Ok(FrozenInto {
                state: draft.state().try_clone()?,
                memory: draft.memory().try_clone()?,
                working_set: draft.working_set().try_clone()?,
            })
        };
        let files = files().map_err(|e| Error::system("cannot duplicate a descriptor", &e))?;
        freeze(files).await?;
        progress(Step::Hashing);
        let store = self.clone();
        let made = name.clone();
        let registered = blocking(move || {
            // A kernel replaced while we booted may be the one that was booted, or not.
            if store.ingredients(&recipe)? != ingredients {
                let what =
                    "the kernel, the guest image or thaw-vmm changed while a template was built from it";
                return Err(Error::new(ErrorKind::Runtime, what).remedy("try again"));
            }
            let subject = subject(&recipe, &ingredients);
            store.keep_components(&subject);
            match draft.finish(subject, key.as_ref()) {
                Ok(_) | Err(SnapshotError::Exists { .. }) => {}
                Err(e) => return Err(e.into()),
            }
            let gone = || {
                Error::new(
                    ErrorKind::SnapshotNotFound,
                    format!("template {made} was removed at once"),
                )
            };
            store.open_existing(&made)?.ok_or_else(gone)
        })
        .await?;
        progress(Step::Ready);
        Ok(Template {
            key: name,
            registered,
            built: true,
        })
    }

    /// Waits until nobody else builds this template.
    fn lock(&self, key: &Key, progress: &Progress) -> Result<BuildLock, Error> {
        let path = self.root().join(format!("{key}.lock"));
        let taken =
            fs::create_dir_all(self.root()).and_then(|()| BuildLock::take(&path, || progress(Step::Waiting)));
        taken.map_err(|e| Error::system(format!("cannot lock {}", path.display()), &e))
    }
}

impl Shape {
    /// That of a template.
    pub(super) fn of(manifest: &Manifest) -> Shape {
        Shape {
            vcpus: manifest.subject.machine.vcpus,
            memory_mib: manifest.subject.machine.memory_mib,
            cpu: manifest.subject.cpu.baseline,
        }
    }
}

/// A directory's name is no proof: what lies in the place of the template wanted must say that it is that.
fn must_be(wanted: &Subject, found: &Registered) -> Result<(), Error> {
    let is = &found.manifest.subject;
    let differs = [
        ("kind", is.kind != wanted.kind),
        ("machine", is.machine != wanted.machine),
        ("CPU baseline", is.cpu.baseline != wanted.cpu.baseline),
        ("thaw-vmm", is.vmm != wanted.vmm),
        ("kernel", is.kernel != wanted.kernel),
        ("guest image", is.guest_image != wanted.guest_image),
        ("kernel command line", is.command_line != wanted.command_line),
    ];
    let differs: Vec<&str> = differs
        .into_iter()
        .filter(|(_, other)| *other)
        .map(|(what, _)| what)
        .collect();
    if differs.is_empty() {
        return Ok(());
    }
    let (place, what) = (found.directory.display(), differs.join(", "));
    let what = format!("the snapshot at {place} is in the place of a template of another {what}");
    Err(Error::new(ErrorKind::SnapshotIncompatible, what)
        .remedy("remove it: it is built again when it is needed"))
}

fn subject(recipe: &Recipe, ingredients: &Ingredients) -> Subject {
    Subject {
        kind: match is_bare(&recipe.command_line) {
            true => Kind::Bare,
            false => Kind::Template,
        },
        machine: Machine {
            vcpus: recipe.shape.vcpus,
            memory_mib: recipe.shape.memory_mib,
        },
        cpu: Cpu {
            baseline: recipe.shape.cpu,
            host: Processor::of_this_host().describe(),
        },
        vmm: Some(ingredients.vmm),
        kernel: Some(ingredients.kernel),
        guest_image: Some(ingredients.guest_image),
        command_line: Some(recipe.command_line.clone()),
        devices: inventory(),
        base: None,
        images: Vec::new(),
        workload: None,
    }
}

/// The right to build one template. The kernel lets go of it whatever ends us.
#[derive(Debug)]
struct BuildLock {
    path: PathBuf,
    _file: File,
}

impl BuildLock {
    /// Takes it, saying so once if another has it.
    fn take(path: &Path, waiting: impl Fn()) -> io::Result<BuildLock> {
        let mut told = false;
        loop {
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(path)?;
            reach(Failpoint::TemplateLockMade);
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    if !std::mem::replace(&mut told, true) {
                        waiting();
                    }
                    rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))?;
                }
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
            if is_named(&file, path)? {
                return Ok(BuildLock {
                    path: path.to_owned(),
                    _file: file,
                });
            }
        }
    }
}

/// Whether a lock's file still has its name. Whoever had it removed that: then it is a lock nobody else will meet.
fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    let locked = file.metadata()?;
    let named = fs::metadata(path);
    Ok(named.is_ok_and(|n| (n.dev(), n.ino()) == (locked.dev(), locked.ino())))
}

/// Removes the locks nobody holds: whoever is killed leaves the name of its own.
pub(super) fn sweep_locks(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|e| e != "lock") {
            continue;
        }
        // As a holder removes it: locked, so that who waits for it looks again.
        let Ok(file) = File::options().write(true).open(&path) else {
            continue;
        };
        let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        if locked.is_ok() && is_named(&file, &path).unwrap_or(false) {
            drop(BuildLock { path, _file: file });
        }
    }
}

impl Drop for BuildLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        reach(Failpoint::TemplateUnlocked);
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| Error::new(ErrorKind::Runtime, format!("a template's worker failed: {e}")))?
}

#[cfg(test)]
#[path = "build_test.rs"]
pub(super) mod tests;
