//! A process's standard streams as the agent holds them: the other ends of its pipes, or the master of its terminal.
//!
//! The kernel's pipe is the only buffer. What the host has not read stays there, so nothing is lost while no host is
//! connected, and a process that writes faster than the host reads waits.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::error::{Error, For, Result};

/// Most bytes one read returns.
const MOST: usize = 256 * 1024;

/// One non-blocking descriptor.
#[derive(Debug)]
struct Stream {
    fd: AsyncFd<OwnedFd>,
    closed: AtomicBool,
    closing: Notify,
}

type Slot = Mutex<Option<Arc<Stream>>>;

/// Standard streams of one process.
#[derive(Debug)]
pub struct Stdio {
    stdin: Slot,
    stdout: Slot,
    stderr: Slot,
    terminal: bool,
    /// Writes are whole: one at a time.
    writing: tokio::sync::Mutex<()>,
}

/// Which of the two a process writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
}

/// Three pipes: the process's ends, and the agent's.
pub fn pipes() -> Result<([OwnedFd; 3], [OwnedFd; 3])> {
    let pipe = || pipe_with(PipeFlags::CLOEXEC).for_(|| "make a pipe".into());
    let ((in_read, in_write), (out_read, out_write), (err_read, err_write)) = (pipe()?, pipe()?, pipe()?);
    Ok(([in_read, out_write, err_write], [in_write, out_read, err_read]))
}

/// Registers a descriptor with the runtime's poll.
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is the same open descriptor until it is dropped, and AsyncFd deregisters before it drops it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.for_(|| "watch a descriptor".into())
}

fn lock(slot: &Slot) -> MutexGuard<'_, Option<Arc<Stream>>> {
    slot.lock().unwrap_or_else(|e| e.into_inner())
}

impl Stream {
    fn new(fd: OwnedFd, interest: Interest) -> Result<Arc<Self>> {
        rustix::io::ioctl_fionbio(&fd, true).for_(|| "make a stream non-blocking".into())?;
        let fd = watch(fd, interest)?;
        Ok(Arc::new(Stream {
            fd,
            closed: AtomicBool::new(false),
            closing: Notify::new(),
        }))
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.closing.notify_waiters();
    }
}

impl Stdio {
    /// Of the agent's ends of [`pipes`]. Within the runtime.
    pub fn of_pipes([stdin, stdout, stderr]: [OwnedFd; 3]) -> Result<Self> {
        Ok(Stdio {
            stdin: Mutex::new(Some(Stream::new(stdin, Interest::WRITABLE)?)),
            stdout: Mutex::new(Some(Stream::new(stdout, Interest::READABLE)?)),
            stderr: Mutex::new(Some(Stream::new(stderr, Interest::READABLE)?)),
            terminal: false,
            writing: tokio::sync::Mutex::new(()),
        })
    }

    /// Of a terminal's master: one stream both ways, no stderr. Within the runtime.
    pub fn of_terminal(master: OwnedFd) -> Result<Self> {
        let stream = Stream::new(master, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Stdio {
            stdin: Mutex::new(Some(stream.clone())),
            stdout: Mutex::new(Some(stream)),
            stderr: Mutex::new(None),
            terminal: true,
            writing: tokio::sync::Mutex::new(()),
        })
    }

    /// Waits for output and returns up to `length` bytes of it, at least one.
    ///
    /// # Errors
    /// [`Error::EndOfFile`] when every writer is gone and everything was read.
    pub async fn read(&self, output: Output, length: usize) -> Result<Vec<u8>> {
        let slot = match output {
            Output::Stdout => &self.stdout,
            Output::Stderr => &self.stderr,
        };
        let stream = lock(slot).clone().ok_or(Error::EndOfFile)?;
        let length = length.clamp(1, MOST);
        loop {
            let mut ready = stream.fd.readable().await.for_(|| "wait for output".into())?;
            let mut bytes = Vec::new();
            let outcome = ready.try_io(|fd| {
                bytes.resize(length, 0);
                rustix::io::read(fd.as_fd(), &mut bytes).map_err(Into::into)
            });
            match outcome {
                Err(_would_block) => continue,
                // A terminal whose other side is closed answers EIO.
                Ok(Err(e)) if self.terminal && e.raw_os_error() == Some(libc::EIO) => {}
                Ok(Err(e)) => return Err(e).for_(|| "read output".into()),
                Ok(Ok(0)) => {}
                Ok(Ok(n)) => {
                    bytes.truncate(n);
                    bytes.shrink_to_fit();
                    return Ok(bytes);
                }
            }
            // No descriptor is kept for what will never say anything again.
            *lock(slot) = None;
            return Err(Error::EndOfFile);
        }
    }

    /// Writes all of `bytes`, waiting while the process does not read.
    pub async fn write(&self, bytes: &[u8]) -> Result<()> {
        let _whole = self.writing.lock().await;
        let closed = || Error::State("stdin is closed".into());
        let stream = lock(&self.stdin).clone().ok_or_else(closed)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let closing = stream.closing.notified();
            if stream.closed.load(Ordering::Acquire) {
                return Err(closed());
            }
            let mut ready = tokio::select! {
                ready = stream.fd.writable() => ready.for_(|| "wait for stdin".into())?,
                () = closing => return Err(closed()),
            };
            match ready.try_io(|fd| rustix::io::write(fd.as_fd(), rest).map_err(Into::into)) {
                Err(_would_block) => {}
                Ok(Ok(n)) => rest = &rest[n..],
                Ok(Err(e)) => return Err(e).for_(|| "write to stdin".into()),
            }
        }
        Ok(())
    }

    /// End of input. A terminal has none: its user types ^D.
    pub fn close_stdin(&self) {
        if !self.terminal
            && let Some(stream) = lock(&self.stdin).take()
        {
            stream.close();
        }
    }

    /// Tells the terminal its size, and its foreground process by SIGWINCH.
    pub fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        if !self.terminal {
            return Err(Error::State("the process has no terminal".into()));
        }
        // Output may be at its end and closed; the input side is the same terminal.
        let stream = lock(&self.stdin)
            .clone()
            .ok_or_else(|| Error::State("the terminal is closed".into()))?;
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        match tcsetwinsize(stream.fd.get_ref(), size) {
            // The process just ended.
            Err(Errno::IO) => Ok(()),
            other => other.for_(|| "set the terminal's size".into()),
        }
    }

    /// Lets go of every descriptor.
    pub fn close(&self) {
        for slot in [&self.stdin, &self.stdout, &self.stderr] {
            if let Some(stream) = lock(slot).take() {
                stream.close();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_runtime(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(test);
    }

    #[test]
    fn output_is_kept_until_it_is_read_then_eof() {
        on_runtime(async {
            let (theirs, ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            rustix::io::write(&theirs[1], b"hello").unwrap();
            drop(theirs);
            assert_eq!(stdio.read(Output::Stdout, 3).await.unwrap(), b"hel");
            assert_eq!(stdio.read(Output::Stdout, 100).await.unwrap(), b"lo");
            for _ in 0..2 {
                assert!(matches!(
                    stdio.read(Output::Stdout, 1).await,
                    Err(Error::EndOfFile)
                ));
            }
            assert!(matches!(
                stdio.read(Output::Stderr, 1).await,
                Err(Error::EndOfFile)
            ));
        });
    }

    #[test]
    fn closing_stdin_ends_a_write_that_waits() {
        on_runtime(async {
            let (theirs, ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            let big = vec![7u8; 1 << 20];
            let (written, ()) = tokio::join!(stdio.write(&big), async {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                stdio.close_stdin();
            });
            assert!(matches!(written, Err(Error::State(_))));
            drop(theirs);
        });
    }

    #[test]
    fn a_writer_waits_for_its_reader_and_nothing_is_lost() {
        on_runtime(async {
            let ([theirs, ..], ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                std::io::Read::read_to_end(&mut std::fs::File::from(theirs), &mut all).unwrap();
                all
            });
            let big: Vec<u8> = (0..1 << 20).map(|i| i as u8).collect();
            stdio.write(&big).await.unwrap();
            stdio.close_stdin();
            assert!(reader.join().unwrap() == big);
        });
    }
}
