//! A connection with a timeout for writes.
//!
//! Invariant: a write that makes no progress for the timeout fails, so that a peer that stops reading does not hold a connection and its
//! buffers longer than that.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// How long a peer may read nothing while data waits for it.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection whose writes fail after waiting for `limit`.
pub struct WriteTimeout<S> {
    stream: S,
    /// Runs while a write waits.
    waits: Option<Pin<Box<Sleep>>>,
    limit: Duration,
}

impl<S> WriteTimeout<S> {
    /// Wraps a connection.
    pub fn new(stream: S, limit: Duration) -> WriteTimeout<S> {
        WriteTimeout {
            stream,
            waits: None,
            limit,
        }
    }

    fn bound<T>(&mut self, context: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.waits = None;
            return poll;
        }
        let limit = self.limit;
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(limit)));
        match waits.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bound(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.bound(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.bound(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.bound(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn write_fails_after_its_peer_stops_reading() {
        let (ours, mut theirs) = tokio::io::duplex(8);
        let mut ours = WriteTimeout::new(ours, Duration::from_millis(1));
        ours.write_all(b"12345678").await.unwrap();
        let stalled = ours.write_all(b"9").await.unwrap_err();
        assert_eq!(stalled.kind(), io::ErrorKind::TimedOut);
        theirs.read_exact(&mut [0; 8]).await.unwrap();
        ours.write_all(b"9").await.unwrap();
    }
}
