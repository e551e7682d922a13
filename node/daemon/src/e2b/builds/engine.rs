//! The builds of this node: those in progress, and their bounds.
//!
//! Invariants: at most [`AT_ONCE`] builds run, and [`AT_ONCE_OF_TENANT`] of a tenant; a tenant has at most [`MOST_OF_TENANT`] that are not
//! over, so no queue is longer; a build that is over is on disk before it is not in progress any more.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_sandbox::error::Error;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::tenant::Tenant;
use thaw_sys::lock::Lock;
use tokio::sync::{Semaphore, watch};

use super::super::failure::Failure;
use super::super::moment::now_s;
use super::super::template::BUILD_LABEL;
use super::base::end;
use super::log::{BuildLog, Entry};
use super::make::{Job, Making};
use super::record::{Built, Reason, Status, Template};
use super::store::TemplateStore;
use super::uploads::Uploads;
use crate::api::daemon::Daemon;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Scope;
use crate::api::watch::{Query, Selector};

/// Most builds that run at once.
pub const AT_ONCE: usize = 4;
/// Most builds of a tenant that run at once.
pub const AT_ONCE_OF_TENANT: usize = 2;
/// Most builds of a tenant that run or wait.
pub const MOST_OF_TENANT: usize = 16;
/// How often old uploads, and snapshots that no template needs, are looked for.
const EXPIRY: Duration = Duration::from_secs(3600);
/// The directory of all this, below the data directory.
const DIRECTORY: &str = "e2b";

/// See the module.
#[derive(Debug)]
pub struct Builds {
    pub store: TemplateStore,
    pub uploads: Uploads,
    /// By the ids of the builds.
    running: Mutex<BTreeMap<String, Arc<Running>>>,
    places: Semaphore,
    places_of: Mutex<BTreeMap<Option<Tenant>, Arc<Semaphore>>>,
}

/// A build in progress.
#[derive(Debug)]
pub struct Running {
    tenant: Option<Tenant>,
    template: String,
    pub log: BuildLog,
    cancelled: watch::Sender<bool>,
}

impl Builds {
    /// The templates and uploads in a data directory. Blocks.
    ///
    /// # Errors
    /// The directory cannot be read or written.
    pub fn open(data: &Path) -> Result<Builds, Error> {
        let root = data.join(DIRECTORY);
        Ok(Builds {
            store: TemplateStore::open(root.join("templates"))?,
            uploads: Uploads::open(root.join("uploads"))?,
            running: Mutex::default(),
            places: Semaphore::new(AT_ONCE),
            places_of: Mutex::default(),
        })
    }

    /// A build in progress.
    pub fn running(&self, build: &str) -> Option<Arc<Running>> {
        self.running.locked().get(build).cloned()
    }

    /// The log of a build, so far.
    pub async fn log(&self, template: &str, build: &str) -> Vec<Entry> {
        match self.running(build) {
            Some(running) => running.log.entries(),
            None => self.store.log(template, build).await,
        }
    }

    /// Begins a build, which goes on when the caller leaves.
    ///
    /// # Errors
    /// It has begun before, or the tenant has too many.
    pub fn begin(self: &Arc<Builds>, daemon: &Arc<Daemon>, job: Job) -> Result<(), Failure> {
        let running = Arc::new(Running {
            tenant: job.tenant.clone(),
            template: job.template.clone(),
            log: BuildLog::default(),
            cancelled: watch::Sender::new(false),
        });
        {
            let mut all = self.running.locked();
            if all.contains_key(&job.build) {
                return Err(Failure::Conflict(format!(
                    "build {} has begun already",
                    job.build
                )));
            }
            if all.values().filter(|one| one.tenant == job.tenant).count() >= MOST_OF_TENANT {
                let why = format!("{MOST_OF_TENANT} builds run or wait, which is the most of a tenant");
                return Err(Failure::Refused(Refusal::new(ApiCode::TooMany, why)));
            }
            all.insert(job.build.clone(), running.clone());
        }
        let (builds, daemon) = (self.clone(), daemon.clone());
        tokio::spawn(async move {
            let of_daemon = daemon.clone();
            // thawd's end waits for it.
            let work = async move {
                builds.run(&of_daemon, &job, &running).await;
                Ok::<_, Refusal>(())
            };
            if let Err(refusal) = daemon.finish(work).await {
                tracing::error!("a build of a template was not finished: {refusal}");
            }
        });
        Ok(())
    }

    async fn run(&self, daemon: &Arc<Daemon>, job: &Job, running: &Running) {
        let making = Making {
            daemon,
            store: &self.store,
            uploads: &self.uploads,
            job,
            log: &running.log,
            sandbox: Mutex::default(),
        };
        let place = self.place(daemon, job, running).await;
        let made = match &place {
            Ok(_) => making.make(running.cancelled.subscribe()).await,
            Err(why) => Err(why.clone()),
        };
        drop(place);
        let outcome = match &made {
            Ok(_) => "ready".to_owned(),
            Err(reason) => format!("failed at {}: {}", reason.step, reason.message),
        };
        tracing::info!(
            template = job.template,
            build = job.build,
            "a build is over: {outcome}"
        );
        self.record(daemon, job, made, &running.log).await;
        self.running.locked().remove(&job.build);
    }

    /// Waits until the build may run.
    async fn place(&self, daemon: &Arc<Daemon>, job: &Job, running: &Running) -> Result<impl Sized, Reason> {
        let of_tenant = self
            .places_of
            .locked()
            .entry(job.tenant.clone())
            .or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE_OF_TENANT)))
            .clone();
        let (mut closing, mut cancelled) = (daemon.closing(), running.cancelled.subscribe());
        let failed = |message: &str| Reason {
            message: message.into(),
            step: running.log.step(),
        };
        let places = async {
            // The tenant's first, so that its waiting builds take none of the others'. None is ever closed.
            (of_tenant.acquire_owned().await, self.places.acquire().await)
        };
        let places = tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => return Err(failed("thawd ends: build the template again")),
            _ = cancelled.wait_for(|cancelled| *cancelled) => return Err(failed("the template was deleted")),
            places = places => places,
        };
        let began = self.store.change(&job.template, |template| {
            if let Some(build) = template.build_mut(&job.build) {
                (build.status, build.updated) = (Status::Building, now_s());
                // Of a build that has waited for too long.
                (build.finished, build.reason) = (None, None);
            }
            Ok(())
        });
        match began.await {
            Ok(()) => Ok(places),
            Err(_) => Err(failed(
                "the template was deleted, or its record cannot be written",
            )),
        }
    }

    /// Records what a build has come to.
    async fn record(&self, daemon: &Daemon, job: &Job, made: Result<Built, Reason>, log: &BuildLog) {
        let snapshot = made.as_ref().ok().map(|built| built.snapshot.clone());
        // First, so that a client that sees the end sees all of it.
        self.store
            .keep_log(&job.template, &job.build, log.entries())
            .await;
        let mut before: Vec<String> = snapshot.into_iter().collect();
        let recorded = self.store.change(&job.template, |template| {
            before.extend(template.snapshots().cloned());
            match made {
                Ok(built) => template.complete(&job.build, built, now_s()),
                Err(reason) => fail(template, &job.build, reason),
            }
            Ok(())
        });
        if let Err(e) = recorded.await {
            // Also if the template was deleted meanwhile.
            tracing::debug!(template = job.template, build = job.build, "not recorded: {e:?}");
        }
        self.remove_unused(daemon, before).await;
    }

    /// Changes a template, and removes the snapshots that it does not need any more.
    ///
    /// # Errors
    /// See [`TemplateStore::change`].
    pub async fn change<T>(
        &self,
        daemon: &Daemon,
        id: &str,
        edit: impl FnOnce(&mut Template) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut before = Vec::new();
        let changed = self.store.change(id, |template| {
            before.extend(template.snapshots().cloned());
            edit(template)
        });
        let done = changed.await?;
        self.remove_unused(daemon, before).await;
        Ok(done)
    }

    /// Removes a template with its snapshots. Its builds in progress end.
    ///
    /// # Errors
    /// See [`TemplateStore::remove`].
    pub async fn remove(&self, daemon: &Daemon, id: &str) -> Result<(), Failure> {
        let removed = self.store.remove(id).await?;
        let of_template = |running: &&Arc<Running>| running.template == id;
        for running in self.running.locked().values().filter(of_template) {
            running.cancelled.send_replace(true);
        }
        self.remove_unused(daemon, removed.snapshots().cloned().collect())
            .await;
        Ok(())
    }

    /// Removes those of these snapshots that no build needs. Sandboxes that were thawed from them run on.
    async fn remove_unused(&self, daemon: &Daemon, snapshots: Vec<String>) {
        let Ok(factory) = daemon.factory() else { return };
        for snapshot in snapshots {
            if self.store.needs(&snapshot, None) {
                continue;
            }
            if let Err(e) = factory
                .remove_snapshot(snapshot.clone(), Viewer::node(), true)
                .await
            {
                tracing::warn!(snapshot, "the snapshot of a template is not removed: {e}");
            }
        }
    }

    /// Removes the sandboxes `left` by an earlier thawd's builds. Then removes, once an hour, snapshots of builds that no template needs and
    /// old uploads. A snapshot that is being thawed stays until the next time. Ends with thawd.
    pub async fn keep_clean(self: Arc<Builds>, daemon: Arc<Daemon>, left: Vec<String>) {
        for id in left {
            end(&daemon, &id).await;
        }
        let mut closing = daemon.closing();
        loop {
            self.remove_left_snapshots(&daemon).await;
            let ending = closing.wait_for(|closing| *closing);
            if tokio::time::timeout(EXPIRY, ending).await.is_ok() {
                return;
            }
            self.uploads.expire().await;
        }
    }

    async fn remove_left_snapshots(&self, daemon: &Daemon) {
        if !self.store.is_whole() {
            tracing::warn!("snapshots that builds have left are not removed: a template cannot be read");
            return;
        }
        let Ok(factory) = daemon.factory() else { return };
        let stored = factory.snapshots(Viewer::node()).await.unwrap_or_default();
        for snapshot in stored {
            let Some(build) = snapshot.labels.get(BUILD_LABEL) else {
                continue;
            };
            if !self.store.needs(&snapshot.id, Some(build)) {
                self.remove_unused(daemon, vec![snapshot.id]).await;
            }
        }
    }
}

/// The sandboxes of builds: before any build has begun, those that an earlier thawd left.
pub fn sandboxes(daemon: &Daemon) -> Vec<String> {
    let all = Selector::parse(Scope::node(), "", "").ok().and_then(|selector| {
        let query = Query {
            selector,
            limit: None,
            from: None,
        };
        daemon.cache.list(&query).ok()
    });
    let all = all.into_iter().flat_map(|page| page.items);
    let of_builds = all.filter(|sandbox| sandbox.labels.contains_key(BUILD_LABEL));
    of_builds.map(|sandbox| sandbox.id.clone()).collect()
}

fn fail(template: &mut Template, build: &str, reason: Reason) {
    if let Some(build) = template.build_mut(build) {
        build.status = Status::Error;
        (build.updated, build.finished) = (now_s(), Some(now_s()));
        build.reason = Some(reason);
    }
    template.tidy();
}

#[cfg(test)]
#[path = "engine_test.rs"]
mod tests;
