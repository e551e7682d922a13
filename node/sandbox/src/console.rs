//! The guest's console: its last lines, kept for error messages.
//!
//! The guest may write without end, so the number of bytes kept is bounded. Control characters are never shown.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::pipe::PipeFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::failure::{last_lines, printable};
use crate::readiness::register;

/// Bytes kept.
const KEPT: usize = 64 * 1024;

/// Reads a console's pipe until it is dropped.
#[derive(Debug)]
pub struct Console {
    kept: watch::Receiver<VecDeque<u8>>,
    reader: tokio::task::JoinHandle<()>,
}

impl Console {
    /// A console, and the descriptor to write to it. Must be called within a tokio runtime.
    pub fn new() -> io::Result<(Console, OwnedFd)> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let (keep, kept) = watch::channel(VecDeque::new());
        let reader = tokio::spawn(read_all(register(read, Interest::READABLE)?, keep));
        Ok((Console { kept, reader }, write))
    }

    /// The last `count` non-blank lines.
    pub fn tail(&self, count: usize) -> Vec<String> {
        let bytes: Vec<u8> = self.kept.borrow().iter().copied().collect();
        last_lines(&bytes, count)
    }

    /// Waits until all output of the ended guest is read, at most for this long.
    pub async fn drained(&self, limit: Duration) {
        let mut kept = self.kept.clone();
        // Only the reader holds the sender, and drops it at the end of the pipe.
        let ended = async { while kept.changed().await.is_ok() {} };
        let _ = tokio::time::timeout(limit, ended).await;
    }

    /// Waits until a complete line satisfies `wanted`. Returns false if the guest ends first.
    pub async fn has_line(&self, wanted: impl Fn(&[u8]) -> bool) -> bool {
        let mut kept = self.kept.clone();
        let there = |bytes: &VecDeque<u8>| {
            let bytes: Vec<u8> = bytes.iter().copied().collect();
            // Text after the last newline is not a complete line yet.
            let ended = bytes.iter().rposition(|b| *b == b'\n').unwrap_or(0);
            bytes[..ended].split(|b| *b == b'\n').any(&wanted)
        };
        kept.wait_for(there).await.is_ok()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn read_all(pipe: AsyncFd<OwnedFd>, keep: watch::Sender<VecDeque<u8>>) {
    let mut buffer = vec![0u8; 16 * 1024];
    let mut line = Vec::new();
    while let Ok(mut ready) = pipe.readable().await {
        match rustix::io::read(pipe.get_ref(), &mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                log(&mut line, &buffer[..n]);
                keep.send_modify(|kept| {
                    kept.extend(&buffer[..n]);
                    let excess = kept.len().saturating_sub(KEPT);
                    kept.drain(..excess);
                });
            }
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Logs complete lines as they arrive, if the log level is debug.
fn log(line: &mut Vec<u8>, bytes: &[u8]) {
    if !tracing::enabled!(target: "console", tracing::Level::DEBUG) {
        return;
    }
    for byte in bytes {
        if *byte == b'\n' || line.len() >= 1024 {
            tracing::debug!(target: "console", "{}", printable(&String::from_utf8_lossy(line)));
            line.clear();
        }
        if *byte != b'\n' {
            line.push(*byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_lines_are_kept_bounded_and_printable() {
        let (mut console, write) = Console::new().unwrap();
        let text = "x".repeat(99) + "\n";
        for _ in 0..2000 {
            while rustix::io::write(&write, text.as_bytes()).is_err() {
                tokio::task::yield_now().await;
            }
        }
        while rustix::io::write(&write, b"\x1b[31mlast words\r\n\r\n").is_err() {
            tokio::task::yield_now().await;
        }
        drop(write);
        (&mut console.reader).await.unwrap();
        assert!(console.kept.borrow().len() <= KEPT);
        let tail = console.tail(2);
        assert_eq!(tail[1], "[31mlast words");
        assert_eq!(tail[0].len(), 99);
        assert!(console.has_line(|line| line.len() == 99).await);
        assert!(
            !console.has_line(|line| line == b"never said").await,
            "the guest has ended"
        );
    }
}
