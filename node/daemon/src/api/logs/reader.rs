//! Reads a journal for one caller.
//!
//! Invariant: a caller costs a position in the journal and one frame, however slow it is; it misses output that is overwritten meanwhile.

use std::io;
use std::sync::Arc;

use thaw_sandbox::agent_client::Output;
use thaw_sandbox::journal::{Extent, Frame, Frames, Journal};
use tokio::sync::watch;

use super::log_time::stamped;

/// What of the output is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Only this stream.
    pub only: Option<Output>,
    /// Also output that arrives later, until the process ends.
    pub follow: bool,
    /// Of the existing output, only this number of last lines.
    pub tail: Option<u64>,
    /// Only output that arrived at or after this time, in nanoseconds since the Unix epoch.
    pub since: u64,
    /// Put the time of arrival before each line.
    pub timestamps: bool,
}

impl Selection {
    fn includes(&self, frame: &Frame) -> bool {
        self.only.is_none_or(|only| only == frame.output) && frame.at >= self.since
    }
}

/// The position of one caller.
#[derive(Debug)]
pub struct LogReader {
    journal: Arc<Journal>,
    extent: watch::Receiver<Extent>,
    closing: watch::Receiver<bool>,
    selection: Selection,
    at: u64,
    /// Where to end: without following, the end of the journal at the request.
    end: u64,
    /// Lines to skip first.
    skip: u64,
    /// Whether the next byte of stdout, and of stderr, begins a line.
    begins: [bool; 2],
}

impl LogReader {
    /// A reader at the first selected frame. It ends early when `closing` becomes true.
    pub async fn open(
        journal: Arc<Journal>,
        selection: Selection,
        closing: watch::Receiver<bool>,
    ) -> io::Result<LogReader> {
        let extent = journal.extent();
        let end = extent.borrow().end;
        let mut reader = LogReader {
            journal,
            extent,
            closing,
            selection,
            at: 0,
            end,
            skip: 0,
            begins: [true; 2],
        };
        match selection.tail {
            // A frame that is written meanwhile must not be counted as existing output.
            Some(0) => reader.at = end,
            Some(lines) => reader.skip_to_last(lines).await?,
            None => {}
        }
        Ok(reader)
    }

    async fn frames(&self) -> io::Result<Frames> {
        let (journal, at) = (self.journal.clone(), self.at);
        tokio::task::spawn_blocking(move || journal.read(at)).await?
    }

    /// Skips everything before the last `lines` lines.
    async fn skip_to_last(&mut self, lines: u64) -> io::Result<()> {
        let (mut all, mut open, mut first) = (0, false, None);
        while self.at < self.end {
            let read = self.frames().await?;
            if read.frames.is_empty() {
                break;
            }
            self.at = read.next;
            first.get_or_insert(read.start);
            for frame in read.frames.iter().filter(|frame| self.selection.includes(frame)) {
                all += newlines(&frame.data);
                open = frame.data.last() != Some(&b'\n');
            }
        }
        // Text after the last newline counts as a line.
        (self.at, self.skip) = (first.unwrap_or(0), (all + u64::from(open)).saturating_sub(lines));
        Ok(())
    }

    /// The next selected output, in order of arrival; `None` at the end.
    pub async fn next(&mut self) -> Option<io::Result<Vec<(Output, Vec<u8>)>>> {
        loop {
            let extent = *self.extent.borrow_and_update();
            let follow = self.selection.follow;
            let end = if follow { extent.end } else { self.end };
            if self.at >= end {
                if !follow || extent.over || *self.closing.borrow() {
                    return None;
                }
                tokio::select! {
                    _ = self.extent.changed() => {}
                    _ = self.closing.changed() => {}
                }
                continue;
            }
            let read = match self.frames().await {
                Ok(read) if read.frames.is_empty() => return None,
                Ok(read) => read,
                Err(e) => return Some(Err(e)),
            };
            if read.start > self.at && self.at > 0 {
                // The lines to skip were overwritten.
                self.skip = 0;
            }
            self.at = read.next;
            let pieces: Vec<_> = read.frames.iter().filter_map(|frame| self.piece(frame)).collect();
            if !pieces.is_empty() {
                return Some(Ok(pieces));
            }
        }
    }

    /// What the caller gets of a frame.
    fn piece(&mut self, frame: &Frame) -> Option<(Output, Vec<u8>)> {
        if !self.selection.includes(frame) {
            return None;
        }
        let data = leave_out(&frame.data, &mut self.skip);
        let data = match self.selection.timestamps {
            true => stamped(frame.at, data, &mut self.begins[frame.output as usize]),
            false => data.to_vec(),
        };
        (!data.is_empty()).then_some((frame.output, data))
    }
}

fn newlines(data: &[u8]) -> u64 {
    data.iter().filter(|b| **b == b'\n').count() as u64
}

/// The rest of a text after `lines` lines. Subtracts the skipped lines from `lines`.
fn leave_out<'a>(mut data: &'a [u8], lines: &mut u64) -> &'a [u8] {
    while *lines > 0 {
        let Some(at) = data.iter().position(|b| *b == b'\n') else {
            return &[];
        };
        data = &data[at + 1..];
        *lines -= 1;
    }
    data
}
