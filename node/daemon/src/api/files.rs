//! The files of a container, which the guest's agent reads and writes.

use async_trait::async_trait;
use thaw_protocol::agent::files::{
    FileInfo, ListRequest, ListResponse, MakeDirectoryRequest, MoveRequest, NextEventsResponse, PackRequest,
    ReadFileRequest, RemoveRequest, StatRequest, UnpackRequest, WatchRequest, WriteFileRequest,
};
use thaw_sandbox::agent_client::AgentClient;
use thaw_sandbox::error::{Error, ErrorKind};
use ttrpc::Code;

use super::extract::BODY_LIMIT;
use super::problem::{ApiCode, Refusal};

/// Largest piece that the agent reads or writes at once, bytes.
pub const PIECE: usize = 256 << 10;

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Shorter than [`PIECE`] only at the end.
    pub data: Vec<u8>,
    /// 0 also for files without a size, such as those of /proc.
    pub size: u64,
    pub mode: u32,
    /// Identifies the file, so that a file that replaces it is noticed.
    pub identity: u64,
}

/// What is being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    pub path: String,
    /// Different for each upload.
    pub name: String,
    pub kind: UploadKind,
}

/// What an upload becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UploadKind {
    /// A file; a new one gets this mode.
    File { mode: u32 },
    /// What the tar stream contains, below the path.
    Archive { keep_owner: bool },
}

/// A file or directory that is read as a tar stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Download {
    pub path: String,
    /// Of a link at the end of the path: what it leads to.
    pub follow: bool,
    /// Different for each download.
    pub name: String,
}

/// A directory that is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryWatch {
    pub path: String,
    /// Also the directories below it.
    pub recursive: bool,
    /// Different for each watch.
    pub name: String,
}

/// The files of one container.
#[async_trait]
pub trait Files: std::fmt::Debug + Send + Sync {
    /// Reads a piece at an offset. An identity other than 0 must be the file's.
    async fn read(&self, path: &str, offset: u64, identity: u64) -> Result<Piece, Refusal>;
    /// Looks at a file, or at what a link leads to.
    async fn stat(&self, path: &str, follow: bool) -> Result<FileInfo, Refusal>;
    /// A page of a directory: the names after `after`.
    async fn list(&self, path: &str, after: Vec<u8>, limit: u16) -> Result<ListResponse, Refusal>;
    async fn make_directory(&self, path: &str, mode: u32, parents: bool) -> Result<(), Refusal>;
    async fn rename(&self, from: &str, to: &str, replace: bool) -> Result<(), Refusal>;
    async fn remove(&self, path: &str, recursive: bool) -> Result<(), Refusal>;
    /// Begins to read an archive.
    async fn pack(&self, download: &Download) -> Result<(), Refusal>;
    /// The next piece of an archive; empty at its end.
    async fn next_piece(&self, download: &Download) -> Result<Vec<u8>, Refusal>;
    /// Ends the reading of an archive.
    async fn abandon_download(&self, download: &Download);
    /// Writes a piece, in order. A file appears with the last.
    async fn write(&self, upload: &Upload, offset: u64, data: Vec<u8>, last: bool) -> Result<(), Refusal>;
    /// Discards an upload.
    async fn abandon(&self, upload: &Upload);
    /// Begins to watch a directory.
    async fn watch(&self, watch: &DirectoryWatch) -> Result<(), Refusal>;
    /// The next events of a watch. Waits for them, but not for long.
    async fn next_events(&self, watch: &DirectoryWatch) -> Result<NextEventsResponse, Refusal>;
    /// Ends a watch.
    async fn abandon_watch(&self, watch: &DirectoryWatch);
}

/// The files behind a guest's agent.
#[derive(Debug)]
pub struct GuestFiles {
    pub agent: AgentClient,
    pub container: String,
}

#[async_trait]
impl Files for GuestFiles {
    async fn read(&self, path: &str, offset: u64, identity: u64) -> Result<Piece, Refusal> {
        let request = ReadFileRequest {
            container_id: self.container.clone(),
            path: path.into(),
            offset,
            length: PIECE as u32,
            identity,
            ..Default::default()
        };
        let answer = self.agent.read_file(&request).await.map_err(refusal)?;
        Ok(Piece {
            data: answer.data,
            size: answer.size,
            mode: answer.mode,
            identity: answer.identity,
        })
    }

    async fn stat(&self, path: &str, follow: bool) -> Result<FileInfo, Refusal> {
        let request = StatRequest {
            container_id: self.container.clone(),
            path: path.into(),
            follow,
            ..Default::default()
        };
        self.agent.stat(&request).await.map_err(refusal)
    }

    async fn list(&self, path: &str, after: Vec<u8>, limit: u16) -> Result<ListResponse, Refusal> {
        let request = ListRequest {
            container_id: self.container.clone(),
            path: path.into(),
            after,
            limit: limit.into(),
            ..Default::default()
        };
        self.agent.list(&request).await.map_err(refusal)
    }

    async fn make_directory(&self, path: &str, mode: u32, parents: bool) -> Result<(), Refusal> {
        let request = MakeDirectoryRequest {
            container_id: self.container.clone(),
            path: path.into(),
            mode,
            parents,
            ..Default::default()
        };
        self.agent.make_directory(&request).await.map_err(refusal)
    }

    async fn rename(&self, from: &str, to: &str, replace: bool) -> Result<(), Refusal> {
        let request = MoveRequest {
            container_id: self.container.clone(),
            from: from.into(),
            to: to.into(),
            replace,
            ..Default::default()
        };
        self.agent.move_file(&request).await.map_err(refusal)
    }

    async fn remove(&self, path: &str, recursive: bool) -> Result<(), Refusal> {
        let request = RemoveRequest {
            container_id: self.container.clone(),
            path: path.into(),
            recursive,
            ..Default::default()
        };
        self.agent.remove_file(&request).await.map_err(refusal)
    }

    async fn pack(&self, download: &Download) -> Result<(), Refusal> {
        let request = PackRequest {
            container_id: self.container.clone(),
            path: download.path.clone().into_bytes(),
            name: entry_name(&download.path).into(),
            follow: download.follow,
            transfer: download.name.clone(),
            ..Default::default()
        };
        self.agent.pack(&request).await.map_err(refusal)
    }

    async fn next_piece(&self, download: &Download) -> Result<Vec<u8>, Refusal> {
        self.agent.next_piece(&download.name).await.map_err(refusal)
    }

    async fn abandon_download(&self, download: &Download) {
        if let Err(e) = self.agent.abandon_transfer(&download.name).await {
            tracing::debug!("a download stays behind in its guest: {e}");
        }
    }

    async fn write(&self, upload: &Upload, offset: u64, data: Vec<u8>, last: bool) -> Result<(), Refusal> {
        let written = match upload.kind {
            UploadKind::File { mode } => {
                let request = WriteFileRequest {
                    offset,
                    data,
                    last,
                    mode,
                    ..self.file(upload)
                };
                self.agent.write_file(&request).await
            }
            UploadKind::Archive { keep_owner } => {
                let request = UnpackRequest {
                    container_id: self.container.clone(),
                    path: upload.path.clone().into_bytes(),
                    transfer: upload.name.clone(),
                    offset,
                    data,
                    last,
                    keep_owner,
                    ..Default::default()
                };
                self.agent.unpack(&request).await
            }
        };
        written.map_err(refusal)
    }

    async fn abandon(&self, upload: &Upload) {
        let abandoned = match upload.kind {
            UploadKind::File { .. } => {
                let request = WriteFileRequest {
                    abandon: true,
                    ..self.file(upload)
                };
                self.agent.write_file(&request).await
            }
            UploadKind::Archive { .. } => self.agent.abandon_transfer(&upload.name).await,
        };
        if let Err(e) = abandoned {
            tracing::debug!("an upload stays behind in its container: {e}");
        }
    }

    async fn watch(&self, watch: &DirectoryWatch) -> Result<(), Refusal> {
        let request = WatchRequest {
            container_id: self.container.clone(),
            path: watch.path.clone().into_bytes(),
            recursive: watch.recursive,
            watch: watch.name.clone(),
            ..Default::default()
        };
        self.agent.watch(&request).await.map_err(refusal)
    }

    async fn next_events(&self, watch: &DirectoryWatch) -> Result<NextEventsResponse, Refusal> {
        self.agent.next_events(&watch.name).await.map_err(refusal)
    }

    async fn abandon_watch(&self, watch: &DirectoryWatch) {
        if let Err(e) = self.agent.abandon_watch(&watch.name).await {
            tracing::debug!("a watch stays behind in its guest: {e}");
        }
    }
}

impl GuestFiles {
    /// A request for the file of an upload.
    fn file(&self, upload: &Upload) -> WriteFileRequest {
        WriteFileRequest {
            container_id: self.container.clone(),
            path: upload.path.clone(),
            upload: upload.name.clone(),
            ..Default::default()
        }
    }
}

/// The name of an archive's first entry: the path's last part, or `.` for a path that ends with `/.` and for `/`.
fn entry_name(path: &str) -> &str {
    match path.trim_end_matches('/').rsplit('/').next() {
        Some("") | None => ".",
        Some(name) => name,
    }
}

/// Has the guest forget what a caller left. Bounded by the timeout of the call, which also closes the connection.
pub fn forget(work: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(tokio::time::timeout(BODY_LIMIT, work));
}

/// The agent's status code tells whether the caller or the guest is at fault.
fn refusal(error: ttrpc::Error) -> Refusal {
    let ttrpc::Error::RpcStatus(status) = &error else {
        let what = format!("the guest's agent does not answer: {error}");
        return Error::new(ErrorKind::AgentFailed, what).into();
    };
    let code = match status.code() {
        Code::NOT_FOUND => ApiCode::NoFile,
        Code::INVALID_ARGUMENT => ApiCode::NotAFile,
        Code::FAILED_PRECONDITION => ApiCode::FileRefused,
        Code::RESOURCE_EXHAUSTED => ApiCode::NoRoom,
        _ => return Error::new(ErrorKind::AgentFailed, status.message()).into(),
    };
    Refusal::new(code, status.message())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_begins_with_the_last_part_of_its_path() {
        for (path, name) in [
            ("/a/b", "b"),
            ("/a/b/", "b"),
            ("/a/.", "."),
            ("/", "."),
            ("/a/./", "."),
        ] {
            assert_eq!(entry_name(path), name, "{path}");
        }
    }

    #[test]
    fn the_agents_codes_say_whose_fault_it_is() {
        let code = |code: Code| match refusal(ttrpc::Error::RpcStatus(ttrpc::get_status(code, "x"))) {
            Refusal::Api(code, _) => Some(code),
            Refusal::Failure(_) => None,
        };
        assert_eq!(code(Code::NOT_FOUND), Some(ApiCode::NoFile));
        assert_eq!(code(Code::INVALID_ARGUMENT), Some(ApiCode::NotAFile));
        assert_eq!(code(Code::FAILED_PRECONDITION), Some(ApiCode::FileRefused));
        assert_eq!(code(Code::RESOURCE_EXHAUSTED), Some(ApiCode::NoRoom));
        assert_eq!(code(Code::INTERNAL), None);
        assert!(
            matches!(refusal(ttrpc::Error::LocalClosed), Refusal::Failure(f) if f.kind == ErrorKind::AgentFailed)
        );
    }
}
