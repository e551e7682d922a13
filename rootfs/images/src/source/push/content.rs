//! The content of an upload: read from its start as often as needed, on a thread that may block.
//!
//! Invariant: a stream of the whole content ends without error only if its bytes have the digest. If it fails, the
//! cause is kept for the error message.

use std::io::{self, Read, Seek, SeekFrom};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::stream;
use reqwest::Body;
use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;
use thaw_sys::lock::Lock;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::error::Error;

use super::Upload;

const PIECE: usize = 64 << 10;
/// Pieces read ahead of the network.
const AHEAD: usize = 8;

#[derive(Clone)]
pub struct Content {
    pub digest: Digest,
    pub size: u64,
    reader: Arc<Mutex<Box<dyn Upload>>>,
    /// Why the last stream broke off, if it did so by itself.
    error: Arc<Mutex<Option<Error>>>,
    /// When a piece was last wanted.
    moved: Arc<Mutex<Instant>>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.locked()
}

impl Content {
    pub fn new(digest: Digest, size: u64, reader: impl Upload) -> Self {
        Self {
            digest,
            size,
            reader: Arc::new(Mutex::new(Box::new(reader))),
            error: Arc::default(),
            moved: Arc::new(Mutex::new(Instant::now())),
        }
    }

    pub fn what(&self) -> String {
        format!("blob {}", self.digest)
    }

    /// When the network last wanted a piece.
    pub fn moved(&self) -> Instant {
        *lock(&self.moved)
    }

    /// Why the content could not be read, if that is why a request failed.
    pub fn take_error(&self) -> Option<Error> {
        lock(&self.error).take()
    }

    /// Reads the whole, in pieces; may block.
    pub fn read(&self, mut piece: impl FnMut(&[u8]) -> io::Result<()>) -> Result<(), Error> {
        let mut hash = Sha256::new();
        self.range(0, self.size, |bytes| {
            hash.update(bytes);
            piece(bytes)
        })?;
        self.compare(hash)
    }

    fn compare(&self, hash: Sha256) -> Result<(), Error> {
        let got = Digest::from(<[u8; 32]>::from(hash.finalize()));
        if got == self.digest {
            return Ok(());
        }
        Err(Error::DigestMismatch {
            what: "a blob to be written".into(),
            expected: self.digest,
            got,
        })
    }

    fn range(
        &self,
        from: u64,
        length: u64,
        mut piece: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), Error> {
        let failed = |source: io::Error| Error::io(self.what().as_ref(), source);
        let mut reader = lock(&self.reader);
        reader.seek(SeekFrom::Start(from)).map_err(failed)?;
        let mut buffer = vec![0; PIECE];
        let mut left = length;
        while left > 0 {
            let wanted = left.min(PIECE as u64) as usize;
            let read = match reader.read(&mut buffer[..wanted]) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(error)),
            };
            if read == 0 {
                return Err(Error::TruncatedLayer {
                    what: self.what(),
                    expected: self.size,
                    got: from + length - left,
                });
            }
            piece(&buffer[..read]).map_err(failed)?;
            left -= read as u64;
        }
        Ok(())
    }

    /// A request's body of bytes `from` and `length` more. The whole is verified before its last piece leaves.
    pub fn stream(&self, from: u64, length: u64) -> Body {
        let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(AHEAD);
        let content = self.clone();
        *lock(&self.moved) = Instant::now();
        tokio::task::spawn_blocking(move || content.pump(from, length, &sender));
        let moved = self.moved.clone();
        Body::wrap_stream(stream::unfold(receiver, move |mut receiver| {
            let moved = moved.clone();
            async move {
                *lock(&moved) = Instant::now();
                let piece = receiver.recv().await?;
                Some((piece, receiver))
            }
        }))
    }

    fn pump(&self, from: u64, length: u64, sender: &mpsc::Sender<io::Result<Bytes>>) {
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        let mut hash = (from == 0 && length == self.size).then(Sha256::new);
        // One piece behind, so that the last one waits for the verdict.
        let mut held: Option<Bytes> = None;
        let sent = self.range(from, length, |bytes| {
            if let Some(hash) = &mut hash {
                hash.update(bytes);
            }
            match held.replace(Bytes::copy_from_slice(bytes)) {
                Some(piece) => sender.blocking_send(Ok(piece)).map_err(|_| gone()),
                None => Ok(()),
            }
        });
        if sender.is_closed() {
            return;
        }
        let verdict = sent.and_then(|()| hash.map_or(Ok(()), |hash| self.compare(hash)));
        let last = match verdict {
            Ok(()) => held.map(Ok),
            Err(error) => {
                let said = io::Error::other(error.to_string());
                *lock(&self.error) = Some(error);
                Some(Err(said))
            }
        };
        // The receiver is gone, so the error is useless.
        last.map(|last| sender.blocking_send(last).ok());
    }
}
