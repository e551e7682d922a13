//! A file as the body of an answer.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

use super::super::call::{Call, user_name};
use super::super::failure::Failure;
use super::super::open_sandbox::OpenSandboxes;
use super::super::paths;
use crate::api::check;
use crate::api::file_stream::OpenDownload;

/// What the query of a transfer says.
#[derive(Debug, Default)]
pub struct Query {
    pub path: String,
    /// The user in whose home a relative path begins.
    pub user: Option<String>,
}

impl Query {
    /// Reads it. Other parameters are those of signed URLs, which were checked before.
    ///
    /// # Errors
    /// The user's name is invalid.
    pub fn of(parts: &Parts) -> Result<Query, Failure> {
        let mut query = Query::default();
        for (name, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            match &*name {
                "path" => query.path = value.into_owned(),
                "username" => query.user = user_name(&value)?,
                _ => {}
            }
        }
        Ok(query)
    }
}

/// Sends a file.
pub async fn read(State(open): State<Arc<OpenSandboxes>>, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    match download(&open, &parts).await {
        Ok(response) => response,
        Err(failure) => failure.into_plain(),
    }
}

async fn download(open: &OpenSandboxes, parts: &Parts) -> Result<Response, Failure> {
    let (call, query) = (Call::of(open, parts, None)?, Query::of(parts)?);
    let files = call.files().await?;
    let user = query.user.as_deref().or(call.user.as_deref());
    let path = paths::absolute(&files, user, &query.path).await?;
    check::file(&path)?;
    let disposition = format!("attachment; filename*=UTF-8''{}", encoded(paths::name(&path)));
    let download = OpenDownload::open(files, path).await?;
    let size = download.size();
    let mut response = Body::from_stream(download.into_stream()).into_response();
    let headers = response.headers_mut();
    let bytes = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, bytes);
    if let Ok(disposition) = HeaderValue::from_str(&disposition) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    if let Some(size) = size {
        headers.insert(header::CONTENT_LENGTH, size.into());
    }
    Ok(response)
}

/// A text as RFC 8187 has it in a header's parameter.
fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
            byte => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}
