//! The pod as containerd's sandbox API makes and ends it: with no container that stands for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thaw_protocol::shim::sandbox::CreateSandboxRequest;

use super::Pod;
use super::shared::Shared;
use crate::error::{Error, Result};
use crate::grouping::Role;
use crate::kata;
use crate::options::Options;
use crate::process::Exit;
use crate::sandbox::{self, Sandbox, files};
use crate::service::check_id;
use crate::spec::{self, config::Spec};

impl Pod {
    /// Makes the pod's microVM.
    pub async fn create_sandbox(self: &Arc<Pod>, r: &CreateSandboxRequest) -> Result<()> {
        check_id(&r.sandbox_id)?;
        let bundle = PathBuf::from(&r.bundle_path);
        let config = sandbox::config(r.options.as_ref())?;
        let given = spec::read_if_any(&bundle.join("config.json"))?;
        let spec = sandbox::spec(r, &config, given)?;
        let kata = kata::settings(&spec.annotations, &Options::of(None, &bundle)?)?;
        let shared = Shared::of(&spec)?;
        let reservation = self.reserve(&r.sandbox_id)?;
        if self.machine.initialized() {
            return Err(Error::AlreadyExists(format!(
                "the microVM of pod {}",
                r.sandbox_id
            )));
        }
        files::write(&bundle, &config)?;
        self.machine_of(&r.sandbox_id, &bundle, &spec, kata).await?;
        let _ = self.shared.set(shared);
        let sandbox = Arc::new(Sandbox::new(&r.sandbox_id, bundle, &spec));
        let taken = |_| Error::AlreadyExists(format!("a sandbox in the shim of {}", r.sandbox_id));
        self.sandbox.set(sandbox).map_err(taken)?;
        drop(reservation);
        Ok(())
    }

    /// The sandbox of this id.
    pub fn sandbox(&self, id: &str) -> Result<&Arc<Sandbox>> {
        let sandbox = self.sandbox.get().filter(|sandbox| sandbox.id == id);
        sandbox.ok_or_else(|| Error::NotFound(format!("sandbox {id}")))
    }

    /// Whether the pod was made by the sandbox API: then it ends by it.
    pub fn is_sandbox(&self) -> bool {
        self.sandbox.get().is_some()
    }

    /// Ends the microVM and waits until it has, at most `timeout` seconds; 0 for as long as it takes. Once it has ended nothing
    /// happens.
    pub async fn stop_sandbox(self: &Arc<Pod>, id: &str, timeout: u32) -> Result<()> {
        let sandbox = self.sandbox(id)?;
        sandbox.life.settled().await;
        sandbox.life.end(Exit::now(0));
        self.end_machine();
        let limit = match timeout {
            0 => Duration::MAX,
            seconds => Duration::from_secs(seconds.into()),
        };
        let ended = tokio::time::timeout(limit, self.ended()).await;
        let problem = match ended {
            Ok(()) if self.is_ending.load(Ordering::Acquire) => return Ok(()),
            Ok(()) => "thawd could not be told to end it".into(),
            Err(_) => format!("it did not within {timeout} s"),
        };
        Err(Error::State(format!(
            "the microVM of sandbox {id} is to end: {problem}"
        )))
    }

    /// What a container is to the pod: one of a sandbox's, if there is one, whatever else it may say.
    pub(super) fn role(&self, id: &str, spec: &Spec, bundle: &Path) -> Result<Role> {
        let role = Role::of_bundle(id, &spec.annotations, bundle)?;
        let Some(sandbox) = self.sandbox.get() else {
            return Ok(role);
        };
        let pod = sandbox.id.clone();
        match role {
            Role::Pod => Err(Error::AlreadyExists(format!("the container of pod {pod}"))),
            Role::Member { pod: other } if other != pod => Err(Error::Invalid(format!(
                "container {id} is of pod {other}, and this is the shim of {pod}"
            ))),
            _ if sandbox.ended().is_some() => Err(Error::State(format!(
                "container {id}: pod {pod} has been stopped"
            ))),
            Role::Single | Role::Member { .. } => Ok(Role::Member { pod }),
        }
    }

    /// Gives a container of a sandbox's what it has from its pod.
    pub(super) fn complete(&self, spec: &mut Spec) {
        if let Some(sandbox) = self.sandbox.get() {
            files::complete(spec, &sandbox.bundle);
        }
    }
}
