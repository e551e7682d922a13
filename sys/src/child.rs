//! The start of a process that serves one guest (thaw-vmm, thaw-share): its command line has no arguments, and it receives everything else
//! over one inherited socket.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process::ExitCode;

/// The exit code of a process that was started incorrectly.
pub const STARTED_INCORRECTLY: u8 = 2;

/// The end of each program's help.
const OPTIONS: &str = "
Options:
  --help     print this
  --version  print the version

Environment:
  THAW_LOG   off, error, warn, info (default), debug or trace; logs go to standard error, as JSON lines unless that
             is a terminal
";

/// Answers `--help` and `--version`, and refuses any other argument. `Some` if the process is to exit with this code. The help is `about`,
/// then the options, then the lines of `variables`.
pub fn answer_arguments(name: &str, version: &str, about: &str, variables: &str) -> Option<ExitCode> {
    match std::env::args().nth(1).as_deref() {
        None => None,
        Some("--help" | "-h") => {
            print!("{about}{OPTIONS}{variables}");
            Some(ExitCode::SUCCESS)
        }
        Some("--version" | "-V") => {
            println!("{name} {version}");
            Some(ExitCode::SUCCESS)
        }
        Some(other) => {
            eprintln!("{name}: unknown argument {other:?}; it takes none (see {name} --help)");
            Some(ExitCode::from(STARTED_INCORRECTLY))
        }
    }
}

/// Takes descriptor `number` if it is a SEQPACKET socket, one that listens if `listening`.
///
/// # Safety
/// Nothing else in this process may own the descriptor: the process has just started, and calls this once.
pub unsafe fn inherited_socket(number: RawFd, listening: bool) -> Option<OwnedFd> {
    // SAFETY: if the descriptor is closed, these calls return EBADF and the borrow ends.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) };
    let is_sequenced = rustix::net::sockopt::socket_type(inherited) == Ok(rustix::net::SocketType::SEQPACKET);
    let is_listening = rustix::net::sockopt::socket_acceptconn(inherited) == Ok(true);
    if !is_sequenced || (listening && !is_listening) {
        return None;
    }
    // SAFETY: the descriptor is open, and the caller says that nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}
