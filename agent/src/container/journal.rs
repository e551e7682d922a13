//! The last output of a process that outlives who started it.
//!
//! Invariants: at most [`CAPACITY`] bytes are kept, stdout and stderr together in order of arrival; a reader costs nothing but its
//! position, and never holds the process up; a gap shows in the offsets.

use std::collections::VecDeque;
use std::sync::Mutex;

use thaw_sys::lock::Lock;
use tokio::sync::Notify;

use crate::error::{Error, Result};
use crate::reaper::ExitCode;
use crate::stdio::Output;

/// Most bytes of output of one process.
const CAPACITY: usize = 256 << 10;
/// Most bytes of one piece.
pub const PIECE: usize = 64 << 10;

/// The output of one process.
#[derive(Debug, Default)]
pub struct Journal {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<(Output, Vec<u8>)>,
    /// The offset of the first kept byte.
    begin: u64,
    length: usize,
    exit: Option<ExitCode>,
}

/// What a reader gets.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    Wrote {
        offset: u64,
        output: Output,
        data: Vec<u8>,
    },
    /// All was read, and the process has ended.
    Ended(ExitCode),
}

impl Journal {
    /// Adds output, and drops the oldest if there is too much.
    pub fn push(&self, output: Output, mut data: Vec<u8>) {
        let mut state = self.state.locked();
        state.length += data.len();
        match state.pieces.back_mut() {
            Some((last, bytes)) if *last == output && bytes.len() + data.len() <= PIECE => {
                bytes.append(&mut data)
            }
            _ => state.pieces.push_back((output, data)),
        }
        while state.length > CAPACITY {
            let excess = state.length - CAPACITY;
            let Some((_, bytes)) = state.pieces.front_mut() else {
                break;
            };
            let dropped = excess.min(bytes.len());
            bytes.drain(..dropped);
            if bytes.is_empty() {
                state.pieces.pop_front();
            }
            state.length -= dropped;
            state.begin += dropped as u64;
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// The process has ended, and there is no more output.
    pub fn finish(&self, code: ExitCode) {
        self.state.locked().exit = Some(code);
        self.changed.notify_waiters();
    }

    /// The output from an offset on, or from the first that is kept. Waits for it.
    ///
    /// # Errors
    /// There was not so much output yet.
    pub async fn read(&self, offset: u64) -> Result<Next> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(next) = self.state.locked().next(offset)? {
                return Ok(next);
            }
            changed.await;
        }
    }
}

impl State {
    fn next(&self, offset: u64) -> Result<Option<Next>> {
        let end = self.begin + self.length as u64;
        if offset > end {
            return Err(Error::State(format!("its output has {end} bytes, not {offset}")));
        }
        let mut at = self.begin;
        let offset = offset.max(at);
        for (output, bytes) in &self.pieces {
            let skipped = usize::try_from(offset - at).unwrap_or(usize::MAX);
            if skipped < bytes.len() {
                let rest = &bytes[skipped..];
                return Ok(Some(Next::Wrote {
                    offset,
                    output: *output,
                    data: rest[..rest.len().min(PIECE)].to_vec(),
                }));
            }
            at += bytes.len() as u64;
        }
        Ok(self.exit.map(Next::Ended))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_is_read_from_any_offset_and_the_end_is_told() {
        let journal = Journal::default();
        journal.push(Output::Stdout, b"abc".to_vec());
        journal.push(Output::Stdout, b"def".to_vec());
        journal.push(Output::Stderr, b"err".to_vec());
        let wrote = |offset, output, data: &[u8]| Next::Wrote {
            offset,
            output,
            data: data.to_vec(),
        };
        assert_eq!(
            journal.read(0).await.unwrap(),
            wrote(0, Output::Stdout, b"abcdef")
        );
        assert_eq!(journal.read(4).await.unwrap(), wrote(4, Output::Stdout, b"ef"));
        assert_eq!(journal.read(6).await.unwrap(), wrote(6, Output::Stderr, b"err"));
        assert!(journal.read(10).await.is_err());
        let (next, ()) = tokio::join!(journal.read(9), async { journal.finish(7) });
        assert_eq!(next.unwrap(), Next::Ended(7));
        let (next, ()) = tokio::join!(journal.read(8), async {});
        assert_eq!(next.unwrap(), wrote(8, Output::Stderr, b"r"));
    }

    #[tokio::test]
    async fn only_the_last_output_is_kept() {
        let journal = Journal::default();
        for n in 0..20_u8 {
            let output = if n % 2 == 0 {
                Output::Stdout
            } else {
                Output::Stderr
            };
            journal.push(output, vec![n; 20_000]);
        }
        let (mut at, mut total) = (0, 0);
        journal.finish(0);
        let first = 400_000 - CAPACITY as u64;
        while let Next::Wrote { offset, data, .. } = journal.read(at).await.unwrap() {
            assert!(data.len() <= PIECE && (total > 0 || offset == first));
            assert_eq!(u64::from(data[0]), offset / 20_000);
            (at, total) = (offset + data.len() as u64, total + data.len());
        }
        assert_eq!((at, total), (400_000, CAPACITY));
    }
}
