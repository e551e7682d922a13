//! Pods created and ended through containerd's sandbox API, without a container that stands for the pod.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thaw_protocol::shim::sandbox::CreateSandboxRequest;

use super::Pod;
use super::shared::Shared;
use crate::error::{Error, Result};
use crate::id::check_id;
use crate::kata;
use crate::options::Options;
use crate::process::Exit;
use crate::role::Role;
use crate::sandbox::{self, Sandbox, files};
use crate::spec::{self, config::Spec};

impl Pod {
    /// Creates the pod's microVM.
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

    /// Returns the sandbox with this id.
    pub fn sandbox(&self, id: &str) -> Result<&Arc<Sandbox>> {
        let sandbox = self.sandbox.get().filter(|sandbox| sandbox.id == id);
        sandbox.ok_or_else(|| Error::NotFound(format!("sandbox {id}")))
    }

    /// Whether the pod was created through the sandbox API, and so ends through it.
    pub fn is_sandbox(&self) -> bool {
        self.sandbox.get().is_some()
    }

    /// Ends the microVM and waits for that, at most `timeout` seconds; 0 means no limit. Has no effect if it
    /// has ended.
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
            Ok(()) => "thawd could not end it".into(),
            Err(_) => format!("not within {timeout} s"),
        };
        Err(Error::State(format!(
            "the microVM of sandbox {id} has not ended: {problem}"
        )))
    }

    /// The role of a container. In a sandbox every container is a member, whatever its annotations say.
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

    /// Completes a container's specification with what it gets from its sandbox.
    pub(super) fn complete(&self, spec: &mut Spec) {
        if let Some(sandbox) = self.sandbox.get() {
            files::complete(spec, &sandbox.bundle);
        }
    }
}
