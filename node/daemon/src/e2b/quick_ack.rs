//! A TCP connection that acknowledges at once what arrives.
//!
//! Many servers write the head and the body of an answer one after the other, and Nagle's algorithm holds the body back until the head is
//! acknowledged. Linux delays that by 40 ms on a connection on which requests and answers alternate. `TCP_QUICKACK` prevents it, but only
//! until the next write (tcp(7)), so it is set after each.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// See the module.
#[derive(Debug)]
pub struct QuickAck(pub TcpStream);

impl QuickAck {
    fn after(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(written, Poll::Ready(Ok(_))) {
            // If this fails, the connection is broken, as its reader will see.
            let _ = sockopt::set_tcp_quickack(&self.0, true);
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
        Pin::new(&mut self.0).poll_read(cx, to)
    }
}

impl AsyncWrite for QuickAck {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.0).poll_write(cx, bytes);
        self.after(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.0).poll_write_vectored(cx, bytes);
        self.after(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn alternating_writes_and_reads_do_not_delay_acks() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut ours, mut theirs) = (QuickAck(stream), listener.accept().await.unwrap().0);
        let mut byte = [0];
        for _ in 0..8 {
            ours.write_all(b"?").await.unwrap();
            assert!(sockopt::tcp_quickack(&ours.0).unwrap());
            theirs.read_exact(&mut byte).await.unwrap();
            theirs.write_all(b"!").await.unwrap();
            ours.read_exact(&mut byte).await.unwrap();
        }
    }
}
