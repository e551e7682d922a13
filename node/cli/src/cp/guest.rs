//! The files of a sandbox's container, for `thaw cp`.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use thaw_archive::Part;
use thaw_protocol::agent::files::{FileInfo, PackRequest, StatRequest, UnpackRequest};
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client::{self, AgentClient};
use thaw_sandbox::container::Running;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::id::new_id;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{RunDirectory, vsock_socket};
use tokio::sync::mpsc;
use ttrpc::Code;

use super::plan;

/// Most links that lead to each other.
const MAX_LINKS: usize = 40;
const TYPE: u32 = libc::S_IFMT;

/// A container, and the agent that reads and writes its files.
pub struct Guest {
    agent: AgentClient,
    container: String,
}

/// A file of a container.
#[derive(Debug)]
pub struct Found {
    pub is_directory: bool,
    /// Where it leads, if it is a link.
    target: Option<PathBuf>,
}

impl Guest {
    /// Finds a sandbox by id, name, or prefix of an id.
    pub async fn find(wanted: &str) -> Result<Guest, Error> {
        let run = RunDirectory::open(&Paths::from_env().run)?;
        let record = run.find(wanted)?;
        let directory = run.directory(&record.id);
        let container = Running::read(&directory)?.container_id;
        let agent = agent_client::connect(&vsock_socket(&directory), READY_LIMIT).await?;
        Ok(Guest { agent, container })
    }

    /// Looks at a file; `None` if there is none.
    pub async fn look(&self, path: &Path, follow: bool) -> Result<Option<Found>, Error> {
        let request = StatRequest {
            container_id: self.container.clone(),
            path: path.as_os_str().as_bytes().to_vec(),
            follow,
            ..Default::default()
        };
        match self.agent.stat(&request).await {
            Ok(info) => Ok(Some(found(info))),
            Err(ttrpc::Error::RpcStatus(status)) if status.code() == Code::NOT_FOUND => Ok(None),
            Err(e) => Err(failure(e)),
        }
    }

    /// Follows links at the end of a path by name, so that the file they lead to is replaced, not the link. Returns where they lead, and
    /// whether a directory is there.
    pub async fn real(&self, path: &Path) -> Result<(PathBuf, Option<bool>), Error> {
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            let Some(found) = self.look(&path, false).await? else {
                return Ok((path, None));
            };
            let Some(target) = found.target else {
                return Ok((path, Some(found.is_directory)));
            };
            let holder = path.parent().unwrap_or(Path::new("/"));
            path = plan::absolute(&holder.join(target));
        }
        let what = format!("{} leads through too many links", path.display());
        Err(Error::new(ErrorKind::Runtime, what).remedy("name the file itself"))
    }

    /// Reads a file or directory as an archive, whose first entry has this name. `take` returns whether it wants more.
    pub async fn pack(
        &self,
        path: &Path,
        name: &OsStr,
        follow: bool,
        mut take: impl AsyncFnMut(Part) -> bool,
    ) -> Result<(), Error> {
        let transfer = transfer_name()?;
        let request = PackRequest {
            container_id: self.container.clone(),
            path: path.as_os_str().as_bytes().to_vec(),
            name: name.as_bytes().to_vec(),
            follow,
            transfer: transfer.clone(),
            ..Default::default()
        };
        self.agent.pack(&request).await.map_err(failure)?;
        loop {
            let piece = self.agent.next_piece(&transfer).await.map_err(failure)?;
            if piece.is_empty() {
                take(Part::End).await;
                return Ok(());
            }
            if !take(Part::Data(piece)).await {
                // Whoever took the pieces says why it ended. The agent forgets the transfer by itself, too.
                let _ = self.agent.abandon_transfer(&transfer).await;
                return Ok(());
            }
        }
    }

    /// Unpacks an archive below a directory.
    pub async fn unpack(
        &self,
        directory: &Path,
        keep_owner: bool,
        mut parts: mpsc::Receiver<Part>,
    ) -> Result<(), Error> {
        let mut request = UnpackRequest {
            container_id: self.container.clone(),
            path: directory.as_os_str().as_bytes().to_vec(),
            transfer: transfer_name()?,
            keep_owner,
            ..Default::default()
        };
        loop {
            let (data, last) = match parts.recv().await {
                Some(Part::Data(data)) => (data, false),
                Some(Part::End) => (Vec::new(), true),
                broken => {
                    // The agent forgets the transfer by itself, too.
                    let _ = self.agent.abandon_transfer(&request.transfer).await;
                    let why = match broken {
                        Some(Part::Failed(e)) => e.to_string(),
                        _ => "the thread that reads the files has ended".into(),
                    };
                    return Err(Error::new(ErrorKind::Runtime, why).remedy("check the files on this host"));
                }
            };
            let length = data.len() as u64;
            (request.data, request.last) = (data, last);
            self.agent.unpack(&request).await.map_err(failure)?;
            request.offset += length;
            if last {
                return Ok(());
            }
        }
    }
}

fn transfer_name() -> Result<String, Error> {
    new_id().map_err(|e| Error::system("cannot read random bytes", &e))
}

fn found(info: FileInfo) -> Found {
    let is_link = info.mode & TYPE == libc::S_IFLNK;
    Found {
        is_directory: info.mode & TYPE == libc::S_IFDIR,
        target: is_link.then(|| PathBuf::from(std::ffi::OsString::from_vec(info.target))),
    }
}

/// The agent's error. Its status tells an error of the container's files from one of the agent.
fn failure(error: ttrpc::Error) -> Error {
    let ttrpc::Error::RpcStatus(status) = &error else {
        let what = format!("the guest's agent does not answer: {error}");
        return Error::new(ErrorKind::AgentFailed, what);
    };
    let of_files = |remedy: &str| Error::new(ErrorKind::Runtime, status.message()).remedy(remedy);
    match status.code() {
        Code::NOT_FOUND | Code::INVALID_ARGUMENT => of_files("check the path in the sandbox"),
        Code::FAILED_PRECONDITION => of_files("look at it in the sandbox: thaw exec SANDBOX ls -la PATH"),
        Code::RESOURCE_EXHAUSTED => {
            of_files("remove something in the sandbox, or run it with a larger --disk")
        }
        _ => Error::new(ErrorKind::AgentFailed, status.message()),
    }
}
