//! A pseudo-terminal with a command on it, as a person's terminal would have.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};

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
        let mut buffer = [0u8; 4096];
        while !self.seen.contains(text) {
            let mut ready = [libc::pollfd {
                fd: self.master.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            }];
            // SAFETY: one valid pollfd.
            let n = unsafe { libc::poll(ready.as_mut_ptr(), 1, crate::PATIENCE.as_millis() as i32) };
            assert!(
                n > 0,
                "nothing more was shown; waiting for {text:?}, saw {:?}",
                self.seen
            );
            match self.master.read(&mut buffer) {
                Ok(n) if n > 0 => self.seen += &String::from_utf8_lossy(&buffer[..n]),
                end => panic!("terminal closed ({end:?}) before {text:?}: {:?}", self.seen),
            }
        }
        let end = self.seen.find(text).map(|at| at + text.len()).unwrap_or(0);
        self.seen.drain(..end);
    }

    /// Reads to the end and waits for the command.
    pub fn wait(mut self) -> (ExitStatus, String) {
        let mut buffer = [0u8; 4096];
        while let Ok(n) = self.master.read(&mut buffer) {
            if n == 0 {
                break;
            }
            self.seen += &String::from_utf8_lossy(&buffer[..n]);
        }
        (self.child.wait().unwrap(), self.seen)
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
