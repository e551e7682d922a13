//! containerd's remote snapshotter, served by thawd: Thaw pulls containerd's images, lazily if the image allows it.
//!
//! | module | noun |
//! |---|---|
//! | [`service`] | the gRPC service |
//! | [`table`], [`record`] | snapshots: in memory by name, on disk by id |
//! | [`remote`] | layers that are in the image store |
//! | [`mounts`], [`host_files`], [`copy_out`] | the mounts for containerd, and the files in them |
//! | [`filter`] | containerd's filters |
//!
//! Invariant: a snapshot of an image's layer is reported only after the store has the image, and the chain ID of its layers is the one
//! that containerd requested. While thawd runs, it leases the images that snapshots are based on.

pub mod copy_out;
pub mod filter;
pub mod host_files;
pub mod mounts;
pub mod record;
pub mod remote;
pub mod service;
pub mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_protocol::snapshots::snapshots_server::SnapshotsServer;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::images::Images;
use thaw_sandbox::unix_socket;
use tokio::net::UnixListener;

/// The snapshotter before it serves.
pub struct Listening {
    service: service::Snapshotter,
    listener: UnixListener,
    socket: PathBuf,
}

impl Listening {
    /// Listens on a unix socket at `socket`. Snapshots are kept under `root`. `explain` makes the text that containerd gets for an error.
    ///
    /// # Errors
    /// The socket cannot be bound, or the snapshots cannot be read.
    pub async fn open(
        images: Images,
        root: &Path,
        socket: &Path,
        explain: service::Explain,
    ) -> Result<Listening, Error> {
        Ok(Listening {
            service: service::Snapshotter::open(Arc::new(images), root, explain).await?,
            listener: unix_socket::bind(socket)?,
            socket: socket.into(),
        })
    }

    /// Serves containerd until `end`.
    ///
    /// # Errors
    /// The server fails.
    pub async fn serve(self, end: impl Future<Output = ()>) -> Result<(), Error> {
        tracing::info!(socket = %self.socket.display(), "serving containerd as a snapshotter");
        let served = tonic::transport::Server::builder()
            .add_service(SnapshotsServer::new(self.service))
            .serve_with_incoming_shutdown(Incoming(self.listener), end)
            .await;
        let _ = std::fs::remove_file(&self.socket);
        served.map_err(|error| Error::new(ErrorKind::Runtime, format!("the snapshotter ended: {error}")))
    }
}

/// Accepted connections, as a stream for tonic.
struct Incoming(UnixListener);

impl futures_util::Stream for Incoming {
    type Item = std::io::Result<tokio::net::UnixStream>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0
            .poll_accept(context)
            .map(|accepted| Some(accepted.map(|(stream, _)| stream)))
    }
}
