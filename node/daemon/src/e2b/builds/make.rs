//! Makes one build: from its base to the snapshot.
//!
//! Invariants: whatever ends a build, its sandbox is deleted; a snapshot that no template gets is removed; the freeze is never left half
//! done. A build that is like one that is ready, and is not forced, becomes that one.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use thaw_protocol::api::FreezeSandbox;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::tenant::Tenant;
use thaw_sys::lock::Lock;
use tokio::sync::watch;
use tokio::time::timeout;

use super::super::context::Context;
use super::super::template::BUILD_LABEL;
use super::base::{Base, Begun, end};
use super::execute::Executor;
use super::guest::{Guest, StepError};
use super::log::{BuildLog, Level};
use super::ready::Commands;
use super::record::{Built, Reason, Shape};
use super::step::Step;
use super::store::TemplateStore;
use super::uploads::Uploads;
use crate::api::daemon::Daemon;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Wanted;

/// How long a build may take, without the time that it waits for others.
pub const BUILD_LIMIT: Duration = Duration::from_secs(3600);
/// How much longer its sandbox exists at most: for the freeze, and for a thawd that ends.
const SPARE_S: u32 = 1800;
/// The name of what comes after the last step.
const FINALIZE: &str = "finalize";

/// What to build.
#[derive(Debug)]
pub struct Job {
    pub tenant: Option<Tenant>,
    pub template: String,
    pub build: String,
    pub base: Base,
    pub steps: Vec<Step>,
    pub commands: Commands,
    /// Build it although the same build exists.
    pub force: bool,
    /// The steps and commands as the client sent them.
    pub said: Vec<u8>,
}

/// A build that is being made.
#[derive(Debug)]
pub struct Making<'a> {
    pub daemon: &'a Arc<Daemon>,
    pub store: &'a TemplateStore,
    pub uploads: &'a Uploads,
    pub job: &'a Job,
    pub log: &'a BuildLog,
    /// The id of its sandbox, once there is one.
    pub sandbox: Mutex<Option<String>>,
}

/// A sandbox that is ready to be frozen, or a build that is like this one.
#[derive(Debug)]
enum Prepared {
    Sandbox {
        id: String,
        key: Option<String>,
        machine: Shape,
        context: Context,
    },
    Known(Built),
}

impl Making<'_> {
    /// Makes the build. It ends early if `cancelled` or thawd's end says so.
    ///
    /// # Errors
    /// Why it failed, with the step.
    pub async fn make(&self, mut cancelled: watch::Receiver<bool>) -> Result<Built, Reason> {
        let mut closing = self.daemon.closing();
        let prepared = tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => Err(failed("thawd ends: build the template again")),
            _ = cancelled.wait_for(|cancelled| *cancelled) => Err(failed("the template was deleted")),
            prepared = timeout(BUILD_LIMIT, self.prepare()) => match prepared {
                Ok(prepared) => prepared,
                Err(_) => Err(failed(&format!("the build took longer than {} seconds", BUILD_LIMIT.as_secs()))),
            },
        };
        let built = match prepared {
            Ok(Prepared::Known(built)) => Ok(built),
            Ok(Prepared::Sandbox {
                id,
                key,
                machine,
                context,
            }) => self.freeze(&id).await.map(|snapshot| Built {
                snapshot,
                key,
                machine,
                context,
            }),
            Err(why) => Err(why),
        };
        let sandbox = self.sandbox.locked().take();
        if let Some(id) = sandbox {
            end(self.daemon, &id).await;
        }
        built.map_err(|why| {
            let (step, message) = (self.log.step(), why.to_string());
            self.log.add(Level::Error, message.clone());
            Reason { message, step }
        })
    }

    /// Makes the sandbox and executes the steps and commands in it.
    async fn prepare(&self) -> Result<Prepared, StepError> {
        let Job {
            tenant,
            build,
            base,
            steps,
            commands,
            ..
        } = self.job;
        let timeout_s = BUILD_LIMIT.as_secs() as u32 + SPARE_S;
        let begun = base.begin(self.daemon, tenant.clone(), build, timeout_s).await?;
        *self.sandbox.locked() = Some(begun.id.clone());
        self.log.add(Level::Info, "the sandbox of the base runs");
        let key = key(&begun, self.job);
        if let Some(built) = self.known(key.as_deref()).await? {
            self.log.add(Level::Info, "the same build exists, and is used");
            return Ok(Prepared::Known(built));
        }
        let guest = Guest::of(self.daemon, &begun.id).await?;
        let mut executor = Executor {
            guest: &guest,
            log: self.log,
            context: base.context.clone(),
        };
        for (at, step) in steps.iter().enumerate() {
            self.log.begin((at + 1).to_string(), &step.title());
            let archive = self.archive(step).await;
            executor.execute(step, archive).await?;
        }
        self.log.begin(FINALIZE, "all steps are done");
        let context = executor.context;
        commands.run(&guest, &context, self.log).await?;
        Ok(Prepared::Sandbox {
            id: begun.id,
            key,
            machine: begun.machine,
            context,
        })
    }

    async fn archive(&self, step: &Step) -> Option<PathBuf> {
        self.uploads.find(self.job.tenant.as_ref(), step.files()?).await
    }

    /// A build of the same tenant that was made from the same, and whose snapshot is there.
    async fn known(&self, key: Option<&str>) -> Result<Option<Built>, Refusal> {
        let Some(key) = key.filter(|_| !self.job.force) else {
            return Ok(None);
        };
        let templates = self.store.all();
        let mine = templates
            .iter()
            .filter(|template| template.tenant == self.job.tenant);
        let found = mine.flat_map(|template| &template.builds).find_map(|build| {
            let snapshot = build
                .snapshot
                .clone()
                .filter(|_| build.key.as_deref() == Some(key))?;
            Some(Built {
                snapshot,
                key: build.key.clone(),
                machine: build.machine,
                context: build.context.clone(),
            })
        });
        let Some(built) = found else { return Ok(None) };
        let factory = self.daemon.factory()?;
        let is_there = factory.snapshot(built.snapshot.clone(), Viewer::node()).await;
        Ok(is_there.is_ok().then_some(built))
    }

    /// Freezes the sandbox into a stored snapshot, and returns its id.
    async fn freeze(&self, id: &str) -> Result<String, StepError> {
        self.log.add(Level::Info, "the sandbox is frozen");
        let request = FreezeSandbox {
            labels: [(BUILD_LABEL.to_owned(), self.job.build.clone())].into(),
            // It runs no further than the snapshot.
            stop: true,
            ..FreezeSandbox::default()
        };
        let frozen = self.daemon.freeze(&Wanted::on_node(id), request).await?;
        let none = || Refusal::new(ApiCode::Broken, "the snapshot has no id");
        Ok(frozen.snapshot.ok_or_else(none)?)
    }
}

/// What a build is made from, as a hash. `None`: its base is not known exactly.
fn key(begun: &Begun, job: &Job) -> Option<String> {
    #[derive(Serialize)]
    struct Origin<'a> {
        base: &'a str,
        context: &'a Context,
        machine: Shape,
        said: &'a [u8],
    }
    let origin = Origin {
        base: begun.identity.as_deref()?,
        context: &job.base.context,
        machine: begun.machine,
        said: &job.said,
    };
    let origin = serde_json::to_vec(&origin).ok()?;
    Some(blake3::hash(&origin).to_hex().to_string())
}

fn failed(why: &str) -> StepError {
    StepError::Failed(why.to_owned())
}
