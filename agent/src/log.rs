//! Log lines. They are written to the kernel's log, so that they are in order with the kernel's own on the
//! console, or to stderr where there is no /dev/kmsg (tests).

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;

static KMSG: OnceLock<File> = OnceLock::new();

/// The kernel's log levels (include/linux/kern_levels.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Error = 3,
    Warning = 4,
    Info = 6,
    Debug = 7,
}

/// Writes lines to the kernel's log from now on instead of stderr.
pub fn to_kernel() {
    // Otherwise the kernel drops lines when the agent logs many.
    let _ = std::fs::write("/proc/sys/kernel/printk_devkmsg", "on");
    if let Ok(file) = File::options().write(true).open("/dev/kmsg") {
        let _ = KMSG.set(file);
    }
}

/// The kernel log's descriptor, which a forked child keeps open when it closes others.
pub fn descriptor() -> Option<RawFd> {
    KMSG.get().map(AsRawFd::as_raw_fd)
}

/// Writes one line. Errors are ignored.
pub fn line(level: Level, text: fmt::Arguments<'_>) {
    match KMSG.get() {
        // One write is one record (Documentation/ABI/testing/dev-kmsg).
        Some(mut kmsg) => drop(kmsg.write_all(format!("<{}>thaw-agent: {text}\n", level as u8).as_bytes())),
        None => drop(writeln!(std::io::stderr(), "thaw-agent: {text}")),
    }
}

/// Logs at info level.
#[macro_export]
macro_rules! info {
    ($($t:tt)*) => { $crate::log::line($crate::log::Level::Info, format_args!($($t)*)) };
}

/// Logs at debug level.
#[macro_export]
macro_rules! debug {
    ($($t:tt)*) => { $crate::log::line($crate::log::Level::Debug, format_args!($($t)*)) };
}

/// Logs at warning level.
#[macro_export]
macro_rules! warning {
    ($($t:tt)*) => { $crate::log::line($crate::log::Level::Warning, format_args!($($t)*)) };
}

/// Logs at error level.
#[macro_export]
macro_rules! error {
    ($($t:tt)*) => { $crate::log::line($crate::log::Level::Error, format_args!($($t)*)) };
}
