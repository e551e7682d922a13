//! Client of thawd, which creates and ends the pod's microVM. Each call uses a new connection, so that
//! nothing here depends on one thawd process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::*;
use thaw_protocol::shim::pods_ttrpc::PodsClient;
use thaw_protocol::versions::PODS;
use ttrpc::context::Context;

use crate::error::{Error, Result};
use crate::host_resource::{BlockDevice, Source};

/// Delay before retrying while thawd is away.
pub const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Limit for thawd to end a pod. thawd also ends it by itself, because it watches the shim's process.
pub const END_LIMIT: Duration = Duration::from_secs(30);

/// The socket at which thawd serves its shims.
#[derive(Clone, Debug)]
pub struct Thawd {
    socket: PathBuf,
}

impl Thawd {
    /// The socket `pods.sock` in the run directory.
    pub fn from_env() -> Thawd {
        let run = std::env::var_os("THAW_RUN").filter(|run| !run.is_empty());
        let run = run.map_or_else(|| PathBuf::from("/run/thaw"), PathBuf::from);
        Thawd::at(&run.join("pods.sock"))
    }

    pub fn at(socket: &Path) -> Thawd {
        Thawd {
            socket: socket.into(),
        }
    }

    async fn client(&self) -> Result<PodsClient> {
        let stream = tokio::net::UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(|source| self.not_running(source))?;
        let socket = ttrpc::r#async::transport::Socket::from(stream);
        Ok(PodsClient::new(ttrpc::r#async::Client::new(socket)))
    }

    /// Connects and agrees on the protocol version. Needed only to create pods; other calls use version 1,
    /// which every thawd supports.
    async fn negotiated(&self) -> Result<PodsClient> {
        let client = self.client().await?;
        let request = VersionRequest {
            version: PODS.current,
            release: env!("CARGO_PKG_VERSION").into(),
            ..Default::default()
        };
        let theirs = match client.version(Context::default(), &request).await {
            // A release before versions existed.
            Err(ttrpc::Error::RpcStatus(status)) if status.code() == ttrpc::Code::UNIMPLEMENTED => 1,
            answer => self.answered(answer)?.version,
        };
        PODS.check(theirs).map_err(|e| Error::Thawd(e.to_string()))?;
        Ok(client)
    }

    /// Creates a pod's microVM. Its agent is ready on return.
    pub async fn create(&self, request: &CreatePodRequest) -> Result<CreatePodResponse> {
        self.answered(self.negotiated().await?.create(Context::default(), request).await)
    }

    /// Creates a pod's microVM from a snapshot.
    pub async fn thaw(&self, request: &ThawPodRequest) -> Result<CreatePodResponse> {
        self.answered(self.negotiated().await?.thaw(Context::default(), request).await)
    }

    /// Shows an image of the store in the microVM. Returns its name there.
    pub async fn show(&self, sandbox: &str, digest: &str) -> Result<String> {
        let request = ShowImageRequest {
            sandbox_id: sandbox.into(),
            digest: digest.into(),
            ..Default::default()
        };
        let answer = self.client().await?.show(Context::default(), &request).await;
        self.answered(answer).map(|answer| answer.name)
    }

    /// Shares the contents of a mount with the microVM, under `name`.
    pub async fn add_share(&self, sandbox: &str, name: &str, source: &Source) -> Result<()> {
        let request = AddShareRequest {
            sandbox_id: sandbox.into(),
            name: name.into(),
            source: MessageField::some(ShareSource {
                type_: source.kind.clone(),
                source: source.source.clone(),
                options: source.options.clone(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let answer = self.client().await?.add_share(Context::default(), &request).await;
        self.answered(answer).map(drop)
    }

    /// Removes a share.
    pub async fn remove_share(&self, sandbox: &str, name: &str) -> Result<()> {
        let request = RemoveShareRequest {
            sandbox_id: sandbox.into(),
            name: name.into(),
            ..Default::default()
        };
        let client = self.client().await?;
        self.answered(client.remove_share(Context::default(), &request).await)
            .map(drop)
    }

    /// Attaches a block device of the host. Returns its name for the agent.
    pub async fn add_disk(&self, sandbox: &str, disk: BlockDevice) -> Result<String> {
        let request = AddDiskRequest {
            sandbox_id: sandbox.into(),
            major: disk.major,
            minor: disk.minor,
            read_only: disk.read_only,
            ..Default::default()
        };
        let answer = self.client().await?.add_disk(Context::default(), &request).await;
        self.answered(answer).map(|answer| answer.name)
    }

    /// Detaches a block device.
    pub async fn remove_disk(&self, sandbox: &str, name: &str) -> Result<()> {
        let request = RemoveDiskRequest {
            sandbox_id: sandbox.into(),
            name: name.into(),
            ..Default::default()
        };
        let client = self.client().await?;
        self.answered(client.remove_disk(Context::default(), &request).await)
            .map(drop)
    }

    /// Waits until the machine has ended and returns the reason. Survives restarts of thawd.
    pub async fn wait(&self, sandbox: &str) -> String {
        let request = pod(sandbox);
        loop {
            if let Ok(client) = self.client().await {
                match client.wait(Context::default(), &request).await {
                    Ok(answer) => return answer.reason,
                    // thawd does not know the pod: it was removed. A thawd that shuts down answers
                    // UNAVAILABLE, and the next one is asked.
                    Err(ttrpc::Error::RpcStatus(status)) if status.code() != ttrpc::Code::UNAVAILABLE => {
                        return status.message().to_owned();
                    }
                    Err(_) => {}
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    /// Ends the pod and removes everything it has.
    pub async fn end(&self, sandbox: &str) -> Result<()> {
        let ended = self.client().await?.end(Context::default(), &pod(sandbox)).await;
        self.answered(ended).map(drop)
    }

    /// Freezes it to a new directory.
    pub async fn freeze(&self, sandbox: &str, directory: &Path) -> Result<()> {
        let request = FreezePodRequest {
            sandbox_id: sandbox.into(),
            directory: directory.display().to_string(),
            ..Default::default()
        };
        let answer = self.client().await?.freeze(Context::default(), &request).await;
        self.answered(answer).map(drop)
    }

    /// A thawd that closed the connection before it answered counts as not running.
    fn answered<T>(&self, answer: ttrpc::Result<T>) -> Result<T> {
        answer.map_err(|e| match e {
            ttrpc::Error::RpcStatus(status) => Error::Thawd(status.message().to_owned()),
            other => self.not_running(std::io::Error::other(format!("the connection broke: {other}"))),
        })
    }

    fn not_running(&self, source: std::io::Error) -> Error {
        Error::NoThawd {
            path: self.socket.clone(),
            source,
        }
    }
}

fn pod(sandbox: &str) -> PodRequest {
    PodRequest {
        sandbox_id: sandbox.into(),
        ..Default::default()
    }
}

#[cfg(test)]
#[path = "thawd_test.rs"]
mod tests;
