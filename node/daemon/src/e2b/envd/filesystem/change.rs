//! Making, moving and removing files. What is made belongs to the container's root user.

use thaw_protocol::connect::Code;
use thaw_protocol::e2b::filesystem::{
    MakeDirRequest, MakeDirResponse, MoveRequest, MoveResponse, RemoveRequest, RemoveResponse,
};

use super::super::call::Call;
use super::super::failure::Failure;
use super::super::paths;
use super::entry::Looker;
use crate::api::check;

/// The permissions of a directory that is made.
const DIRECTORY_MODE: u32 = 0o755;

/// Makes a directory, and those above it.
pub async fn make(call: Call, request: MakeDirRequest) -> Result<MakeDirResponse, Failure> {
    let files = call.files().await?;
    let path = paths::absolute(&files, call.user.as_deref(), &request.path).await?;
    match files.stat(&path, true).await.map_err(Failure::from) {
        Ok(info) if info.mode & libc::S_IFMT == libc::S_IFDIR => {
            return Err(Failure::new(Code::AlreadyExists, format!("{path} exists")));
        }
        Ok(_) => return Err(Failure::invalid(format!("{path} exists, and is no directory"))),
        Err(failure) if failure.code == Code::NotFound => {}
        Err(failure) => return Err(failure),
    }
    files.make_directory(&path, DIRECTORY_MODE, true).await?;
    let entry = Looker::new(files).await.look(&path).await?;
    Ok(MakeDirResponse { entry: Some(entry) })
}

/// Renames a file or directory, and makes the directories above the new path. A file there is replaced.
pub async fn rename(call: Call, request: MoveRequest) -> Result<MoveResponse, Failure> {
    let files = call.files().await?;
    let from = paths::absolute(&files, call.user.as_deref(), &request.source).await?;
    let to = paths::absolute(&files, call.user.as_deref(), &request.destination).await?;
    check::file(&from)?;
    check::file(&to)?;
    // First, so that a wrong path makes no directories.
    files.stat(&from, false).await?;
    let parent = paths::parent(&to);
    if parent != "/" {
        files.make_directory(parent, DIRECTORY_MODE, true).await?;
    }
    files.rename(&from, &to, true).await?;
    let entry = Looker::new(files).await.look(&to).await?;
    Ok(MoveResponse { entry: Some(entry) })
}

/// Removes a file, or a directory with what is in it. What is not there need not be removed.
pub async fn remove(call: Call, request: RemoveRequest) -> Result<RemoveResponse, Failure> {
    let files = call.files().await?;
    let path = paths::absolute(&files, call.user.as_deref(), &request.path).await?;
    check::file(&path)?;
    match files.remove(&path, true).await.map_err(Failure::from) {
        Err(failure) if failure.code != Code::NotFound => Err(failure),
        _ => Ok(RemoveResponse {}),
    }
}
