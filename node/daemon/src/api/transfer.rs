//! The handlers for files of a sandbox's container.
//!
//! Invariants: at most one piece of a file is held, whatever its size; an answer with a length has that length, or breaks off; an
//! incomplete upload leaves nothing under its path.

use std::sync::Arc;

use axum::body::{Body as Stream, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde::Deserialize;
use thaw_protocol::api::{FILE_MODE, MAX_FILE, Problem};
use thaw_sandbox::error::Error;
use thaw_sandbox::id::new_id;
use utoipa::{IntoParams, ToSchema};

use super::daemon::Daemon;
use super::extract::{BODY_LIMIT, Parameters, content_length};
use super::files::{Files, PIECE, Piece, Upload, UploadKind, forget};
use super::problem::{ApiCode, Refusal};
use super::scope::Wanted;
use super::{archive, check};

/// The form of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ArchiveForm {
    /// A tar stream.
    Tar,
}

/// Which file is read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReadParameters {
    /// Absolute path in the container, without `..`.
    #[param(max_length = 1024, pattern = r"^/[^\x00]*$")]
    path: String,
    /// Read a file or a directory with all below it as an archive. Its names begin with the path's last part, or with `.` if the path
    /// ends with `/.`
    #[param(inline)]
    archive: Option<ArchiveForm>,
    /// With `archive`: follow a link at the end of the path instead of reading the link itself [default: false].
    follow: Option<bool>,
}

/// Which file is written.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WriteParameters {
    /// Absolute path in the container, without `..`.
    #[param(max_length = 1024, pattern = r"^/[^\x00]*$")]
    path: String,
    /// Permission bits of a new file, in octal [default: 0644].
    #[param(pattern = "^[0-7]{1,4}$")]
    mode: Option<String>,
    /// Unpack an archive below the path, which must be a directory. Directories keep what else they have.
    #[param(inline)]
    archive: Option<ArchiveForm>,
    /// With `archive`: give files the owners that the archive names, instead of the container's root user [default: false].
    keep_owner: Option<bool>,
}

/// Reads a file of the sandbox's container, as the container's root user sees it; with `archive`, a file or directory as a tar stream.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", operation_id = "readFile", tag = "files",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), ReadParameters), responses(
    (status = 200, description = "The file; with `archive` a tar stream (application/x-tar), whose end says that it is whole", body = Vec<u8>, content_type = "application/octet-stream",
        headers(("thaw-file-mode" = String, description = "The file's permission bits, in octal"))),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, container or file", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the file cannot be read", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The path is not a regular file, or the file is too large", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn read(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<ReadParameters>,
) -> Result<Response, Refusal> {
    if asked.archive.is_some() {
        check::directory(&asked.path)?;
        let files = daemon.running(&wanted)?.files().await?;
        return archive::read(files, asked.path, asked.follow.unwrap_or(false)).await;
    }
    without_archive("follow", asked.follow)?;
    check::file(&asked.path)?;
    let files = daemon.running(&wanted)?.files().await?;
    let first = files.read(&asked.path, 0, 0).await?;
    if first.size > MAX_FILE {
        let what = format!("{} has {} bytes, more than {MAX_FILE}", asked.path, first.size);
        return Err(Refusal::new(ApiCode::NotAFile, what));
    }
    let mode = format!("{:04o}", first.mode);
    let size = (first.size > 0).then_some(first.size);
    let reading = Reading {
        files,
        path: asked.path,
        identity: first.identity,
        size,
        at: 0,
        next: Some(first),
    };
    let pieces = futures_util::stream::unfold(reading, async |mut reading| {
        reading.next().await.map(|piece| (piece, reading))
    });
    let mut response = Stream::from_stream(pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    if let Ok(mode) = HeaderValue::from_str(&mode) {
        headers.insert(FILE_MODE, mode);
    }
    if let Some(size) = size {
        headers.insert(header::CONTENT_LENGTH, size.into());
    }
    Ok(response)
}

/// The body of a download.
struct Reading {
    files: Arc<dyn Files>,
    path: String,
    identity: u64,
    /// The announced bytes that were not sent yet. `None`: read until the end of the file.
    size: Option<u64>,
    at: u64,
    next: Option<Piece>,
}

impl Reading {
    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Option<std::io::Result<Bytes>> {
        let left = self.size.unwrap_or(MAX_FILE) - self.at;
        if left == 0 {
            return None;
        }
        let piece = match self.next.take() {
            Some(first) => Ok(first),
            None => self.files.read(&self.path, self.at, self.identity).await,
        };
        let mut data = match piece {
            Ok(piece) => piece.data,
            Err(refusal) => return Some(Err(std::io::Error::other(refusal.to_string()))),
        };
        if data.is_empty() {
            let short = || std::io::Error::other("the file became shorter while it was read");
            return self.size.map(|_| Err(short()));
        }
        data.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        self.at += data.len() as u64;
        Some(Ok(data.into()))
    }
}

/// Writes a file of the sandbox's container, as the container's root user.
///
/// The file appears once it is complete. It replaces an existing file, whose owner and permissions it keeps. With `archive`, the body is
/// a tar stream that is unpacked below the path; what was unpacked before an error stays.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", operation_id = "writeFile", tag = "files",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"), WriteParameters),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 204, description = "The file is written"),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox, container or directory", body = Problem, content_type = "application/problem+json"),
    (status = 408, description = "The body did not arrive in time", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running, or the file cannot be written", body = Problem, content_type = "application/problem+json"),
    (status = 413, description = "The file exceeds 1 GiB", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The path is a directory, or not one for an archive", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
    (status = 507, description = "There is no space left in the sandbox", body = Problem, content_type = "application/problem+json"),
))]
pub async fn write(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<WriteParameters>,
    request: Request,
) -> Result<StatusCode, Refusal> {
    let kind = kind(&asked)?;
    let most = match kind {
        UploadKind::File { .. } => MAX_FILE,
        UploadKind::Archive { .. } => u64::MAX,
    };
    if content_length(&request).is_some_and(|length| length > most) {
        return Err(too_large());
    }
    let name = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
    let mut writing = Writing {
        files: daemon.running(&wanted)?.files().await?,
        upload: Upload {
            path: asked.path,
            name,
            kind,
        },
        at: 0,
        over: false,
    };
    let mut body = request.into_body().into_data_stream();
    let mut held = Vec::new();
    loop {
        let data = match tokio::time::timeout(BODY_LIMIT, body.next()).await {
            Ok(Some(Ok(data))) => data,
            Ok(None) => break,
            Ok(Some(Err(e))) => {
                return Err(Refusal::new(
                    ApiCode::Malformed,
                    format!("the body broke off: {e}"),
                ));
            }
            Err(_) => {
                let what = format!("nothing of the body came for {} s", BODY_LIMIT.as_secs());
                return Err(Refusal::new(ApiCode::TooSlow, what));
            }
        };
        if writing.at + (held.len() + data.len()) as u64 > most {
            return Err(too_large());
        }
        let mut data = &data[..];
        while held.len() + data.len() > PIECE {
            let (now, later) = data.split_at(PIECE - held.len());
            held.extend_from_slice(now);
            writing.write(std::mem::take(&mut held), false).await?;
            data = later;
        }
        held.extend_from_slice(data);
    }
    writing.write(held, true).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What the body of a request is.
fn kind(asked: &WriteParameters) -> Result<UploadKind, Refusal> {
    if asked.archive.is_some() {
        check::directory(&asked.path)?;
        if asked.mode.is_some() {
            let what = "mode is for a file: an archive says the modes of what is in it";
            return Err(Refusal::new(ApiCode::BadParameter, what));
        }
        let keep_owner = asked.keep_owner.unwrap_or(false);
        return Ok(UploadKind::Archive { keep_owner });
    }
    without_archive("keep_owner", asked.keep_owner)?;
    check::file(&asked.path)?;
    let mode = check::mode(asked.mode.as_deref().unwrap_or("0644"));
    let mode = mode.ok_or_else(|| Refusal::new(ApiCode::BadParameter, check::MODE))?;
    Ok(UploadKind::File { mode })
}

/// Refuses a parameter that needs `archive`.
fn without_archive(name: &str, value: Option<bool>) -> Result<(), Refusal> {
    match value {
        None => Ok(()),
        Some(_) => Err(Refusal::new(
            ApiCode::BadParameter,
            format!("{name} goes with archive"),
        )),
    }
}

fn too_large() -> Refusal {
    Refusal::new(
        ApiCode::BodyTooLarge,
        format!("a file has at most {MAX_FILE} bytes"),
    )
}

/// An upload. Dropping it before it is complete discards it.
struct Writing {
    files: Arc<dyn Files>,
    upload: Upload,
    at: u64,
    over: bool,
}

impl Writing {
    async fn write(&mut self, data: Vec<u8>, last: bool) -> Result<(), Refusal> {
        let length = data.len() as u64;
        self.files.write(&self.upload, self.at, data, last).await?;
        self.at += length;
        self.over = last;
        Ok(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.over {
            let (files, upload) = (self.files.clone(), self.upload.clone());
            forget(async move { files.abandon(&upload).await });
        }
    }
}

#[cfg(test)]
#[path = "transfer_test.rs"]
mod tests;
