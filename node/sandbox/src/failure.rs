//! Finds out why a sandbox failed, from the evidence that its VMM, its guest and its host left.
//!
//! Invariants: the reason is the first cause with evidence. The guest's evidence comes before the VMM's, and the VMM's before the host
//! kernel's. Text from a guest is bounded ([`MOST_LINES`], [`MOST_BYTES`]) and has no control characters.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use thaw_pools::cgroup::Hierarchy;
use thaw_pools::vmm::Ended;
use thaw_protocol::api::SandboxFailure;
use thaw_protocol::control::{ExitReason, FORBIDDEN_CALL, FORBIDDEN_CODE};

use crate::journal::Journal;

/// Name of the VMM's log in its sandbox's directory.
pub const VMM_LOG: &str = "vmm.log";
/// Maximum number of lines kept of each of the console, the VMM's log and the container's output.
const MOST_LINES: usize = 64;
/// Maximum number of bytes kept of each.
const MOST_BYTES: usize = 8 << 10;
/// Maximum number of characters kept of a line.
const LONGEST_LINE: usize = 1024;
/// The start of Linux's last line when it panics.
const PANIC: &str = "Kernel panic - not syncing: ";
/// The rest of that line if PID 1, the agent, ended.
const INIT_ENDED: &str = "Attempted to kill init";

/// A reason for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    OutOfMemory,
    Signal,
    ForbiddenCall,
    VmmError,
    VmmLost,
    MemoryLost,
    GuestPanic,
    AgentDied,
    GuestReset,
    GuestPowerOff,
    CpuFault,
    Unknown,
}

impl Reason {
    pub const ALL: [Reason; 12] = [
        Reason::OutOfMemory,
        Reason::Signal,
        Reason::ForbiddenCall,
        Reason::VmmError,
        Reason::VmmLost,
        Reason::MemoryLost,
        Reason::GuestPanic,
        Reason::AgentDied,
        Reason::GuestReset,
        Reason::GuestPowerOff,
        Reason::CpuFault,
        Reason::Unknown,
    ];

    /// Its stable name.
    pub fn code(self) -> &'static str {
        match self {
            Reason::OutOfMemory => "out-of-memory",
            Reason::Signal => "signal",
            Reason::ForbiddenCall => "forbidden-call",
            Reason::VmmError => "vmm-error",
            Reason::VmmLost => "vmm-lost",
            Reason::MemoryLost => "memory-lost",
            Reason::GuestPanic => "guest-panic",
            Reason::AgentDied => "agent-died",
            Reason::GuestReset => "guest-reset",
            Reason::GuestPowerOff => "guest-power-off",
            Reason::CpuFault => "cpu-fault",
            Reason::Unknown => "unknown",
        }
    }
}

/// How the VMM's process ended, as far as known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VmmEnd {
    Known(Ended),
    /// It had not ended by itself.
    Lives,
    /// It ended, an earlier thawd was its parent, and the kernel does not keep its status.
    #[default]
    Unknown,
    /// It had ended when thawd started.
    WithoutThawd,
}

/// Evidence for why a sandbox ended.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The VMM's report of why its guest ended.
    pub exited: Option<ExitReason>,
    /// The VMM's violation of the control protocol, after which thawd ends it.
    pub misconduct: Option<String>,
    /// Why its memory cannot be fetched, after which thawd ends it.
    pub memory_lost: Option<String>,
    pub vmm: VmmEnd,
    /// Number of processes in its cgroup that the kernel killed for lack of memory.
    pub oom_kills: u64,
    /// The last lines of the guest's console.
    pub console: Vec<String>,
    /// The last lines of the VMM's log.
    pub log: Vec<String>,
    /// The last output of its container's process.
    pub output: Vec<String>,
}

impl Evidence {
    /// The evidence in the directory of a sandbox whose VMM and owner have both ended.
    pub fn left_in(directory: &Path, cgroup: Option<&str>, cgroups: &Hierarchy) -> Evidence {
        let cgroup = cgroup.map(|name| cgroups.adopt(name));
        Evidence {
            vmm: VmmEnd::WithoutThawd,
            oom_kills: cgroup.map_or(0, |cgroup| cgroup.oom_kills()),
            ..Evidence::written_in(directory)
        }
    }

    /// The evidence in the files of its directory. Blocks.
    pub fn written_in(directory: &Path) -> Evidence {
        let output = match Journal::exists(directory) {
            true => Journal::open(directory).and_then(|journal| journal.tail(MOST_BYTES as u64)),
            false => Ok(Vec::new()),
        };
        let log = end_of(&directory.join(VMM_LOG), MOST_BYTES as u64);
        Evidence {
            log: last_lines(&log.unwrap_or_default(), MOST_LINES),
            output: last_lines(&output.unwrap_or_default(), MOST_LINES),
            ..Evidence::default()
        }
    }

    /// The failure that this evidence shows, with the current time.
    pub fn failure(self) -> SandboxFailure {
        let (reason, message) = self.reason();
        // After the guest has ended or lost its memory, thawd ends the VMM, so the signal is no evidence.
        let ended_by_thawd = self.exited.is_some() || self.misconduct.is_some() || self.memory_lost.is_some();
        let ended = match self.vmm {
            VmmEnd::Known(ended) if !ended_by_thawd => Some(ended),
            _ => None,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        SandboxFailure {
            reason: reason.code().into(),
            message,
            at: now.map_or(0, |now| now.as_secs()),
            exit_status: match ended {
                Some(Ended::Code(code)) => Some(code),
                _ => None,
            },
            signal: match ended {
                Some(Ended::Signal(signal)) => Some(signal),
                _ => None,
            },
            console: bounded(self.console),
            log: bounded(self.log),
            output: bounded(self.output),
        }
    }

    fn reason(&self) -> (Reason, String) {
        if let Some(exited) = &self.exited {
            return self.of_guest(exited);
        }
        if let Some(why) = &self.memory_lost {
            let message = format!("its memory could not be fetched: {}", printable(why));
            return (Reason::MemoryLost, message);
        }
        if let Some(what) = &self.misconduct {
            let what = printable(what);
            let message = format!("its VMM broke the control protocol, and thawd ended it: {what}");
            return (Reason::VmmLost, message);
        }
        let forbidden = self
            .log
            .iter()
            .rev()
            .find_map(|line| line.split_once(FORBIDDEN_CALL));
        if forbidden.is_some() || self.vmm == VmmEnd::Known(Ended::Code(FORBIDDEN_CODE)) {
            let which = forbidden.map_or("; which one is not known", |(_, rest)| rest);
            return (
                Reason::ForbiddenCall,
                format!("its VMM ended itself at a forbidden system call{which}"),
            );
        }
        let may_be_oom = match self.vmm {
            VmmEnd::Known(Ended::Signal(signal)) => signal == libc::SIGKILL,
            VmmEnd::Known(Ended::Code(_)) | VmmEnd::Lives => false,
            VmmEnd::Unknown | VmmEnd::WithoutThawd => true,
        };
        if may_be_oom && self.oom_kills > 0 {
            let what = "the host's kernel killed its VMM: out of memory";
            return (Reason::OutOfMemory, what.into());
        }
        match self.vmm {
            VmmEnd::Known(Ended::Signal(signal)) => {
                let what = match signal_name(signal) {
                    Some(name) => format!("its VMM was ended by {name}"),
                    None => format!("its VMM was ended by signal {signal}"),
                };
                (Reason::Signal, what)
            }
            VmmEnd::Known(Ended::Code(code)) => {
                (Reason::VmmError, format!("its VMM ended with status {code}"))
            }
            VmmEnd::Lives => {
                let what = "its VMM broke its control connection, and thawd ended it";
                (Reason::VmmLost, what.into())
            }
            VmmEnd::Unknown => {
                let what = "its VMM ended; an earlier thawd had started it, and Linux before 6.15 does not tell another how";
                (Reason::Unknown, what.into())
            }
            VmmEnd::WithoutThawd => {
                let what = "its VMM ended while thawd was not running, and nothing tells why";
                (Reason::Unknown, what.into())
            }
        }
    }

    fn of_guest(&self, exited: &ExitReason) -> (Reason, String) {
        match exited {
            ExitReason::PowerOff => (Reason::GuestPowerOff, "the guest powered off".into()),
            ExitReason::Fault(what) => {
                let what = printable(what);
                (
                    Reason::CpuFault,
                    format!("the guest's CPU could not go on: {what}"),
                )
            }
            ExitReason::Reset => {
                let panic = self.console.iter().rev().find_map(|line| line.split_once(PANIC));
                match panic {
                    Some((_, why)) if why.starts_with(INIT_ENDED) => (
                        Reason::AgentDied,
                        format!("the guest's agent ended, and its kernel with it: {why}"),
                    ),
                    Some((_, why)) => (Reason::GuestPanic, format!("the guest's kernel panicked: {why}")),
                    None => (
                        Reason::GuestReset,
                        "the guest reset its machine, and its console does not tell why".into(),
                    ),
                }
            }
        }
    }
}

/// The name of a signal that may end a VMM.
fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        libc::SIGKILL => "SIGKILL",
        libc::SIGABRT => "SIGABRT",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGBUS => "SIGBUS",
        libc::SIGILL => "SIGILL",
        libc::SIGFPE => "SIGFPE",
        libc::SIGSYS => "SIGSYS",
        libc::SIGTERM => "SIGTERM",
        libc::SIGINT => "SIGINT",
        libc::SIGHUP => "SIGHUP",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGXCPU => "SIGXCPU",
        _ => return None,
    })
}

/// The last bytes of a file, at most `most`.
pub fn end_of(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let wanted = length.min(most);
    let mut bytes = vec![0; wanted as usize];
    file.read_exact_at(&mut bytes, length - wanted)?;
    Ok(bytes)
}

/// The last `most` non-blank lines of a text, oldest first.
pub fn last_lines(text: &[u8], most: usize) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().rev().map(printable).filter(|line| !line.is_empty());
    let mut lines: Vec<String> = lines.take(most).collect();
    lines.reverse();
    lines
}

/// A line without control characters.
pub fn printable(line: &str) -> String {
    let plain: String = line.chars().filter(|c| !c.is_control()).collect();
    plain.trim_end().to_owned()
}

/// The last lines that fit within the limits; long lines are cut.
fn bounded(lines: Vec<String>) -> Vec<String> {
    let cut = |line: String| match line.char_indices().nth(LONGEST_LINE) {
        Some((end, _)) => line[..end].to_owned(),
        None => line,
    };
    let lines: Vec<String> = lines.into_iter().map(cut).collect();
    let mut room = MOST_BYTES;
    let fit = lines.iter().rev().take(MOST_LINES).take_while(|line| {
        let fits = line.len() <= room;
        room = room.saturating_sub(line.len());
        fits
    });
    let dropped = lines.len() - fit.count();
    lines.into_iter().skip(dropped).collect()
}

#[cfg(test)]
#[path = "failure_test.rs"]
mod tests;
