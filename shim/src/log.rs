//! Log lines, written to the fifo from which containerd copies them into its own log. Logging never blocks: a
//! line is dropped if the fifo is full.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::OnceLock;

static FIFO: OnceLock<File> = OnceLock::new();

/// A line's level, in containerd's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Info,
    Warning,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Info => "info",
            Level::Warning => "warning",
        }
    }
}

/// Writes lines to the bundle's fifo from now on. Without one they go to stderr.
pub fn to_fifo(bundle: &Path) {
    // Open for reading too: then opening does not wait for a reader, and writing never fails with EPIPE.
    let opened = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(bundle.join("log"));
    if let Ok(fifo) = opened {
        let _ = FIFO.set(fifo);
    }
}

/// Writes one line.
pub fn line(level: Level, text: fmt::Arguments<'_>) {
    let line = format!(
        "level={} msg={:?} runtime=io.containerd.thaw.v2\n",
        level.name(),
        text.to_string()
    );
    match FIFO.get() {
        Some(mut fifo) => drop(fifo.write(line.as_bytes())),
        None => drop(std::io::stderr().write_all(line.as_bytes())),
    }
}

/// Logs at info level.
#[macro_export]
macro_rules! info {
    ($($t:tt)*) => { $crate::log::line($crate::log::Level::Info, format_args!($($t)*)) };
}

/// Logs at warning level.
#[macro_export]
macro_rules! warning {
    ($($t:tt)*) => { $crate::log::line($crate::log::Level::Warning, format_args!($($t)*)) };
}
