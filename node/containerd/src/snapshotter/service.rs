//! The gRPC service. Its methods use the table of snapshots, and the image store for layers.
//!
//! The table is locked only to read or change a snapshot, on a blocking thread, and never during a pull.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use thaw_images::store::Lease;
use thaw_protocol::snapshots::snapshots_server::Snapshots;
use thaw_protocol::snapshots::types::Mount;
use thaw_protocol::snapshots::{
    CleanupRequest, CommitSnapshotRequest, Info, ListSnapshotsRequest, ListSnapshotsResponse, MountsRequest,
    MountsResponse, PrepareSnapshotRequest, PrepareSnapshotResponse, RemoveSnapshotRequest,
    StatSnapshotRequest, StatSnapshotResponse, UpdateSnapshotRequest, UpdateSnapshotResponse, UsageRequest,
    UsageResponse, ViewSnapshotRequest, ViewSnapshotResponse,
};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sys::lock::Lock;
use tonic::{Request, Response, Status};

use super::filter::Filter;
use super::host_files::HostFiles;
use super::mounts::{Base, Lower, base, mounts};
use super::record::{Files, Record, Stage};
use super::remote::{Layers, Pulled, Wanted, is_kept_from_us};
use super::table::{New, Table, TableError};

/// Snapshots in one message of a list.
const LISTED_AT_ONCE: usize = 100;

/// How an error is shown to containerd, with what to do about it.
pub type Explain = fn(&Error) -> String;

/// The service. Clones share everything.
#[derive(Clone)]
pub struct Snapshotter {
    table: Arc<Mutex<Table>>,
    root: PathBuf,
    layers: Arc<dyn Layers>,
    /// The leased images of snapshots, by digest.
    leases: Arc<Mutex<HashMap<String, Lease>>>,
    host_files: HostFiles,
    explain: Explain,
}

impl From<TableError> for Status {
    fn from(error: TableError) -> Status {
        let text = error.to_string();
        match error {
            TableError::NotFound(_) => Status::not_found(text),
            TableError::AlreadyExists(_) => Status::already_exists(text),
            TableError::Precondition { .. } => Status::failed_precondition(text),
            TableError::Io { .. } => Status::internal(text),
        }
    }
}

impl Snapshotter {
    /// Reads the snapshots under `root`, and leases their images. A snapshot whose image is gone is logged and stays: containerd
    /// removes it with its image.
    pub async fn open(layers: Arc<dyn Layers>, root: &Path, explain: Explain) -> Result<Snapshotter, Error> {
        let table = Table::open(root).map_err(|error| Error::new(ErrorKind::Runtime, error.to_string()))?;
        let mut digests: Vec<String> = table.all().filter_map(image_of).collect();
        digests.sort();
        digests.dedup();
        let snapshotter = Snapshotter {
            table: Arc::new(Mutex::new(table)),
            root: root.into(),
            layers,
            leases: Arc::default(),
            host_files: HostFiles::beside(root),
            explain,
        };
        for digest in digests {
            match snapshotter.layers.stored(&digest).await {
                Ok(image) => snapshotter.keep(&digest, image.lease),
                Err(error) => tracing::warn!("snapshotter: {}", explain(&error)),
            }
        }
        Ok(snapshotter)
    }

    /// The status that containerd gets for an error.
    fn refusal(&self, error: Error) -> Status {
        let text = (self.explain)(&error);
        tracing::warn!("snapshotter: {text}");
        match error.kind {
            ErrorKind::ImageNotFound | ErrorKind::ImageNotStored => Status::not_found(text),
            ErrorKind::RegistryUnreachable | ErrorKind::RegistryFailed | ErrorKind::RegistryRateLimited => {
                Status::unavailable(text)
            }
            ErrorKind::RegistryDenied => Status::permission_denied(text),
            ErrorKind::DiskFull => Status::resource_exhausted(text),
            _ => Status::internal(text),
        }
    }

    fn keep(&self, digest: &str, lease: Option<Lease>) {
        let mut leases = self.leases.locked();
        if let Some(lease) = lease {
            leases.entry(digest.to_owned()).or_insert(lease);
        }
    }

    /// Uses the table on a blocking thread.
    async fn table<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Table) -> Result<T, TableError> + Send + 'static,
    ) -> Result<T, Status> {
        let table = self.table.clone();
        let done = tokio::task::spawn_blocking(move || work(&mut table.locked()));
        match done.await {
            Ok(result) => Ok(result?),
            Err(error) => Err(Status::internal(format!(
                "the snapshotter's work ended early: {error}"
            ))),
        }
    }

    /// Makes the snapshot of a layer from an image in the store, which is pulled first. Returns true if containerd must be told that the
    /// snapshot exists, and false if containerd must fetch the layer itself.
    async fn remote(
        &self,
        wanted: &Wanted,
        parent: &str,
        labels: &HashMap<String, String>,
    ) -> Result<bool, Status> {
        let name = parent.to_owned();
        let below = self
            .table(move |table| Ok(table.get(&name).ok().cloned()))
            .await?;
        let below = below.as_ref();
        if below.is_some_and(|below| is_unpacked_of(below, wanted)) {
            return Ok(false);
        }
        match self.layers.pull(&wanted.reference).await {
            Ok(image) => self.commit_layer(image, wanted, parent, labels).await,
            Err(failure) if !is_kept_from_us(&failure) => Err(self.refusal(failure)),
            Err(failure) => {
                let reference = &wanted.reference;
                tracing::warn!("{reference} is pulled whole, by containerd: {}", failure.what);
                Ok(false)
            }
        }
    }

    async fn commit_layer(
        &self,
        image: Pulled,
        wanted: &Wanted,
        parent: &str,
        labels: &HashMap<String, String>,
    ) -> Result<bool, Status> {
        let layer = image.layer(&wanted.target).map_err(|e| self.refusal(e))?;
        let digest = image.digest.to_string();
        self.keep(&digest, image.lease);
        let new = New {
            name: wanted.target.clone(),
            parent: parent.to_owned(),
            stage: Stage::Committed,
            files: Files::Image { digest, layer },
            labels: labels.clone().into_iter().collect(),
        };
        match self.table(move |table| table.insert(new).map(drop)).await {
            // A concurrent pull has made the same layer.
            Err(status) if status.code() == tonic::Code::AlreadyExists => Ok(true),
            result => result.map(|()| true),
        }
    }

    async fn make(
        &self,
        key: String,
        parent: String,
        stage: Stage,
        labels: HashMap<String, String>,
    ) -> Result<Vec<Mount>, Status> {
        let new = New {
            name: key.clone(),
            parent,
            stage,
            files: Files::Directory,
            labels: labels.into_iter().collect(),
        };
        self.table(move |table| table.insert(new).map(drop)).await?;
        let made = self.mounts_of(key.clone()).await;
        if made.is_err() {
            let _ = self.table(move |table| table.remove(&key)).await;
        }
        made
    }

    async fn mounts_of(&self, key: String) -> Result<Vec<Mount>, Status> {
        let (record, base) = self
            .table(move |table| {
                let record = table.get(&key)?.clone();
                let below = table.below(&record)?;
                let base = base(&record, below);
                Ok((record, base))
            })
            .await?;
        let layers = self.layers.as_ref();
        let lower = match base {
            Base::Empty => Lower::Empty,
            Base::Directories { above, onto } => {
                let files = |record: &Record| record.directory(&self.root).join("fs");
                let mut directories: Vec<PathBuf> = above.iter().map(files).collect();
                if let Some((layer, digest, count)) = onto {
                    // Leased while it is copied.
                    let image = layers.lowest(&digest, count).await.map_err(|e| self.refusal(e))?;
                    let (digest, place) = (image.digest.to_string(), layer.whole(&self.root));
                    let whole = self.host_files.whole(layers, &digest, place).await;
                    directories.push(whole.map_err(|e| self.refusal(e))?);
                }
                Lower::Directories(directories)
            }
            Base::Layers { digest, count } => {
                let image = layers.lowest(&digest, count).await.map_err(|e| self.refusal(e))?;
                let digest = image.digest.to_string();
                self.keep(&digest, image.lease);
                let files = self
                    .host_files
                    .get(layers, &digest)
                    .await
                    .map_err(|e| self.refusal(e))?;
                Lower::Image { digest, files }
            }
        };
        Ok(mounts(&self.root, &record, lower)?)
    }
}

/// Whether containerd unpacked it for the same image. If so, it will unpack the next layer too.
fn is_unpacked_of(below: &Record, wanted: &Wanted) -> bool {
    let of = Wanted::from_labels(|name| below.labels.get(name));
    below.files == Files::Directory && of.is_some_and(|of| of.reference == wanted.reference)
}

fn image_of(record: &Record) -> Option<String> {
    match &record.files {
        Files::Image { digest, .. } => Some(digest.clone()),
        Files::Directory => None,
    }
}

/// The bytes and inodes of a directory and its files, each inode once; 0 if it does not exist.
fn usage(directory: &Path) -> std::io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let mut seen = std::collections::HashSet::new();
    let (mut bytes, mut pending) = (0, vec![directory.to_owned()]);
    while let Some(path) = pending.pop() {
        let metadata = match std::fs::symlink_metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        if seen.insert((metadata.dev(), metadata.ino())) {
            bytes += metadata.blocks() * 512;
        }
        if metadata.is_dir() {
            for entry in std::fs::read_dir(&path)? {
                pending.push(entry?.path());
            }
        }
    }
    Ok((bytes, seen.len() as u64))
}

#[tonic::async_trait]
impl Snapshots for Snapshotter {
    async fn prepare(
        &self,
        request: Request<PrepareSnapshotRequest>,
    ) -> Result<Response<PrepareSnapshotResponse>, Status> {
        let PrepareSnapshotRequest {
            key, parent, labels, ..
        } = request.into_inner();
        if let Some(wanted) = Wanted::from_labels(|name| labels.get(name))
            && self.remote(&wanted, &parent, &labels).await?
        {
            let name = wanted.target;
            return Err(Status::already_exists(format!(
                "snapshot {name:?} is a layer in the image store"
            )));
        }
        let mounts = self.make(key, parent, Stage::Active, labels).await?;
        Ok(Response::new(PrepareSnapshotResponse { mounts }))
    }

    async fn view(
        &self,
        request: Request<ViewSnapshotRequest>,
    ) -> Result<Response<ViewSnapshotResponse>, Status> {
        let ViewSnapshotRequest {
            key, parent, labels, ..
        } = request.into_inner();
        let mounts = self.make(key, parent, Stage::View, labels).await?;
        Ok(Response::new(ViewSnapshotResponse { mounts }))
    }

    async fn mounts(&self, request: Request<MountsRequest>) -> Result<Response<MountsResponse>, Status> {
        let mounts = self.mounts_of(request.into_inner().key).await?;
        Ok(Response::new(MountsResponse { mounts }))
    }

    async fn commit(&self, request: Request<CommitSnapshotRequest>) -> Result<Response<()>, Status> {
        let CommitSnapshotRequest {
            name, key, labels, ..
        } = request.into_inner();
        self.table(move |table| table.commit(&key, &name, labels.into_iter().collect()))
            .await?;
        Ok(Response::new(()))
    }

    async fn remove(&self, request: Request<RemoveSnapshotRequest>) -> Result<Response<()>, Status> {
        let key = request.into_inner().key;
        let unneeded = self
            .table(move |table| {
                let image = image_of(table.get(&key)?);
                table.remove(&key)?;
                let needed =
                    |digest: &String| table.all().any(|other| image_of(other).as_ref() == Some(digest));
                Ok(image.filter(|digest| !needed(digest)))
            })
            .await?;
        if let Some(digest) = unneeded {
            self.leases.locked().remove(&digest);
            self.host_files.forget(&digest);
        }
        Ok(Response::new(()))
    }

    async fn stat(
        &self,
        request: Request<StatSnapshotRequest>,
    ) -> Result<Response<StatSnapshotResponse>, Status> {
        let key = request.into_inner().key;
        let info = self.table(move |table| Ok(table.get(&key)?.info())).await?;
        Ok(Response::new(StatSnapshotResponse { info: Some(info) }))
    }

    async fn update(
        &self,
        request: Request<UpdateSnapshotRequest>,
    ) -> Result<Response<UpdateSnapshotResponse>, Status> {
        let UpdateSnapshotRequest {
            info, update_mask, ..
        } = request.into_inner();
        let Info { name, labels, .. } =
            info.ok_or_else(|| Status::invalid_argument("no snapshot is named"))?;
        let paths = update_mask.map(|mask| mask.paths).unwrap_or_default();
        let mut only = Vec::new();
        for path in &paths {
            match path.strip_prefix("labels.") {
                Some(label) => only.push(label.to_owned()),
                None if path == "labels" => only.clear(),
                None => {
                    return Err(Status::invalid_argument(format!(
                        "field {path:?} of a snapshot cannot be changed"
                    )));
                }
            }
        }
        let all = paths.is_empty() || paths.iter().any(|path| path == "labels");
        let info = self
            .table(move |table| {
                let record = table.relabel(&name, |old| {
                    if all {
                        *old = labels.into_iter().collect();
                        return;
                    }
                    for label in only {
                        match labels.get(&label) {
                            Some(value) => old.insert(label, value.clone()),
                            None => old.remove(&label),
                        };
                    }
                })?;
                Ok(record.info())
            })
            .await?;
        Ok(Response::new(UpdateSnapshotResponse { info: Some(info) }))
    }

    type ListStream = futures_util::stream::Iter<std::vec::IntoIter<Result<ListSnapshotsResponse, Status>>>;

    async fn list(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let filters: Result<Vec<Filter>, _> = request
            .into_inner()
            .filters
            .iter()
            .map(|text| Filter::parse(text))
            .collect();
        let filters = filters.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let infos: Vec<Info> = self
            .table(move |table| {
                let passes = |record: &&Record| {
                    filters.is_empty() || filters.iter().any(|filter| filter.holds(record))
                };
                Ok(table.all().filter(passes).map(Record::info).collect())
            })
            .await?;
        let messages: Vec<_> = infos
            .chunks(LISTED_AT_ONCE)
            .map(|info| Ok(ListSnapshotsResponse { info: info.to_vec() }))
            .collect();
        Ok(Response::new(futures_util::stream::iter(messages)))
    }

    async fn usage(&self, request: Request<UsageRequest>) -> Result<Response<UsageResponse>, Status> {
        let key = request.into_inner().key;
        let record = self.table(move |table| table.get(&key).cloned()).await?;
        // A layer of the store has a directory if others were unpacked onto it.
        let (stored, directory) = match &record.files {
            Files::Image { digest, layer } => {
                let bytes = self
                    .layers
                    .bytes(digest, *layer)
                    .await
                    .map_err(|e| self.refusal(e))?;
                (bytes, record.whole(&self.root))
            }
            Files::Directory => (0, record.directory(&self.root).join("fs")),
        };
        let counted = tokio::task::spawn_blocking(move || usage(&directory)).await;
        let counted = counted.map_err(|error| Status::internal(error.to_string()))?;
        let (bytes, inodes) = counted.map_err(|error| Status::internal(error.to_string()))?;
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        Ok(Response::new(UsageResponse {
            size: signed(stored.saturating_add(bytes)),
            inodes: signed(inodes),
        }))
    }

    /// Nothing to do: the leftovers of a killed thawd were removed when the table was opened.
    async fn cleanup(&self, _: Request<CleanupRequest>) -> Result<Response<()>, Status> {
        Ok(Response::new(()))
    }
}

#[cfg(test)]
#[path = "service_test.rs"]
mod tests;
