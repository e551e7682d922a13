//! The handlers that look at a container's files, and make, move and remove them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde::Deserialize;
use thaw_protocol::agent::files::FileInfo as GuestInfo;
use thaw_protocol::api::{
    Encoding, FILES_PAGE, FileInfo, FileKind, FileList, MakeDirectory, MoveFile, Problem,
};
use utoipa::IntoParams;

use super::check;
use super::daemon::Daemon;
use super::extract::{Body, Parameters};
use super::problem::{ApiCode, Refusal};
use super::scope::Wanted;

/// Which file is looked at.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatParameters {
    /// Absolute path in the container, without `..`.
    #[param(max_length = 1024, pattern = r"^/[^\x00]*$")]
    path: String,
    /// Look at what a link leads to [default: false].
    follow: Option<bool>,
}

/// Looks at a file of the sandbox's container.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/stat", operation_id = "getFileStatus", tag = "files",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), StatParameters), responses(
    (status = 200, description = "The file", body = FileInfo),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, container or file", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the file cannot be looked at", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn stat(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<StatParameters>,
) -> Result<Json<FileInfo>, Refusal> {
    check::directory(&asked.path)?;
    let files = daemon.running(&wanted)?.files().await?;
    let info = files.stat(&asked.path, asked.follow.unwrap_or(false)).await?;
    Ok(Json(file_info(info)))
}

/// Which directory is listed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListParameters {
    /// Absolute path in the container, without `..`.
    #[param(max_length = 1024, pattern = r"^/[^\x00]*$")]
    path: String,
    /// Most entries of the answer, 1 to 1000 [default: 1000]. There may be fewer, also before the last page.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u16>,
    /// The continue_token of the page before.
    #[serde(rename = "continue")]
    #[param(max_length = 512)]
    continue_token: Option<String>,
}

/// Lists a directory of the sandbox's container.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/list", operation_id = "listDirectory", tag = "files",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), ListParameters), responses(
    (status = 200, description = "A page of the directory", body = FileList),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, container or directory", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the directory cannot be read", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn list(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<ListParameters>,
) -> Result<Json<FileList>, Refusal> {
    check::directory(&asked.path)?;
    let limit = asked.limit.unwrap_or(FILES_PAGE);
    if !(1..=FILES_PAGE).contains(&limit) {
        let what = format!("limit is 1 to {FILES_PAGE}");
        return Err(Refusal::new(ApiCode::BadParameter, what));
    }
    let token = asked.continue_token.unwrap_or_default();
    let after = URL_SAFE_NO_PAD.decode(&token).map_err(|_| {
        let what = "continue is not a continue_token of this directory";
        Refusal::new(ApiCode::BadParameter, what)
    })?;
    let files = daemon.running(&wanted)?.files().await?;
    let page = files.list(&asked.path, after, limit).await?;
    let last = page.entries.last().filter(|_| page.more);
    Ok(Json(FileList {
        continue_token: last.map(|entry| URL_SAFE_NO_PAD.encode(&entry.name)),
        items: page
            .entries
            .into_iter()
            .take(limit.into())
            .map(file_info)
            .collect(),
    }))
}

/// Makes a directory in the sandbox's container, as its root user.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/mkdir", operation_id = "createDirectory", tag = "files", request_body = MakeDirectory,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The directory is made"),
    (status = 404, description = "There is no such sandbox, container or directory to make it in", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the path exists", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
    (status = 507, description = "There is no space left in the sandbox", body = Problem, content_type = "application/problem+json"),
))]
pub async fn make(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(request): Body<MakeDirectory>,
) -> Result<StatusCode, Refusal> {
    check::path_in_body("path", &request.path)?;
    let mode = check::mode(request.mode.as_deref().unwrap_or("0755"));
    let mode = mode.ok_or_else(|| Refusal::new(ApiCode::Invalid, check::MODE))?;
    let files = daemon.running(&wanted)?.files().await?;
    files.make_directory(&request.path, mode, request.parents).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Renames a file or directory of the sandbox's container. A link is renamed itself.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/move", operation_id = "moveFile", tag = "files", request_body = MoveFile,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "It is moved"),
    (status = 404, description = "There is no such sandbox, container, file or directory", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, the new path exists, or it is on another file system", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn rename(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(request): Body<MoveFile>,
) -> Result<StatusCode, Refusal> {
    check::path_in_body("from", &request.from)?;
    check::path_in_body("to", &request.to)?;
    let files = daemon.running(&wanted)?.files().await?;
    files.rename(&request.from, &request.to, request.replace).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Which file is removed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RemoveParameters {
    /// Absolute path in the container, without `..`.
    #[param(max_length = 1024, pattern = r"^/[^\x00]*$")]
    path: String,
    /// Remove a directory with what is in it [default: false].
    recursive: Option<bool>,
}

/// Removes a file or directory of the sandbox's container. A link is removed itself.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/files", operation_id = "deleteFile", tag = "files",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), RemoveParameters), responses(
    (status = 204, description = "It is removed"),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, container or file", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the directory is not empty", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn remove(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<RemoveParameters>,
) -> Result<StatusCode, Refusal> {
    check::file(&asked.path)?;
    let files = daemon.running(&wanted)?.files().await?;
    files
        .remove(&asked.path, asked.recursive.unwrap_or(false))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A file as the guest describes it. Every answer of a guest is valid.
fn file_info(info: GuestInfo) -> FileInfo {
    let kind = kind(info.mode);
    let target = (kind == FileKind::Link).then_some(info.target);
    let texts = (
        String::from_utf8(info.name),
        target.map(String::from_utf8).transpose(),
    );
    let (name, target, encoding) = match texts {
        (Ok(name), Ok(target)) => (name, target, Encoding::Utf8),
        (name, target) => {
            let bytes = |text: Result<String, std::string::FromUtf8Error>| {
                STANDARD.encode(text.map_or_else(|e| e.into_bytes(), String::into_bytes))
            };
            (bytes(name), target.transpose().map(bytes), Encoding::Base64)
        }
    };
    FileInfo {
        name,
        kind,
        mode: format!("{:04o}", info.mode & 0o7777),
        size: info.size,
        uid: info.uid,
        gid: info.gid,
        modified_s: info.modified_s,
        modified_ns: info.modified_ns,
        target,
        encoding,
    }
}

fn kind(mode: u32) -> FileKind {
    match mode & libc::S_IFMT {
        libc::S_IFREG => FileKind::File,
        libc::S_IFDIR => FileKind::Directory,
        libc::S_IFLNK => FileKind::Link,
        libc::S_IFCHR => FileKind::CharacterDevice,
        libc::S_IFBLK => FileKind::BlockDevice,
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        _ => FileKind::Unknown,
    }
}

#[cfg(test)]
#[path = "directory_test.rs"]
mod tests;
