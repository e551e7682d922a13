//! Makes a template: once, however many callers need it at the same time.
//!
//! The caller boots and freezes the machine. This module handles the lock, the directory, the hashes and the signature. Invariant: however
//! a build ends, the store has the complete template or nothing.

use std::fs::{self, File};
use std::io;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};

use super::build_lock::BuildLock;
use super::command_line::is_bare;
use super::key::{Ingredients, Key, Processor};
use super::store::{Found, Templates};
use super::{Recipe, Shape};
use crate::error::{Error, ErrorKind};
use crate::snapshot::{Cpu, Draft, Kind, Machine, Registered, SigningKey, SnapshotError, Subject, inventory};

/// The files for the VMM to write: empty, and open for reading and writing.
#[derive(Debug)]
pub struct FrozenInto {
    pub state: File,
    pub memory: File,
    /// If it stays empty, the template has no working set.
    pub working_set: File,
}

/// The progress of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Waiting for another process that builds the same template.
    Waiting,
    /// A guest boots.
    Booting,
    /// Its agent has rung the doorbell: memory and state are being written.
    Freezing,
    /// A machine was lost, for this reason, and another is being made.
    Again(String),
    /// The files are being hashed.
    Hashing,
    /// The template is complete.
    Ready,
}

/// Called with the progress of a build.
pub type Progress = Arc<dyn Fn(Step) + Send + Sync>;

/// A template ready to be thawed.
#[derive(Clone, Debug)]
pub struct Template {
    pub key: Key,
    pub registered: Arc<Registered>,
    /// Whether it had to be built.
    pub built: bool,
}

impl Templates {
    /// The template of this shape, if this process holds it. Blocks as [`Templates::ingredients`] does.
    pub fn held(&self, shape: Shape) -> Option<Arc<Registered>> {
        let recipe = Recipe::of(shape);
        let ingredients = self.ingredients(&recipe).ok()?;
        let registered = self.in_memory(&ingredients.key())?;
        must_be(&subject(&recipe, &ingredients), &registered).ok()?;
        Some(registered)
    }

    /// The best template that this process holds for a sandbox of this size, if it remembers the hashes of everything the template depends
    /// on. Reads no file, and looks only whether those files have changed.
    pub(crate) fn at_hand(&self, vcpus: u8, memory_mib: u32) -> Option<(Shape, Arc<Registered>)> {
        self.shapes_in_memory(vcpus, memory_mib)
            .into_iter()
            .find_map(|shape| {
                let recipe = Recipe::of(shape);
                let ingredients = self.remembered_ingredients(&recipe)?;
                let registered = self.in_memory(&ingredients.key())?;
                must_be(&subject(&recipe, &ingredients), &registered).ok()?;
                Some((shape, registered))
            })
    }

    /// The template of a recipe. Builds it with `freeze` if it is missing.
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
            // The damage is more useful than the reason why it cannot be built again.
            (Found::Damaged(damaged), Err(_)) => return Err(damaged),
        }
        let (store, wanted, told) = (self.clone(), name.clone(), progress.clone());
        let (lock, found) = blocking(move || {
            let lock = store.lock(&wanted, &told)?;
            reach(Failpoint::TemplateLocked);
            // The previous holder of the lock may have built the template.
            let found = store.look(&wanted)?;
            if let Found::Damaged(damaged) = &found {
                tracing::warn!("{}: the template is removed and built again", damaged.what);
                store.discard(&wanted)?;
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

    /// Fails if this node would refuse the template after the build.
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

    /// Builds the template. The caller holds the lock.
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
            // If the kernel was replaced during the boot, it is unknown which one was booted.
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

    /// Waits until no other process builds this template.
    fn lock(&self, key: &Key, progress: &Progress) -> Result<BuildLock, Error> {
        let path = self.root().join(format!("{key}.lock"));
        let taken =
            fs::create_dir_all(self.root()).and_then(|()| BuildLock::take(&path, || progress(Step::Waiting)));
        taken.map_err(|e| Error::system(format!("cannot lock {}", path.display()), &e))
    }
}

/// Checks that the snapshot in a template's directory is that template: the directory's name proves nothing.
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

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| Error::new(ErrorKind::Runtime, format!("a template's worker failed: {e}")))?
}

#[cfg(test)]
#[path = "build_test.rs"]
pub(super) mod tests;
