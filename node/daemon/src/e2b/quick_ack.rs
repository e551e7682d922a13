//! A TCP connection that acknowledges at once what arrives, as long as its peer needs that.
//!
//! Many servers write the head and the body of an answer one after the other, and Nagle's algorithm holds the body back until the head is
//! acknowledged. Linux delays that by 40 ms on a connection on which requests and answers alternate. `TCP_QUICKACK` prevents it, but only
//! until the next write (tcp(7)), so it is set after each.
//!
//! An acknowledgement at once is a packet more for a guest that writes an answer in one piece. So it is asked for until the first answer
//! has arrived, and from then on only if an answer arrived in several pieces.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// See the module.
#[derive(Debug)]
pub struct QuickAck {
    stream: TcpStream,
    /// Pieces of the answer that have been read since the last write.
    pieces: usize,
    /// An answer has arrived.
    is_answered: bool,
    /// An answer arrived in several pieces.
    in_pieces: bool,
}

impl QuickAck {
    /// Of a new connection.
    pub fn new(stream: TcpStream) -> QuickAck {
        QuickAck {
            stream,
            pieces: 0,
            is_answered: false,
            in_pieces: false,
        }
    }

    fn after(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(written, Poll::Ready(Ok(_))) {
            self.pieces = 0;
            if self.in_pieces || !self.is_answered {
                // If this fails, the connection is broken, as its reader will see.
                let _ = sockopt::set_tcp_quickack(&self.stream, true);
            }
        }
        written
    }
}

impl AsyncRead for QuickAck {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = to.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, to);
        if to.filled().len() > before {
            self.pieces += 1;
            self.is_answered = true;
            self.in_pieces |= self.pieces > 1;
        }
        read
    }
}

impl AsyncWrite for QuickAck {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.after(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.after(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (QuickAck, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (QuickAck::new(stream), listener.accept().await.unwrap().0)
    }

    /// Sends a request, and returns whether an acknowledgement at once was asked for.
    async fn ask(ours: &mut QuickAck, theirs: &mut TcpStream) -> bool {
        // Off, as the next write would make it on a connection of alternating writes.
        sockopt::set_tcp_quickack(&ours.stream, false).unwrap();
        ours.write_all(b"?").await.unwrap();
        let is_quick = sockopt::tcp_quickack(&ours.stream).unwrap();
        theirs.read_exact(&mut [0]).await.unwrap();
        is_quick
    }

    async fn answer(ours: &mut QuickAck, theirs: &mut TcpStream, pieces: usize) {
        for _ in 0..pieces {
            theirs.write_all(b"!").await.unwrap();
            ours.read_exact(&mut [0]).await.unwrap();
        }
    }

    #[tokio::test]
    async fn answers_in_pieces_are_acknowledged_at_once() {
        let (mut ours, mut theirs) = pair().await;
        for pieces in [2, 2, 1, 1, 2] {
            assert!(ask(&mut ours, &mut theirs).await);
            answer(&mut ours, &mut theirs, pieces).await;
        }
    }

    #[tokio::test]
    async fn answers_in_one_piece_cost_no_acknowledgement() {
        let (mut ours, mut theirs) = pair().await;
        assert!(ask(&mut ours, &mut theirs).await);
        for _ in 0..8 {
            answer(&mut ours, &mut theirs, 1).await;
            assert!(!ask(&mut ours, &mut theirs).await);
        }
        answer(&mut ours, &mut theirs, 2).await;
        assert!(ask(&mut ours, &mut theirs).await);
    }
}
