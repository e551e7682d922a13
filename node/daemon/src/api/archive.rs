//! The answer with a file or directory of a container as a tar stream.
//!
//! Invariants: thawd reads nothing of the stream, which the guest makes; it holds one piece. An answer that does not end with the
//! archive's end is broken off.

use std::sync::Arc;

use axum::body::{Body as Stream, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use thaw_sandbox::error::Error;
use thaw_sandbox::id::new_id;

use super::files::{Download, Files, forget};
use super::problem::Refusal;

/// The media type of a tar stream.
const TAR: &str = "application/x-tar";

/// Begins to read, and returns the answer.
pub async fn read(files: Arc<dyn Files>, path: String, follow: bool) -> Result<Response, Refusal> {
    let name = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
    let download = Download { path, follow, name };
    files.pack(&download).await?;
    let reading = Reading {
        files,
        download,
        over: false,
    };
    let pieces = futures_util::stream::unfold(reading, async |mut reading| {
        reading.next().await.map(|piece| (piece, reading))
    });
    let mut response = Stream::from_stream(pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(TAR));
    Ok(response)
}

/// The body of a download. Dropping it before the end ends the download.
struct Reading {
    files: Arc<dyn Files>,
    download: Download,
    over: bool,
}

impl Reading {
    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Option<std::io::Result<Bytes>> {
        if self.over {
            return None;
        }
        match self.files.next_piece(&self.download).await {
            Ok(data) if data.is_empty() => {
                self.over = true;
                None
            }
            Ok(data) => Some(Ok(data.into())),
            Err(refusal) => {
                self.over = true;
                Some(Err(std::io::Error::other(refusal.to_string())))
            }
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.over {
            let (files, download) = (self.files.clone(), self.download.clone());
            forget(async move { files.abandon_download(&download).await });
        }
    }
}
