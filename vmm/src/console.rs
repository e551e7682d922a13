//! The console: a 16550 whose output goes to a descriptor. For logs; nothing is ever read from it.
//!
//! Invariant: output never makes a vCPU wait and never accumulates. It is gathered to lines of at most [`LINE`] bytes; a
//! line that cannot be written now is dropped, and the next one that can says how much was lost.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use thaw_hypervisor::{EventFd, Vm};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

use crate::layout::{CONSOLE_GSI, CONSOLE_PORT};

/// Most bytes gathered before they are written: a pipe takes this much whole or not at all (PIPE_BUF).
pub const LINE: usize = 4096;
/// Register ports of a 16550.
const PORTS: u16 = 8;

/// The console of a machine, shared by its vCPUs.
pub struct Console {
    uart: Mutex<Serial<Line, NoEvents, Output>>,
}

impl Console {
    /// Makes the console and registers its interrupt.
    pub fn new(vm: &Vm) -> thaw_hypervisor::Result<Console> {
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|source| {
            thaw_hypervisor::Error::Ioctl {
                call: "eventfd of the console",
                source,
            }
        })?;
        vm.register_irqfd(&event, CONSOLE_GSI)?;
        Ok(Console {
            uart: Mutex::new(Serial::new(Line(event), Output::default())),
        })
    }

    /// Where output goes from now on.
    pub fn attach(&self, to: OwnedFd) {
        let mut uart = self.uart();
        uart.writer_mut().write_out();
        uart.writer_mut().to = Some(to);
    }

    /// The register `port` is of this console, if it is one.
    pub fn register(port: u16) -> Option<u8> {
        port.checked_sub(CONSOLE_PORT)
            .filter(|offset| *offset < PORTS)
            .map(|offset| offset as u8)
    }

    pub fn read(&self, register: u8) -> u8 {
        self.uart().read(register)
    }

    pub fn write(&self, register: u8, value: u8) {
        // The only errors are those of Output and Line, which report none.
        let _ = self.uart().write(register, value);
    }

    /// Writes an unfinished line: the machine stops here.
    pub fn flush(&self) {
        self.uart().writer_mut().write_out();
    }

    fn uart(&self) -> MutexGuard<'_, Serial<Line, NoEvents, Output>> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The interrupt line.
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        // Fails only when the counter is full: then the interrupt is pending anyway.
        let _ = self.0.write(1);
        Ok(())
    }
}

/// Gathers bytes to lines.
#[derive(Default)]
struct Output {
    to: Option<OwnedFd>,
    line: Vec<u8>,
    dropped: u64,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            self.line.push(byte);
            if byte == b'\n' || self.line.len() == LINE {
                self.write_out();
            }
        }
        Ok(bytes.len())
    }

    /// The UART flushes after each byte; lines are written when they end.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Output {
    /// Writes what was gathered, or drops it.
    fn write_out(&mut self) {
        if self.line.is_empty() {
            return;
        }
        let Some(to) = &self.to else {
            self.line.clear();
            return;
        };
        if self.dropped > 0 {
            let note = format!("[{} bytes of console output were dropped]\n", self.dropped);
            if write_now(to, note.as_bytes()) {
                self.dropped = 0;
            }
        }
        if self.dropped > 0 || !write_now(to, &self.line) {
            self.dropped += self.line.len() as u64;
        }
        self.line.clear();
    }
}

/// Writes all of `bytes` if that needs no waiting; says whether it did. The descriptor's own flags are left alone: they
/// are shared with whoever handed it over.
fn write_now(to: &OwnedFd, bytes: &[u8]) -> bool {
    match rustix::net::send(to, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Err(Errno::NOTSOCK) => {}
        sent => return sent == Ok(bytes.len()),
    }
    let mut writable = [PollFd::new(to, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut writable, Some(&now)), Ok(1))
        && writable[0].revents().contains(PollFlags::OUT)
        && rustix::io::write(to.as_fd(), bytes) == Ok(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::io::Read;

    fn output(to: OwnedFd) -> Output {
        Output {
            to: Some(to),
            ..Default::default()
        }
    }

    #[test]
    fn lines_arrive_whole_and_an_unfinished_one_when_flushed() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let mut output = output(write);
        output.write_all(b"one\ntw").unwrap();
        let mut read = std::fs::File::from(read);
        let mut bytes = [0u8; 16];
        assert_eq!(read.read(&mut bytes).unwrap(), 4);
        output.write_out();
        drop(output);
        let mut rest = String::new();
        read.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "tw");
    }

    #[test]
    fn a_reader_that_stalls_loses_output_and_is_told_how_much() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let mut output = output(write);
        let line = [[b'x'; 1023].as_slice(), b"\n"].concat();
        for _ in 0..1000 {
            output.write_all(&line).unwrap();
        }
        assert!(output.dropped > 0 && output.line.is_empty());
        let lost = output.dropped;
        let mut read = std::fs::File::from(read);
        let mut full = vec![0u8; 1000 * 1024 - lost as usize];
        read.read_exact(&mut full).unwrap();
        output.write_all(b"again\n").unwrap();
        drop(output);
        let mut rest = String::new();
        read.read_to_string(&mut rest).unwrap();
        assert_eq!(
            rest,
            format!("[{lost} bytes of console output were dropped]\nagain\n")
        );
    }

    #[test]
    fn without_a_descriptor_nothing_is_kept() {
        let mut output = Output::default();
        output.write_all(&[b'x'; 3 * LINE]).unwrap();
        assert!(output.line.len() < LINE);
    }

    #[test]
    fn a_closed_reader_is_survived() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        drop(read);
        let mut output = output(write);
        output.write_all(b"lost\n").unwrap();
        assert_eq!(output.dropped, 5);
    }
}
