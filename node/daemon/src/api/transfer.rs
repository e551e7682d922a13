//! The handlers for files of a sandbox's container.
//!
//! Invariants: those of [`super::file_stream`].

use std::sync::Arc;

use axum::body::{Body as Stream, BodyDataStream, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde::Deserialize;
use thaw_protocol::api::{FILE_MODE, Problem};
use utoipa::{IntoParams, ToSchema};

use super::daemon::Daemon;
use super::extract::{BODY_LIMIT, Parameters, content_length};
use super::file_stream::{OpenDownload, OpenUpload, too_large};
use super::files::UploadKind;
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
    let download = OpenDownload::open(files, asked.path).await?;
    let mode = format!("{:04o}", download.mode());
    let size = download.size();
    let mut response = Stream::from_stream(download.into_stream()).into_response();
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
    let files = daemon.running(&wanted)?.files().await?;
    let mut upload = OpenUpload::begin(files, asked.path, kind)?;
    if content_length(&request).is_some_and(|length| length > upload.most()) {
        return Err(too_large());
    }
    let mut body = request.into_body().into_data_stream();
    while let Some(data) = next_data(&mut body).await? {
        upload.push(&data).await?;
    }
    upload.finish().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The next bytes of a body; `None` at its end.
///
/// # Errors
/// The body breaks off, or nothing of it comes for [`BODY_LIMIT`].
pub async fn next_data(body: &mut BodyDataStream) -> Result<Option<Bytes>, Refusal> {
    match tokio::time::timeout(BODY_LIMIT, body.next()).await {
        Ok(Some(Ok(data))) => Ok(Some(data)),
        Ok(None) => Ok(None),
        Ok(Some(Err(e))) => Err(Refusal::new(
            ApiCode::Malformed,
            format!("the body broke off: {e}"),
        )),
        Err(_) => {
            let what = format!("nothing of the body came for {} s", BODY_LIMIT.as_secs());
            Err(Refusal::new(ApiCode::TooSlow, what))
        }
    }
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

#[cfg(test)]
#[path = "transfer_test.rs"]
mod tests;
