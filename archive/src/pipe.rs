//! A bounded pipe between a thread that packs or unpacks, and an async task that talks to the other side.

use std::io::{self, Read, Write};

use tokio::sync::mpsc;

use crate::Error;

/// Size of a piece of the stream, bytes.
pub const PIECE: usize = 256 << 10;

/// A part of a stream. A channel that closes without an end means that the sender broke off.
#[derive(Debug)]
pub enum Part {
    Data(Vec<u8>),
    End,
    Failed(Error),
}

/// Sends what is written, in pieces.
#[derive(Debug)]
pub struct Sink {
    parts: mpsc::Sender<Part>,
    held: Vec<u8>,
}

impl Sink {
    /// Writes to a channel. Blocks while it is full, so not for async tasks.
    pub fn new(parts: mpsc::Sender<Part>) -> Sink {
        let held = Vec::with_capacity(PIECE);
        Sink { parts, held }
    }

    /// Sends the rest, and then the end or the failure.
    pub fn finish(mut self, result: Result<(), Error>) {
        let last = match result {
            Ok(()) => match self.flush() {
                Ok(()) => Part::End,
                Err(_) => return,
            },
            Err(e) => Part::Failed(e),
        };
        // A reader that has gone needs no end.
        let _ = self.parts.blocking_send(last);
    }
}

impl Write for Sink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let taken = data.len().min(PIECE - self.held.len());
        self.held.extend_from_slice(&data[..taken]);
        if self.held.len() == PIECE {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.held, Vec::with_capacity(PIECE));
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the reader has gone");
        self.parts.blocking_send(Part::Data(piece)).map_err(gone)
    }
}

/// Reads what a channel brings.
#[derive(Debug)]
pub struct Feed {
    parts: mpsc::Receiver<Part>,
    data: Vec<u8>,
    at: usize,
    over: bool,
}

impl Feed {
    /// Reads from a channel. Blocks while it is empty, so not for async tasks.
    pub fn new(parts: mpsc::Receiver<Part>) -> Feed {
        Feed {
            parts,
            data: Vec::new(),
            at: 0,
            over: false,
        }
    }
}

impl Read for Feed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.data.len() && !self.over {
            match self.parts.blocking_recv() {
                Some(Part::Data(data)) => (self.data, self.at) = (data, 0),
                Some(Part::End) => self.over = true,
                Some(Part::Failed(e)) => return Err(io::Error::other(e.to_string())),
                None => return Err(io::Error::other("the sender broke off")),
            }
        }
        let taken = buffer.len().min(self.data.len() - self.at);
        buffer[..taken].copy_from_slice(&self.data[self.at..self.at + taken]);
        self.at += taken;
        Ok(taken)
    }
}
