//! Files that a caller sends: one as the body, or several as the parts of a form.
//!
//! Invariants: those of [`crate::api::file_stream`]; a compressed body is expanded in small steps, and a file has at most
//! [`MAX_FILE`](thaw_protocol::api::MAX_FILE) bytes once it is expanded.

use std::io::Write;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use flate2::write::GzDecoder;
use serde::Serialize;
use thaw_protocol::connect::Code;

use super::super::call::Call;
use super::super::failure::Failure;
use super::super::open_sandbox::OpenSandboxes;
use super::super::paths;
use super::download::Query;
use super::multipart::Form;
use crate::api::check;
use crate::api::extract::content_length;
use crate::api::file_stream::{OpenUpload, too_large};
use crate::api::files::{Files, UploadKind};
use crate::api::transfer::next_data;

/// Most files of one form.
const MOST_FILES: usize = 1000;
/// The permissions of a new file.
const FILE_MODE: u32 = 0o644;
/// The permissions of a new directory.
const DIRECTORY_MODE: u32 = 0o755;
/// The field of a form whose parts are files.
const FIELD: &str = "file";
/// What names of metadata headers begin with.
const METADATA: &str = "x-metadata-";
/// Compressed bytes that are expanded at once: to about 1 MiB at most.
const STEP: usize = 1024;

/// A file that was written.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Written {
    name: String,
    r#type: &'static str,
    path: String,
}

/// Writes files.
pub async fn write(State(open): State<Arc<OpenSandboxes>>, request: Request) -> Response {
    match upload(&open, request).await {
        Ok(written) => Json(written).into_response(),
        Err(failure) => failure.into_plain(),
    }
}

async fn upload(open: &OpenSandboxes, request: Request) -> Result<Vec<Written>, Failure> {
    let (parts, body) = request.into_parts();
    let (call, query) = (Call::of(open, &parts, None)?, Query::of(&parts)?);
    let target = Target {
        files: call.files().await?,
        user: query.user.or(call.user),
    };
    let is_gzip = is_gzip(&parts.headers)?;
    if parts
        .headers
        .keys()
        .any(|name| name.as_str().starts_with(METADATA))
    {
        return Err(Failure::new(
            Code::Unimplemented,
            "files have no metadata here; leave out X-Metadata-*",
        ));
    }
    let is_body = media_type(&parts.headers) == "application/octet-stream";
    let request = Request::from_parts(parts, body);
    match is_body {
        true => Ok(vec![target.body(&query.path, request, is_gzip).await?]),
        false if is_gzip => Err(Failure::invalid("a form is sent without Content-Encoding")),
        false => target.form(&query.path, Form::of(request).await?).await,
    }
}

fn media_type(headers: &HeaderMap) -> String {
    let named = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let named = named.unwrap_or_default().split(';').next().unwrap_or_default();
    named.trim().to_ascii_lowercase()
}

fn is_gzip(headers: &HeaderMap) -> Result<bool, Failure> {
    match headers
        .get(header::CONTENT_ENCODING)
        .map(|value| value.as_bytes())
    {
        None | Some(b"identity") => Ok(false),
        Some(b"gzip") => Ok(true),
        Some(_) => Err(Failure::invalid("Content-Encoding is gzip or identity")),
    }
}

/// Where files are written.
struct Target {
    files: Arc<dyn Files>,
    user: Option<String>,
}

impl Target {
    /// Begins to write a file, and makes the directories above it.
    async fn begin(&self, path: &str) -> Result<(OpenUpload, Written), Failure> {
        if path.is_empty() {
            return Err(Failure::invalid(
                "the file has no path: name one in the query, or as the part's file name",
            ));
        }
        let path = paths::absolute(&self.files, self.user.as_deref(), path).await?;
        check::file(&path)?;
        let parent = paths::parent(&path);
        if parent != "/" {
            self.files.make_directory(parent, DIRECTORY_MODE, true).await?;
        }
        let kind = UploadKind::File { mode: FILE_MODE };
        let upload = OpenUpload::begin(self.files.clone(), path.clone(), kind)?;
        let name = paths::name(&path).to_owned();
        let written = Written {
            name,
            r#type: "file",
            path,
        };
        Ok((upload, written))
    }

    /// Writes the body of a request.
    async fn body(&self, path: &str, request: Request, is_gzip: bool) -> Result<Written, Failure> {
        let (mut upload, written) = self.begin(path).await?;
        if content_length(&request).is_some_and(|length| length > upload.most()) {
            return Err(too_large().into());
        }
        let mut expanding = is_gzip.then(|| GzDecoder::new(Vec::new()));
        let mut body = request.into_body().into_data_stream();
        while let Some(data) = next_data(&mut body).await? {
            match &mut expanding {
                None => upload.push(&data).await?,
                Some(decoder) => {
                    for step in data.chunks(STEP) {
                        decoder.write_all(step).map_err(not_gzip)?;
                        let expanded = std::mem::take(decoder.get_mut());
                        upload.push(&expanded).await?;
                    }
                }
            }
        }
        if let Some(decoder) = expanding {
            upload.push(&decoder.finish().map_err(not_gzip)?).await?;
        }
        upload.finish().await?;
        Ok(written)
    }

    /// Writes the files of a form. What was written before an error stays.
    async fn form(&self, path: &str, mut form: Form) -> Result<Vec<Written>, Failure> {
        let mut written = Vec::new();
        let most = if path.is_empty() { MOST_FILES } else { 1 };
        while let Some(mut part) = form.next().await? {
            if part.name() != FIELD {
                while part.next().await?.is_some() {}
                continue;
            }
            if written.len() >= most {
                return Err(Failure::invalid(format!(
                    "a form has at most {MOST_FILES} files, and only one if the query has a path"
                )));
            }
            let named = if path.is_empty() { part.file_name() } else { path };
            let (mut upload, file) = self.begin(named).await?;
            while let Some(data) = part.next().await? {
                upload.push(&data).await?;
            }
            upload.finish().await?;
            written.push(file);
        }
        match written.is_empty() {
            true => Err(Failure::invalid(format!("the form has no part {FIELD:?}"))),
            false => Ok(written),
        }
    }
}

fn not_gzip(error: std::io::Error) -> Failure {
    Failure::invalid(format!("the body is not gzip: {error}"))
}
