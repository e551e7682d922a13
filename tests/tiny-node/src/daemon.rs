//! A thawd over a [`Place`].

use std::fs::File;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use thaw_pools::process::ProcessRecord;

use crate::place::Place;

/// How long other processes may take to do what they are waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A thawd; killed when dropped.
#[derive(Debug)]
pub struct Thawd {
    child: Child,
    record: ProcessRecord,
}

impl Thawd {
    /// Starts one and waits until it serves. What it logs is appended to `thawd.log`.
    pub fn start(place: &Place) -> Thawd {
        let mut thawd = Thawd::begin(place, place.thawd());
        assert!(thawd.serves(place), "thawd ended at once: {}", log(place));
        thawd
    }

    /// Starts one by this command, and does not wait.
    pub fn begin(place: &Place, mut command: Command) -> Thawd {
        let log = File::options()
            .create(true)
            .append(true)
            .open(place.path("thawd.log"))
            .unwrap();
        let child = command.stderr(log).spawn().unwrap();
        Thawd {
            // Not reaped, so there is a record even of one that has ended; a zombie has none that lives.
            record: ProcessRecord::of(child.id() as i32).unwrap_or(ProcessRecord {
                pid: child.id() as i32,
                start_time: 0,
            }),
            child,
        }
    }

    /// Waits until it serves, or has ended. Says whether it serves.
    pub fn serves(&mut self, place: &Place) -> bool {
        let mut ended = false;
        eventually("thawd serves or ends", || {
            ended = self.has_ended();
            ended || thaw_pools::vmm::is_served(&place.socket())
        });
        !ended
    }

    /// Which process it is.
    pub fn record(&self) -> ProcessRecord {
        self.record
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Kills it as nothing can be caught.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets it read again what it may read again.
    pub fn reload(&self) {
        kill_process(Pid::from_child(&self.child), Signal::HUP).unwrap();
    }

    /// Ends it as an operator ends it: how it ended.
    pub fn stop(mut self) -> ExitStatus {
        let pid = Pid::from_child(&self.child);
        // It may have ended by itself.
        let _ = kill_process(pid, Signal::TERM);
        self.child.wait().unwrap()
    }

    /// Ends it, and starts another at the same place.
    pub fn restart(self, place: &Place) -> Thawd {
        assert!(self.stop().success(), "{}", log(place));
        Thawd::start(place)
    }
}

impl Drop for Thawd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The last lines of what thawds of this place logged.
pub fn log(place: &Place) -> String {
    let text = std::fs::read_to_string(place.path("thawd.log")).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// Waits until a process takes no processor time: its guest sleeps.
pub fn until_idle(pid: i32) {
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // utime and stime, proc_pid_stat(5).
        let fields = stat.split_whitespace().skip(13).take(2);
        fields.map(str::to_owned).collect::<Vec<_>>()
    };
    eventually("the guest sleeps", || {
        let before = ticks();
        std::thread::sleep(Duration::from_millis(200));
        ticks() == before
    });
}

/// Waits until something other processes do is so. The tests' only wait.
pub fn eventually(what: &str, so: impl FnMut() -> bool) {
    eventually_or(|| what.to_owned(), so);
}

/// The same. `what` is called only if it never becomes so: it says what was waited for, and can show what is there instead.
pub fn eventually_or(what: impl FnOnce() -> String, mut so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !so() {
        if began.elapsed() >= PATIENCE {
            panic!("never: {}", what());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
