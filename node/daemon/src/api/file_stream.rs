//! A file of a container as a stream of pieces, in both directions.
//!
//! Invariants: at most one piece of a file is held, whatever its size; a download of known length has that length, or breaks off; an upload
//! that is dropped before it is complete leaves nothing under its path.

use std::sync::Arc;

use axum::body::Bytes;
use futures_util::Stream;
use thaw_protocol::api::MAX_FILE;
use thaw_sandbox::error::Error;
use thaw_sandbox::id::new_id;

use super::files::{Files, PIECE, Piece, Upload, UploadKind, forget};
use super::problem::{ApiCode, Refusal};

/// A file that is being read.
#[derive(Debug)]
pub struct OpenDownload {
    files: Arc<dyn Files>,
    path: String,
    identity: u64,
    mode: u32,
    /// `None`: read until the end of the file.
    size: Option<u64>,
    at: u64,
    next: Option<Piece>,
}

impl OpenDownload {
    /// Reads the first piece of a file.
    ///
    /// # Errors
    /// The file cannot be read, or has more than [`MAX_FILE`] bytes.
    pub async fn open(files: Arc<dyn Files>, path: String) -> Result<OpenDownload, Refusal> {
        let first = files.read(&path, 0, 0).await?;
        if first.size > MAX_FILE {
            let what = format!("{path} has {} bytes, more than {MAX_FILE}", first.size);
            return Err(Refusal::new(ApiCode::NotAFile, what));
        }
        Ok(OpenDownload {
            files,
            path,
            identity: first.identity,
            mode: first.mode,
            size: (first.size > 0).then_some(first.size),
            at: 0,
            next: Some(first),
        })
    }

    /// Its permission bits.
    pub fn mode(&self) -> u32 {
        self.mode
    }

    /// Its size in bytes. `None` for a file without one, such as those of /proc.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// Its bytes.
    pub fn into_stream(self) -> impl Stream<Item = std::io::Result<Bytes>> + Send {
        futures_util::stream::unfold(self, async |mut reading| {
            reading.next().await.map(|piece| (piece, reading))
        })
    }

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

/// What is being written. Dropping it before it is complete discards it.
#[derive(Debug)]
pub struct OpenUpload {
    files: Arc<dyn Files>,
    upload: Upload,
    /// Bytes that the guest has.
    at: u64,
    held: Vec<u8>,
    is_over: bool,
}

impl OpenUpload {
    /// Begins an upload. Nothing is sent yet.
    ///
    /// # Errors
    /// The host has no random bytes.
    pub fn begin(files: Arc<dyn Files>, path: String, kind: UploadKind) -> Result<OpenUpload, Refusal> {
        let name = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
        Ok(OpenUpload {
            files,
            upload: Upload { path, name, kind },
            at: 0,
            held: Vec::new(),
            is_over: false,
        })
    }

    /// The most bytes that it may have.
    pub fn most(&self) -> u64 {
        match self.upload.kind {
            UploadKind::File { .. } => MAX_FILE,
            UploadKind::Archive { .. } => u64::MAX,
        }
    }

    /// Adds bytes, and sends whole pieces to the guest.
    ///
    /// # Errors
    /// There are too many bytes, or the guest refuses them.
    pub async fn push(&mut self, mut data: &[u8]) -> Result<(), Refusal> {
        if self.at + (self.held.len() + data.len()) as u64 > self.most() {
            return Err(too_large());
        }
        while self.held.len() + data.len() > PIECE {
            let (now, later) = data.split_at(PIECE - self.held.len());
            self.held.extend_from_slice(now);
            self.send(false).await?;
            data = later;
        }
        self.held.extend_from_slice(data);
        Ok(())
    }

    /// Sends the last piece: the file appears under its path.
    ///
    /// # Errors
    /// The guest refuses it.
    pub async fn finish(mut self) -> Result<(), Refusal> {
        self.send(true).await
    }

    async fn send(&mut self, last: bool) -> Result<(), Refusal> {
        let data = std::mem::take(&mut self.held);
        let length = data.len() as u64;
        self.files.write(&self.upload, self.at, data, last).await?;
        self.at += length;
        self.is_over = last;
        Ok(())
    }
}

impl Drop for OpenUpload {
    fn drop(&mut self) {
        if !self.is_over {
            let (files, upload) = (self.files.clone(), self.upload.clone());
            forget(async move { files.abandon(&upload).await });
        }
    }
}

/// The error for a file with too many bytes.
pub fn too_large() -> Refusal {
    Refusal::new(
        ApiCode::BodyTooLarge,
        format!("a file has at most {MAX_FILE} bytes"),
    )
}

#[cfg(test)]
#[path = "file_stream_test.rs"]
mod tests;
