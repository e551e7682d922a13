//! A connection to a guest's agent that accepts only responses, and only of a bounded size.
//!
//! Invariant: whatever the guest sends, the reader gets whole ttrpc response frames (type 2) of at most
//! [`MAX_RESPONSE`] bytes, or the error that ends the connection. The ttrpc crate alone accepts 4 MiB, and keeps
//! streams that its client did not open.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Largest response in bytes. Pieces of files and of output are at most 256 KiB.
pub const MAX_RESPONSE: u32 = 320 << 10;
/// Size of a ttrpc header: length and stream id (4 bytes each, big-endian), type and flags (1 byte each),
/// as ttrpc's protocol specifies.
const HEADER: usize = 10;
/// Offset of the type in the header.
const TYPE_OFFSET: usize = 8;
const RESPONSE: u8 = 2;

/// A connection that passes only valid responses.
#[derive(Debug)]
pub struct Answers<S> {
    stream: S,
    position: Position,
}

/// The position within the current frame.
#[derive(Debug)]
enum Position {
    Header { bytes: [u8; HEADER], have: usize },
    Body { left: usize },
}

impl Position {
    const BEGIN: Position = Position::Header {
        bytes: [0; HEADER],
        have: 0,
    };

    /// Advances by received bytes.
    ///
    /// # Errors
    /// A header is not that of a response, or the response is too large.
    fn advance(&mut self, mut received: &[u8]) -> io::Result<()> {
        while !received.is_empty() {
            let taken = match self {
                Position::Header { bytes, have } => {
                    let taken = received.len().min(HEADER - *have);
                    bytes[*have..*have + taken].copy_from_slice(&received[..taken]);
                    *have += taken;
                    if *have == HEADER {
                        *self = body(*bytes)?;
                    }
                    taken
                }
                Position::Body { left } => {
                    let taken = received.len().min(*left);
                    *left -= taken;
                    taken
                }
            };
            received = &received[taken..];
            if let Position::Body { left: 0 } = self {
                *self = Position::BEGIN;
            }
        }
        Ok(())
    }
}

/// Checks a header and starts its body.
fn body(header: [u8; HEADER]) -> io::Result<Position> {
    let refuse = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    let length = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
    if header[TYPE_OFFSET] != RESPONSE {
        return refuse(format!(
            "the guest's agent sent a frame of type {}, not a response",
            header[TYPE_OFFSET]
        ));
    }
    if length > MAX_RESPONSE {
        return refuse(format!(
            "the guest's agent sent a response of {length} bytes; the limit is {MAX_RESPONSE}"
        ));
    }
    Ok(Position::Body {
        left: length as usize,
    })
}

impl<S> Answers<S> {
    /// Wraps a connection from which nothing has been read.
    pub fn over(stream: S) -> Answers<S> {
        Answers {
            stream,
            position: Position::BEGIN,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Answers<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        Poll::Ready(self.position.advance(&buf.filled()[before..]))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Answers<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
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
    use super::*;
    use proptest::prelude::*;

    fn frame(kind: u8, length: u32, body: usize) -> Vec<u8> {
        let mut frame = length.to_be_bytes().to_vec();
        frame.extend([0, 0, 0, 1, kind, 0]);
        frame.resize(HEADER + body, 7);
        frame
    }

    fn pass(bytes: &[u8], cuts: &[usize]) -> io::Result<()> {
        let (mut position, mut rest) = (Position::BEGIN, bytes);
        for cut in cuts {
            let (now, later) = rest.split_at(cut % (rest.len() + 1));
            position.advance(now)?;
            rest = later;
        }
        position.advance(rest)
    }

    proptest! {
        #[test]
        fn answers_pass_however_they_are_cut(lengths in prop::collection::vec(0_u32..300, 0..8), cuts in prop::collection::vec(any::<usize>(), 0..16)) {
            let bytes: Vec<u8> = lengths.iter().flat_map(|&length| frame(RESPONSE, length, length as usize)).collect();
            prop_assert!(pass(&bytes, &cuts).is_ok());
        }

        #[test]
        fn a_frame_that_is_none_is_refused_after_any_others(before in prop::collection::vec(0_u32..300, 0..4), kind: u8, length: u32, cuts in prop::collection::vec(any::<usize>(), 0..16)) {
            let mut bytes: Vec<u8> = before.iter().flat_map(|&length| frame(RESPONSE, length, length as usize)).collect();
            bytes.extend(frame(kind, length, 0));
            prop_assert_eq!(pass(&bytes, &cuts).is_ok(), kind == RESPONSE && length <= MAX_RESPONSE);
        }

        #[test]
        fn no_bytes_panic(bytes: Vec<u8>, cuts in prop::collection::vec(any::<usize>(), 0..16)) {
            let _ = pass(&bytes, &cuts);
        }
    }
}
