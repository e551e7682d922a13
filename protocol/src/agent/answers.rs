//! A connection to a guest's agent, for whoever asks it: nothing comes of it but answers, and none larger than may be asked for.
//!
//! Invariant: whatever the guest sends, the reader sees whole frames that are answers (ttrpc's type 2) of at most [`MOST`] bytes, or
//! the error that ends the connection. ttrpc itself takes 4 MiB, and keeps streams that nobody opened.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of the largest answer: pieces of files and of output are at most 256 KiB.
pub const MOST: u32 = 320 << 10;
/// ttrpc's header: length and stream, 4 bytes each, big-endian; type and flags, one each (ttrpc, PROTOCOL.md).
const HEADER: usize = 10;
/// Where in it the type is.
const TYPE: usize = 8;
const ANSWER: u8 = 2;

/// The connection.
#[derive(Debug)]
pub struct Answers<S> {
    stream: S,
    at: At,
}

/// Where in a frame the stream is.
#[derive(Debug)]
enum At {
    Header { bytes: [u8; HEADER], have: usize },
    Body { left: usize },
}

impl At {
    const BEGIN: At = At::Header {
        bytes: [0; HEADER],
        have: 0,
    };

    /// Goes on by the bytes that came.
    fn pass(&mut self, mut came: &[u8]) -> io::Result<()> {
        while !came.is_empty() {
            let taken = match self {
                At::Header { bytes, have } => {
                    let taken = came.len().min(HEADER - *have);
                    bytes[*have..*have + taken].copy_from_slice(&came[..taken]);
                    *have += taken;
                    if *have == HEADER {
                        *self = body(*bytes)?;
                    }
                    taken
                }
                At::Body { left } => {
                    let taken = came.len().min(*left);
                    *left -= taken;
                    taken
                }
            };
            came = &came[taken..];
            if let At::Body { left: 0 } = self {
                *self = At::BEGIN;
            }
        }
        Ok(())
    }
}

/// What follows a header.
fn body(header: [u8; HEADER]) -> io::Result<At> {
    let refuse = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    let length = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
    if header[TYPE] != ANSWER {
        return refuse(format!(
            "the guest's agent sent a frame of type {}, which is no answer",
            header[TYPE]
        ));
    }
    if length > MOST {
        return refuse(format!(
            "the guest's agent sent an answer of {length} bytes, of at most {MOST}"
        ));
    }
    Ok(At::Body {
        left: length as usize,
    })
}

impl<S> Answers<S> {
    /// Over a connection of which nothing was read.
    pub fn over(stream: S) -> Answers<S> {
        Answers {
            stream,
            at: At::BEGIN,
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
        Poll::Ready(self.at.pass(&buf.filled()[before..]))
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
        let (mut at, mut rest) = (At::BEGIN, bytes);
        for cut in cuts {
            let (now, later) = rest.split_at(cut % (rest.len() + 1));
            at.pass(now)?;
            rest = later;
        }
        at.pass(rest)
    }

    proptest! {
        #[test]
        fn answers_pass_however_they_are_cut(lengths in prop::collection::vec(0_u32..300, 0..8), cuts in prop::collection::vec(any::<usize>(), 0..16)) {
            let bytes: Vec<u8> = lengths.iter().flat_map(|&length| frame(ANSWER, length, length as usize)).collect();
            prop_assert!(pass(&bytes, &cuts).is_ok());
        }

        #[test]
        fn a_frame_that_is_none_is_refused_after_any_others(before in prop::collection::vec(0_u32..300, 0..4), kind: u8, length: u32, cuts in prop::collection::vec(any::<usize>(), 0..16)) {
            let mut bytes: Vec<u8> = before.iter().flat_map(|&length| frame(ANSWER, length, length as usize)).collect();
            bytes.extend(frame(kind, length, 0));
            prop_assert_eq!(pass(&bytes, &cuts).is_ok(), kind == ANSWER && length <= MOST);
        }

        #[test]
        fn no_bytes_panic(bytes: Vec<u8>, cuts in prop::collection::vec(any::<usize>(), 0..16)) {
            let _ = pass(&bytes, &cuts);
        }
    }
}
