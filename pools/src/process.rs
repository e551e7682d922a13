//! Names one process across reuse of its pid.
//!
//! A pid alone names whatever process has it now; a pid with its start time names one process for ever. A record read back from disk is
//! used only through a pidfd whose start time was checked after the pidfd was opened.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

/// How long a killed process may take to end: it may be stuck in the kernel.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(10);

/// Bytes of the longest `/proc/PID/stat`: 52 numbers of at most 20 digits, and a name.
const LONGEST_STAT: usize = 2048;

/// A process: its pid and its start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    pub pid: i32,
    /// Clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start_time: u64,
}

impl ProcessRecord {
    /// The record of the process that has this pid now.
    pub fn of(pid: i32) -> Option<ProcessRecord> {
        Some(ProcessRecord {
            pid,
            start_time: start_time(pid)?,
        })
    }

    /// The calling process. Read once: neither part of it changes while the process lives, and a forked child has another pid.
    pub fn myself() -> Option<ProcessRecord> {
        static READ: OnceLock<ProcessRecord> = OnceLock::new();
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        if let Some(read) = READ.get().filter(|read| read.pid == pid) {
            return Some(*read);
        }
        let myself = ProcessRecord::of(pid)?;
        // A child keeps what its parent has read, and reads its own each time.
        let _ = READ.set(myself);
        Some(myself)
    }

    /// A pidfd of exactly this process, if it is alive (a zombie is not).
    pub fn open(&self) -> Option<OwnedFd> {
        let pidfd = rustix::process::pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        (start_time(self.pid) == Some(self.start_time)).then_some(pidfd)
    }

    /// Whether it is alive.
    pub fn lives(&self) -> bool {
        self.open().is_some()
    }

    /// Kills it if it is alive, and waits until it has ended. Returns whether it was alive.
    pub fn kill(&self) -> bool {
        let Some(pidfd) = self.open() else { return false };
        if rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).is_err() {
            return false;
        }
        await_end(&pidfd, END_LIMIT);
        true
    }

    /// Waits until it has ended, for at most `limit`.
    pub fn await_end(&self, limit: Duration) {
        if let Some(pidfd) = self.open() {
            await_end(&pidfd, limit);
        }
    }
}

/// Waits until the process of a pidfd has ended, for at most `limit`.
pub(crate) fn await_end(pidfd: &OwnedFd, limit: Duration) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&limit)) {}
}

/// The status of a process that has ended, as wait(2) returns it to the parent. `None` while the process is alive, and if the kernel no
/// longer has the status: before Linux 6.15 it has it only until the parent reaps the process.
pub(crate) fn status_of_ended(pidfd: BorrowedFd<'_>, record: ProcessRecord) -> Option<i32> {
    let kept = || status_of_pidfd(pidfd);
    // It may be reaped between the two.
    kept().or_else(|| status_of_zombie(record)).or_else(kept)
}

fn status_of_pidfd(pidfd: BorrowedFd<'_>) -> Option<i32> {
    // SAFETY: it consists of numbers, for which zero is valid.
    let mut info: libc::pidfd_info = unsafe { std::mem::zeroed() };
    let wanted = u64::from(libc::PIDFD_INFO_EXIT);
    info.mask = wanted;
    // SAFETY: the request's number has the size of `info`, which is all that the kernel reads and writes.
    let asked = unsafe { libc::ioctl(pidfd.as_raw_fd(), libc::PIDFD_GET_INFO, &raw mut info) };
    (asked == 0 && info.mask & wanted != 0).then_some(info.exit_code)
}

/// Field 52 of `/proc/PID/stat`. A reader that may not trace the process sees 0, so 0 means nothing.
fn status_of_zombie(record: ProcessRecord) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", record.pid)).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let same = fields.get(22 - 3)?.parse() == Ok(record.start_time);
    match *fields.first()? {
        "Z" if same => fields.get(52 - 3)?.parse().ok().filter(|status| *status != 0),
        _ => None,
    }
}

/// The process that called listen(2) on the socket that `socket` is connected to (unix(7), `SO_PEERCRED`). `None` if its PID namespace
/// is not visible here: the kernel then reports pid 0, which rustix cannot represent.
pub(crate) fn listens(socket: &OwnedFd) -> Option<i32> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes of a ucred to `peer`, which is one, and the new length to `length`.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    (got == 0 && peer.pid > 0).then_some(peer.pid)
}

fn start_time(pid: i32) -> Option<u64> {
    Stat::of(pid).map(|stat| stat.start_time)
}

/// `/proc/PID/stat` of a live process (proc(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Page faults that waited for a disk.
    pub major_faults: u64,
    /// CPU time, user and system, clock ticks.
    pub cpu_ticks: u64,
    pub threads: u64,
    /// Clock ticks since boot.
    pub start_time: u64,
    pub virtual_bytes: u64,
    pub resident_pages: u64,
}

impl Stat {
    /// The record of the process that currently has this pid; `None` for a zombie.
    pub fn of(pid: i32) -> Option<Stat> {
        Stat::read(&format!("/proc/{pid}/stat"))
    }

    /// The record of the calling process.
    pub fn of_self() -> Option<Stat> {
        Stat::read("/proc/self/stat")
    }

    /// Reads it in one call, because the kernel counts anew for each.
    fn read(path: &str) -> Option<Stat> {
        let mut text = [0; LONGEST_STAT];
        let length = File::open(path).and_then(|mut file| file.read(&mut text)).ok()?;
        Stat::parse(std::str::from_utf8(text.get(..length)?).ok()?)
    }

    /// Fields are counted after the last `)`, because the name before it can contain anything. The manual's third field is our first.
    fn parse(stat: &str) -> Option<Stat> {
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        if matches!(*fields.first()?, "Z" | "X") {
            return None;
        }
        let field = |manual: usize| fields.get(manual - 3)?.parse::<u64>().ok();
        Some(Stat {
            major_faults: field(12)?,
            cpu_ticks: field(14)?.saturating_add(field(15)?),
            threads: field(20)?,
            start_time: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// Makes the kernel OOM-kill a process of ours before others: raises its score to `least`, unless it is higher. Raising needs no
/// privilege.
pub(crate) fn raise_oom_score(pid: i32, least: i32) -> std::io::Result<()> {
    let file = format!("/proc/{pid}/oom_score_adj");
    let inherited: i32 = std::fs::read_to_string(&file)?.trim().parse().unwrap_or(0);
    match inherited < least {
        true => std::fs::write(&file, least.to_string()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_names_one_process_and_not_its_successor() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let record = ProcessRecord::of(child.id() as i32).unwrap();
        let other = ProcessRecord {
            start_time: record.start_time + 1,
            ..record
        };
        assert!(!other.lives());
        assert!(!other.kill());
        assert!(record.lives());
        assert!(record.kill());
        assert!(!record.lives(), "a zombie is not alive");
        child.wait().unwrap();
        assert!(!record.kill());
    }

    #[test]
    fn stat_fields_are_counted_from_the_end_of_the_name() {
        let fields: Vec<String> = (4..=52).map(|n| (n * 10).to_string()).collect();
        let stat = |state: &str| format!("77 (a) b (c) {state} {}", fields.join(" "));
        let expected = Stat {
            major_faults: 120,
            cpu_ticks: 290,
            threads: 200,
            start_time: 220,
            virtual_bytes: 230,
            resident_pages: 240,
        };
        assert_eq!(Stat::parse(&stat("S")), Some(expected));
        assert_eq!(Stat::parse(&stat("Z")), None);
        assert_eq!(Stat::parse("77 (x) S 1 2"), None);
        assert_eq!(Stat::parse("77 (x"), None);
        assert!(Stat::of_self().unwrap().threads > 0);
    }

    #[test]
    fn record_of_this_process_lives() {
        assert!(ProcessRecord::myself().unwrap().lives());
    }

    #[test]
    fn oom_score_is_raised_and_never_lowered() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let score = || std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        let raised = [900, 200].map(|least| raise_oom_score(pid, least).map(|()| score()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(raised.iter().all(|score| score.as_ref().unwrap() == "900\n"));
        assert!(raise_oom_score(-1, 200).is_err());
    }
}
