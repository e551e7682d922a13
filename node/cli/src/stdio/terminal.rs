//! The caller's terminal in raw mode, always restored.
//!
//! Invariant: once [`RawTerminal::enter`] has changed the terminal, dropping it, a panic, or [`restore`] before an exit
//! puts it back; only an uncatchable signal can leave it raw.

use std::io;
use std::sync::{Mutex, Once};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use thaw_sys::lock::Lock;

/// The earlier settings of the terminal, while it is raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);
static PANIC_HOOK: Once = Once::new();

/// The terminal on stdin in raw mode.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Puts the terminal on stdin into raw mode.
    pub fn enter() -> io::Result<RawTerminal> {
        PANIC_HOOK.call_once(|| {
            let previous = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore();
                previous(info);
            }));
        });
        let before = tcgetattr(rustix::stdio::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        *BEFORE.locked() = Some(before);
        if let Err(e) = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &raw) {
            restore();
            return Err(e.into());
        }
        Ok(RawTerminal(()))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal, if it is raw.
pub fn restore() {
    // Without waiting: a panic while the lock is held must not hang.
    let before = match BEFORE.try_lock() {
        Ok(mut before) => before.take(),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
        Err(std::sync::TryLockError::WouldBlock) => None,
    };
    if let Some(before) = before {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &before);
    }
}

/// Rows and columns of the terminal on stdin or stdout, if either is one.
pub fn size() -> Option<(u16, u16)> {
    let size = tcgetwinsize(rustix::stdio::stdin())
        .or_else(|_| tcgetwinsize(rustix::stdio::stdout()))
        .ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Whether stdin is a terminal.
pub fn stdin_is_terminal() -> bool {
    rustix::termios::isatty(rustix::stdio::stdin())
}
