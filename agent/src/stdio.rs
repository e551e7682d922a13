//! The agent's side of a process's standard streams: the other ends of its pipes, or the master of its
//! terminal.
//!
//! The kernel's pipe is the buffer. Output that the host has not read stays there, so nothing is lost while no
//! host is connected, and a process that writes faster than the host reads waits. In addition the agent keeps
//! the last answer until its reader asks for more, which shows that the answer arrived. If the connection is
//! lost before that (a thaw ends all connections), the next reader receives the answer again.

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::termios::{Winsize, tcsetwinsize};
use thaw_sys::lock::Lock;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::error::{Error, Result, WithContext};

/// Most bytes that one read returns.
const MAX_READ: usize = 256 * 1024;
/// Capacity of a pipe. A process fills it during a round trip to the host, so a smaller pipe would leave a read with less than it may return.
const PIPE_SIZE: usize = MAX_READ;

/// One non-blocking descriptor.
#[derive(Debug)]
struct Stream {
    fd: AsyncFd<OwnedFd>,
    closed: AtomicBool,
    closing: Notify,
}

type Slot = Mutex<Option<Arc<Stream>>>;

/// A reader: a connection from the host, identified by its allocation.
pub type Reader = Arc<dyn Any + Send + Sync>;

fn same(a: &Reader, b: &Reader) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Output being delivered to its reader: the last connection that asked.
#[derive(Debug)]
struct Delivery {
    reader: Reader,
    /// Bytes returned to that reader, which has not asked again since. At most [`MAX_READ`].
    given: Vec<u8>,
    /// Bytes returned to an earlier reader and not confirmed. They precede the bytes in the pipe.
    again: Vec<u8>,
    /// Whether no other reader can take over.
    is_last: bool,
}

impl Delivery {
    /// Records that `reader` asks for more: its earlier bytes have arrived. Another reader's bytes may not have arrived.
    fn confirm(slot: &mut Option<Self>, reader: &Reader) {
        match slot {
            Some(delivery) if same(&delivery.reader, reader) => delivery.given.clear(),
            Some(delivery) => {
                delivery.again.splice(..0, delivery.given.drain(..));
                delivery.reader = reader.clone();
            }
            None => {
                *slot = Some(Delivery {
                    reader: reader.clone(),
                    given: Vec::new(),
                    again: Vec::new(),
                    is_last: false,
                });
            }
        }
    }

    fn give(&mut self, bytes: &[u8]) {
        self.given.extend_from_slice(bytes);
        // Only a reader with two concurrent requests can exceed the limit.
        let excess = self.given.len().saturating_sub(MAX_READ);
        self.given.drain(..excess);
    }
}

/// Standard streams of one process.
#[derive(Debug)]
pub struct Stdio {
    stdin: Slot,
    stdout: Slot,
    stderr: Slot,
    deliveries: [Mutex<Option<Delivery>>; 2],
    terminal: bool,
    /// Held for the whole of a write, so that writes are not mixed.
    writing: tokio::sync::Mutex<()>,
}

/// An output stream of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
}

/// Creates three pipes: the process's ends, and the agent's.
pub fn pipes() -> Result<([OwnedFd; 3], [OwnedFd; 3])> {
    let pipe = || -> Result<(OwnedFd, OwnedFd)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).with_context(|| "make a pipe".into())?;
        // Without it the streams are slower.
        if let Err(e) = fcntl_setpipe_size(&write, PIPE_SIZE) {
            crate::warning!("cannot enlarge a pipe: {e}");
        }
        Ok((read, write))
    };
    let ((in_read, in_write), (out_read, out_write), (err_read, err_write)) = (pipe()?, pipe()?, pipe()?);
    Ok(([in_read, out_write, err_write], [in_write, out_read, err_read]))
}

/// Registers a descriptor with the runtime's poll.
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is the same open descriptor until it is dropped, and AsyncFd deregisters before it drops it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.with_context(|| "watch a descriptor".into())
}

/// Makes `reader` the stream's reader. Returns the bytes that it must receive before any from the pipe.
fn ask(delivery: &Mutex<Option<Delivery>>, reader: &Reader, length: usize) -> Result<Option<Vec<u8>>> {
    let mut delivery = delivery.locked();
    let is_other = |d: &Delivery| d.is_last && !same(&d.reader, reader);
    if delivery.as_ref().is_some_and(is_other) {
        return Err(Error::State("the agent keeps the output of this process".into()));
    }
    Delivery::confirm(&mut delivery, reader);
    let Some(delivery) = delivery.as_mut().filter(|d| !d.again.is_empty()) else {
        return Ok(None);
    };
    let bytes: Vec<u8> = delivery.again.drain(..length.min(delivery.again.len())).collect();
    delivery.give(&bytes);
    Ok(Some(bytes))
}

impl Stream {
    fn new(fd: OwnedFd, interest: Interest) -> Result<Arc<Self>> {
        rustix::io::ioctl_fionbio(&fd, true).with_context(|| "make a stream non-blocking".into())?;
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
    /// From the agent's ends of [`pipes`]. Must be called within the runtime.
    pub fn of_pipes([stdin, stdout, stderr]: [OwnedFd; 3]) -> Result<Self> {
        Ok(Stdio {
            stdin: Mutex::new(Some(Stream::new(stdin, Interest::WRITABLE)?)),
            stdout: Mutex::new(Some(Stream::new(stdout, Interest::READABLE)?)),
            stderr: Mutex::new(Some(Stream::new(stderr, Interest::READABLE)?)),
            deliveries: Default::default(),
            terminal: false,
            writing: tokio::sync::Mutex::new(()),
        })
    }

    /// From a terminal's master: one stream in both directions, and no stderr. Must be called within the
    /// runtime.
    pub fn of_terminal(master: OwnedFd) -> Result<Self> {
        let stream = Stream::new(master, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Stdio {
            stdin: Mutex::new(Some(stream.clone())),
            stdout: Mutex::new(Some(stream)),
            stderr: Mutex::new(None),
            deliveries: Default::default(),
            terminal: true,
            writing: tokio::sync::Mutex::new(()),
        })
    }

    /// Makes `reader` the last reader of both streams. Requests of other readers fail from now on, also one that was sent before and arrives
    /// later.
    pub fn read_last_by(&self, reader: &Reader) {
        for delivery in &self.deliveries {
            let mut delivery = delivery.locked();
            Delivery::confirm(&mut delivery, reader);
            if let Some(delivery) = delivery.as_mut() {
                delivery.is_last = true;
            }
        }
    }

    /// Waits for output and returns 1 to `length` bytes of it. A stream has one reader: the last that asked.
    ///
    /// # Errors
    /// [`Error::EndOfFile`] once every writer is gone and everything was read; [`Error::State`] if another
    /// reader asked meanwhile, or is the [last](Self::read_last_by).
    pub async fn read(&self, output: Output, reader: &Reader, length: usize) -> Result<Vec<u8>> {
        let (slot, delivery) = match output {
            Output::Stdout => (&self.stdout, &self.deliveries[0]),
            Output::Stderr => (&self.stderr, &self.deliveries[1]),
        };
        let length = length.clamp(1, MAX_READ);
        if let Some(bytes) = ask(delivery, reader, length)? {
            return Ok(bytes);
        }
        let stream = slot.locked().clone().ok_or(Error::EndOfFile)?;
        loop {
            let mut ready = stream
                .fd
                .readable()
                .await
                .with_context(|| "wait for output".into())?;
            let mut bytes = Vec::new();
            // Locked during the read, so that the next reader finds the bytes either in the pipe or here.
            let mut delivery = delivery.locked();
            let Some(delivery) = delivery.as_mut().filter(|d| same(&d.reader, reader)) else {
                return Err(Error::State("another connection reads this stream now".into()));
            };
            let outcome = ready.try_io(|fd| {
                // The buffer is only as large as the available bytes: a terminal has at most 4 KiB.
                let waiting = rustix::io::ioctl_fionread(fd.as_fd()).map_or(MAX_READ, |n| n as usize);
                bytes.reserve_exact(length.min(waiting.max(1)));
                rustix::io::read(fd.as_fd(), spare_capacity(&mut bytes)).map_err(Into::into)
            });
            match outcome {
                Err(_would_block) => continue,
                // A terminal whose other side is closed returns EIO.
                Ok(Err(e)) if self.terminal && e.raw_os_error() == Some(libc::EIO) => {}
                Ok(Err(e)) => return Err(e).with_context(|| "read output".into()),
                Ok(Ok(0)) => {}
                Ok(Ok(_)) => {
                    delivery.give(&bytes);
                    return Ok(bytes);
                }
            }
            // Nothing more can be read, so the descriptor is closed.
            *slot.locked() = None;
            return Err(Error::EndOfFile);
        }
    }

    /// Writes all of `bytes`. Waits while the process does not read.
    pub async fn write(&self, bytes: &[u8]) -> Result<()> {
        let _whole = self.writing.lock().await;
        let closed = || Error::State("stdin is closed".into());
        let stream = self.stdin.locked().clone().ok_or_else(closed)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let closing = stream.closing.notified();
            if stream.closed.load(Ordering::Acquire) {
                return Err(closed());
            }
            let mut ready = tokio::select! {
                ready = stream.fd.writable() => ready.with_context(|| "wait for stdin".into())?,
                () = closing => return Err(closed()),
            };
            match ready.try_io(|fd| rustix::io::write(fd.as_fd(), rest).map_err(Into::into)) {
                Err(_would_block) => {}
                Ok(Ok(n)) => rest = &rest[n..],
                Ok(Err(e)) => return Err(e).with_context(|| "write to stdin".into()),
            }
        }
        Ok(())
    }

    /// Closes stdin. Has no effect on a terminal, whose user types ^D.
    pub fn close_stdin(&self) {
        if !self.terminal
            && let Some(stream) = self.stdin.locked().take()
        {
            stream.close();
        }
    }

    /// Sets the terminal's size, and sends SIGWINCH to its foreground processes.
    pub fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        if !self.terminal {
            return Err(Error::State("the process has no terminal".into()));
        }
        // The output may have ended and be closed; the input is the same terminal.
        let stream = self
            .stdin
            .locked()
            .clone()
            .ok_or_else(|| Error::State("the terminal is closed".into()))?;
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        match tcsetwinsize(stream.fd.get_ref(), size) {
            // The process has just ended.
            Err(Errno::IO) => Ok(()),
            other => other.with_context(|| "set the terminal's size".into()),
        }
    }

    /// Closes every descriptor, and drops unconfirmed output.
    pub fn close(&self) {
        for delivery in &self.deliveries {
            *delivery.locked() = None;
        }
        for slot in [&self.stdin, &self.stdout, &self.stderr] {
            if let Some(stream) = slot.locked().take() {
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

    fn reader() -> Reader {
        Arc::new(0u8)
    }

    #[test]
    fn output_lost_with_a_connection_is_sent_again() {
        on_runtime(async {
            let (theirs, ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            let [a, b, c] = [reader(), reader(), reader()];
            rustix::io::write(&theirs[1], b"12345678").unwrap();
            assert_eq!(stdio.read(Output::Stdout, &a, 2).await.unwrap(), b"12");
            // Asking again confirms 12.
            assert_eq!(stdio.read(Output::Stdout, &a, 2).await.unwrap(), b"34");
            // 34 is unconfirmed, and is now read in smaller parts.
            assert_eq!(stdio.read(Output::Stdout, &b, 1).await.unwrap(), b"3");
            // 3, which b received, is unconfirmed; no call has asked for 4 since.
            assert_eq!(stdio.read(Output::Stdout, &c, 100).await.unwrap(), b"34");
            drop(theirs);
            assert_eq!(stdio.read(Output::Stdout, &c, 100).await.unwrap(), b"5678");
            // The end is reported only after the unconfirmed output.
            assert_eq!(stdio.read(Output::Stdout, &a, 100).await.unwrap(), b"5678");
            for end in [&a, &b] {
                assert!(matches!(
                    stdio.read(Output::Stdout, end, 1).await,
                    Err(Error::EndOfFile)
                ));
            }
        });
    }

    #[test]
    fn full_pipe_is_read_at_once() {
        on_runtime(async {
            let (theirs, ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            rustix::io::ioctl_fionbio(&theirs[1], true).unwrap();
            let written = rustix::io::write(&theirs[1], &[7; 2 * MAX_READ]).unwrap();
            assert_eq!(written, MAX_READ);
            let read = stdio.read(Output::Stdout, &reader(), MAX_READ).await;
            assert_eq!(read.unwrap().len(), MAX_READ, "bytes of one round trip");
        });
    }

    #[test]
    fn replaced_reader_takes_no_output() {
        on_runtime(async {
            let (theirs, ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            let [lost, next] = [reader(), reader()];
            let (first, second, written) = tokio::join!(
                stdio.read(Output::Stdout, &lost, 10),
                stdio.read(Output::Stdout, &next, 10),
                async { rustix::io::write(&theirs[1], b"all") }
            );
            assert!(matches!(first, Err(Error::State(_))), "{first:?}");
            assert_eq!((second.unwrap(), written.unwrap()), (b"all".to_vec(), 3));
        });
    }

    #[test]
    fn last_reader_loses_no_output_to_a_later_one() {
        on_runtime(async {
            let (theirs, ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            let [host, last] = [reader(), reader()];
            rustix::io::write(&theirs[1], b"one").unwrap();
            assert_eq!(stdio.read(Output::Stdout, &host, 10).await.unwrap(), b"one");
            stdio.read_last_by(&last);
            for output in [Output::Stdout, Output::Stderr] {
                let late = stdio.read(output, &host, 10).await;
                assert!(matches!(late, Err(Error::State(_))), "{late:?}");
            }
            rustix::io::write(&theirs[1], b"two").unwrap();
            // Nothing shows that the first piece arrived.
            for piece in [b"one", b"two"] {
                assert_eq!(stdio.read(Output::Stdout, &last, 10).await.unwrap(), piece);
            }
        });
    }

    #[test]
    fn output_is_kept_until_it_is_read_then_eof() {
        on_runtime(async {
            let (theirs, ours) = pipes().unwrap();
            let stdio = Stdio::of_pipes(ours).unwrap();
            let host = reader();
            rustix::io::write(&theirs[1], b"hello").unwrap();
            drop(theirs);
            assert_eq!(stdio.read(Output::Stdout, &host, 3).await.unwrap(), b"hel");
            assert_eq!(stdio.read(Output::Stdout, &host, 100).await.unwrap(), b"lo");
            for _ in 0..2 {
                assert!(matches!(
                    stdio.read(Output::Stdout, &host, 1).await,
                    Err(Error::EndOfFile)
                ));
            }
            assert!(matches!(
                stdio.read(Output::Stderr, &host, 1).await,
                Err(Error::EndOfFile)
            ));
        });
    }

    #[test]
    fn closing_stdin_ends_a_waiting_write() {
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
    fn fifo_writer_waits_for_its_reader() {
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
