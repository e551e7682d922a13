//! The console: a 16550 whose output goes to a descriptor. It is for logs; the guest cannot read input from it.
//!
//! Invariant: output never makes a vCPU wait and never accumulates. Output is gathered into lines of at most [`LINE`] bytes. A line that
//! cannot be written at once is dropped, and the next line that can be written states how many bytes were lost. A restored console raises
//! its interrupt again: if an interrupt was lost at the freeze, the guest would wait for it for ever, because the UART does not raise
//! another before the first is acknowledged.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use thaw_hypervisor::{EventFd, Vm};
use thaw_protocol::control::{Backend, DeviceId};
use thaw_sys::lock::Lock;
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, SerialState, Trigger};

use crate::layout::{CONSOLE_GSI, CONSOLE_PORT};
use crate::virtio::backend_check::{BackendCheck, NotSettled};
use crate::virtio::device::RestoreError;
use crate::virtio::device::{AttachError, one_descriptor};
use crate::virtio::state::ConsoleRecord;

/// Most bytes gathered before a write: a pipe takes this many whole or not at all (PIPE_BUF).
pub const LINE: usize = 4096;
/// Register ports of a 16550.
const PORTS: u16 = 8;
/// Capacity of the receive FIFO of vm-superio's UART, in bytes.
const FIFO: usize = 64;
/// Bits of IER and IIR: data has been received, and the transmitter is empty.
const IER_DATA: u8 = 1;
const IER_EMPTY: u8 = 2;
const IIR_EMPTY: u8 = 2;
const IIR_DATA: u8 = 4;

/// The console of a machine, shared by its vCPUs.
pub struct Console {
    uart: Mutex<Uart>,
    line: Line,
    backend_check: BackendCheck,
}

type Uart = Serial<Line, NoEvents, Output>;

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
        Ok(Console::on(event))
    }

    fn on(event: EventFd) -> Console {
        let line = Line(Arc::new(Wire {
            event,
            held: AtomicBool::new(false),
        }));
        Console {
            uart: Mutex::new(Serial::new(line.clone(), Output::default())),
            line,
            backend_check: BackendCheck::default(),
        }
    }

    /// Sets the descriptor that output goes to from now on.
    pub fn attach(&self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let mut uart = self.uart();
        match backend {
            Backend::Console => {
                let to = one_descriptor(fds)?;
                uart.writer_mut().write_out();
                uart.writer_mut().to = Some(to);
                self.backend_check.settle();
                Ok(())
            }
            _ => Err(AttachError::WrongKind(
                "the console takes a descriptor to write to",
            )),
        }
    }

    /// Writes out an unfinished line and returns the state that a freeze keeps. No vCPU may run.
    pub fn save(&self) -> ConsoleRecord {
        let mut uart = self.uart();
        uart.writer_mut().write_out();
        let state = uart.state();
        ConsoleRecord {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.in_buffer,
            backed: uart.writer().to.is_some(),
        }
    }

    /// Whether [`Self::restore`] would accept `record`; changes nothing.
    pub fn check(&self, record: &ConsoleRecord) -> Result<(), RestoreError> {
        match record.in_buffer.len() {
            ..=FIFO => Ok(()),
            held => Err(invalid(format!("{held} received bytes, {FIFO} at most"))),
        }
    }

    /// Restores a frozen console's registers, without a backend. No interrupt is raised before [`Self::start_work`].
    pub fn restore(&self, record: &ConsoleRecord) -> Result<(), RestoreError> {
        self.check(record)?;
        let state = SerialState {
            baud_divisor_low: record.baud_divisor_low,
            baud_divisor_high: record.baud_divisor_high,
            interrupt_enable: record.interrupt_enable,
            interrupt_identification: record.interrupt_identification,
            line_control: record.line_control,
            line_status: record.line_status,
            modem_control: record.modem_control,
            modem_status: record.modem_status,
            scratch: record.scratch,
            in_buffer: record.in_buffer.clone(),
        };
        self.line.0.held.store(true, Ordering::SeqCst);
        *self.uart() = Serial::from_state(&state, self.line.clone(), NoEvents, Output::default())
            .map_err(|error| invalid(error.to_string()))?;
        self.backend_check.restored(record.backed);
        Ok(())
    }

    /// Why the console keeps the machine from being thawed, if it does. `declared_empty`: it is declared to have no backend; otherwise
    /// [`Self::attach`] must have given it one.
    pub fn not_settled(&self, declared_empty: bool) -> Option<NotSettled> {
        self.backend_check
            .not_settled(declared_empty.then(|| self.uart().writer().to.is_some()))
    }

    /// Raises a restored console's interrupt if its driver has not acknowledged it.
    pub fn start_work(&self) {
        let uart = self.uart();
        if self.line.0.held.swap(false, Ordering::SeqCst) {
            let state = uart.state();
            let pending = |enable: u8, identification: u8| {
                state.interrupt_enable & enable != 0 && state.interrupt_identification & identification != 0
            };
            if pending(IER_EMPTY, IIR_EMPTY) || pending(IER_DATA, IIR_DATA) {
                self.line.0.raise();
            }
        }
    }

    /// The offset of the console register at `port`, or `None` if the port is not one of the console's.
    pub fn register(port: u16) -> Option<u8> {
        port.checked_sub(CONSOLE_PORT)
            .filter(|offset| *offset < PORTS)
            .map(|offset| offset as u8)
    }

    pub fn read(&self, register: u8) -> u8 {
        self.uart().read(register)
    }

    pub fn write(&self, register: u8, value: u8) {
        // Cannot fail: the only errors would come from Output and Line, which return none.
        let _ = self.uart().write(register, value);
    }

    /// Writes out an unfinished line. For a machine that stops here.
    pub fn flush(&self) {
        self.uart().writer_mut().write_out();
    }

    fn uart(&self) -> MutexGuard<'_, Uart> {
        self.uart.locked()
    }
}

fn invalid(what: String) -> RestoreError {
    RestoreError::Invalid {
        device: DeviceId::Console,
        what,
    }
}

/// The interrupt line.
#[derive(Clone)]
struct Line(Arc<Wire>);

struct Wire {
    event: EventFd,
    /// Set while the machine is parked: nothing is raised before [`Console::start_work`].
    held: AtomicBool,
}

impl Wire {
    fn raise(&self) {
        // Fails only if the counter is full, and then the interrupt is pending anyway.
        let _ = self.event.write(1);
    }
}

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        if !self.0.held.load(Ordering::SeqCst) {
            self.0.raise();
        }
        Ok(())
    }
}

/// Gathers bytes into lines.
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

    /// The UART calls this after each byte; a line is written only when it ends.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Output {
    /// Writes the gathered bytes, or drops them.
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

/// Writes all of `bytes` if that is possible without waiting. Returns whether it did. The descriptor's own flags stay unchanged, because
/// the process that passed the descriptor shares them.
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

    const IER: u8 = 1;
    const IIR: u8 = 2;

    fn console() -> Console {
        Console::on(EventFd::new(libc::EFD_NONBLOCK).unwrap())
    }

    fn raised(console: &Console) -> bool {
        console.line.0.event.read().is_ok()
    }

    #[test]
    fn interrupt_lost_at_the_freeze_is_raised_after_the_thaw() {
        let frozen = console();
        frozen.write(IER, IER_EMPTY);
        frozen.write(0, b'x');
        assert!(raised(&frozen), "the driver has not looked yet");
        let record = ConsoleRecord::decode(&frozen.save().encode()).unwrap();

        let thawed = console();
        thawed.restore(&record).unwrap();
        // Without the lost interrupt the UART raises no other, whatever is written.
        thawed.write(0, b'y');
        assert!(!raised(&thawed), "parked");
        thawed.start_work();
        assert!(raised(&thawed));
        thawed.start_work();
        assert!(!raised(&thawed));
        assert_eq!(thawed.read(IIR) & IIR_EMPTY, IIR_EMPTY);
        thawed.write(0, b'z');
        assert!(raised(&thawed), "it goes on as usual");
    }

    #[test]
    fn restored_console_needs_a_backend_or_the_word_it_has_none() {
        let (_read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let frozen = console();
        frozen
            .attach(Backend::Console, vec![write.try_clone().unwrap()])
            .unwrap();
        let thawed = console();
        assert_eq!(thawed.not_settled(false), None);
        thawed.restore(&frozen.save()).unwrap();
        assert_eq!(thawed.not_settled(true), Some(NotSettled::WasBacked));
        assert!(matches!(
            thawed.attach(Backend::Vsock, vec![write.try_clone().unwrap()]),
            Err(AttachError::WrongKind(_))
        ));
        assert_eq!(thawed.not_settled(false), Some(NotSettled::NotMentioned));
        thawed.attach(Backend::Console, vec![write]).unwrap();
        assert_eq!(thawed.not_settled(false), None);
        assert_eq!(thawed.not_settled(true), Some(NotSettled::IsBacked));

        let silent = console();
        silent.restore(&console().save()).unwrap();
        assert_eq!(silent.not_settled(false), Some(NotSettled::NotMentioned));
        assert_eq!(silent.not_settled(true), None);
    }

    #[test]
    fn a_console_that_received_too_much_is_refused() {
        let mut record = console().save();
        record.in_buffer = vec![0; FIFO + 1];
        assert!(matches!(
            console().restore(&record),
            Err(RestoreError::Invalid { .. })
        ));
    }

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
