//! A pseudo-terminal with a command on it, as a person's terminal would have.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

/// A command running on its own terminal.
pub struct Terminal {
    master: File,
    child: Child,
    seen: String,
}

impl Terminal {
    /// Starts `command` as the foreground process of a new 80×24 terminal.
    pub fn start(command: &mut Command) -> Terminal {
        Terminal::sized(command, 24, 80)
    }

    /// Starts `command` as the foreground process of a new terminal of this size.
    pub fn sized(command: &mut Command, rows: u16, columns: u16) -> Terminal {
        let master =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        rustix::pty::grantpt(&master).unwrap();
        rustix::pty::unlockpt(&master).unwrap();
        let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
        let slave: OwnedFd = File::options()
            .read(true)
            .write(true)
            // It is to be the command's, not ours: a session's leader would be hung up with it.
            .custom_flags(libc::O_NOCTTY)
            .open(name.to_str().unwrap())
            .unwrap()
            .into();
        let mut terminal_side = command;
        terminal_side = terminal_side
            .stdin(slave.try_clone().unwrap())
            .stdout(slave.try_clone().unwrap())
            .stderr(slave.try_clone().unwrap());
        // SAFETY: between fork and exec only the async-signal-safe setsid and ioctl are called.
        unsafe {
            terminal_side.pre_exec(|| {
                rustix::process::setsid()?;
                if libc::ioctl(0, libc::TIOCSCTTY, 0) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        rustix::termios::tcsetwinsize(&master, winsize(rows, columns)).unwrap();
        Terminal {
            master: master.into(),
            child: terminal_side.spawn().unwrap(),
            seen: String::new(),
        }
    }

    /// Types.
    pub fn say(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    /// Changes the window's size; the kernel tells the foreground process.
    pub fn resize(&self, rows: u16, columns: u16) {
        rustix::termios::tcsetwinsize(&self.master, winsize(rows, columns)).unwrap();
    }

    /// Reads until `text` has been shown since the last call; fails at the end of output.
    pub fn expect(&mut self, text: &str) {
        let deadline = Instant::now() + crate::PATIENCE;
        while !self.seen.contains(text) {
            if !self.read_more(deadline, text) {
                panic!("terminal closed before {text:?}: {:?}", self.seen);
            }
        }
        let end = self.seen.find(text).map(|at| at + text.len()).unwrap_or(0);
        self.seen.drain(..end);
    }

    /// Reads to the end and waits for the command. Fails if that takes longer than [`crate::PATIENCE`].
    pub fn wait(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + crate::PATIENCE;
        while self.read_more(deadline, "the end") {}
        // It may close its terminal before it ends.
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() >= deadline {
                self.give_up("the end");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        (status, self.seen)
    }

    /// Reads what is shown next, and returns false at the end. Kills the command and fails at the deadline: a bar that is redrawn without
    /// end must not keep a test waiting.
    fn read_more(&mut self, deadline: Instant, awaited: &str) -> bool {
        let mut ready = [libc::pollfd {
            fd: self.master.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        let left = deadline.saturating_duration_since(Instant::now());
        // SAFETY: one valid pollfd.
        let n = unsafe { libc::poll(ready.as_mut_ptr(), 1, left.as_millis() as i32) };
        if n <= 0 {
            self.give_up(awaited);
        }
        let mut buffer = [0u8; 4096];
        match self.master.read(&mut buffer) {
            Ok(n) if n > 0 => {
                self.seen += &String::from_utf8_lossy(&buffer[..n]);
                true
            }
            // EIO: nothing has the terminal open.
            _ => false,
        }
    }

    fn give_up(&mut self, awaited: &str) -> ! {
        let stuck = crate::stuck::report(self.child.id() as i32);
        let _ = self.child.kill();
        let seen = &self.seen;
        panic!(
            "{awaited:?} did not come within {:?}; shown since: {seen:?}\n{stuck}",
            crate::PATIENCE
        );
    }
}

fn winsize(rows: u16, columns: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}
