//! Processes run in a sandbox's container.

use serde::{Deserialize, Serialize};

use super::problem::Problem;

/// How bytes are written in a text of JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Encoding {
    /// As they are.
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    /// RFC 4648, with padding.
    #[serde(rename = "base64")]
    Base64,
}

/// A process to run in a sandbox's container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ExecProcess {
    /// The program and its arguments.
    #[cfg_attr(feature = "openapi", schema(min_items = 1))]
    pub command: Vec<String>,
    /// `NAME=VALUE`, over the container's.
    #[serde(default)]
    pub env: Vec<String>,
    /// Absolute. None: the container's.
    #[serde(default)]
    pub workdir: Option<String>,
    /// `USER[:GROUP]`, names or numbers. None: the container's.
    #[serde(default)]
    pub user: Option<String>,
    /// Give it a terminal: what it writes is all stdout.
    #[serde(default)]
    pub tty: bool,
    /// The terminal's.
    #[serde(default)]
    pub size: Option<TerminalSize>,
    /// All it is to read; over a WebSocket its input comes in messages instead.
    #[serde(default)]
    pub stdin: Option<String>,
    /// How `stdin` is written.
    #[serde(default)]
    pub encoding: Encoding,
    /// Answer with one ExecEvent a line, as they happen.
    #[serde(default)]
    pub stream: bool,
}

/// A terminal's size, each at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    pub rows: u16,
    pub columns: u16,
}

/// What a process came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecResult {
    /// Its exit code, or 128 and the number of the signal that ended it.
    pub exit_code: i32,
    pub stdout: String,
    pub stderr: String,
    /// How both are written: `base64` where one is not UTF-8.
    pub encoding: Encoding,
    /// It wrote more than this holds: the first 256 KiB of each are here.
    pub truncated: bool,
}

/// What happens to a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum ExecEvent {
    /// It wrote this.
    Stdout(Piece),
    /// It wrote this.
    Stderr(Piece),
    /// It ended; the last.
    Exit(Exit),
    /// It was not started, or what became of it is not known; the last.
    Error(Problem),
}

/// Some of what a process wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Piece {
    pub data: String,
    /// How `data` is written: `base64` where it is not UTF-8.
    pub encoding: Encoding,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Exit {
    /// Its exit code, or 128 and the number of the signal that ended it.
    pub exit_code: i32,
}

/// A message of text to a process that is attended over a WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(
    tag = "type",
    content = "object",
    rename_all = "UPPERCASE",
    deny_unknown_fields
)]
pub enum ExecInput {
    /// The terminal's size changed.
    Resize(TerminalSize),
    /// There is no more input.
    Eof,
    /// Send it this signal, by number.
    Signal(u8),
}

/// The first byte of a binary message with what the process wrote to stdout.
pub const STDOUT_CHANNEL: u8 = 1;
/// The same of stderr.
pub const STDERR_CHANNEL: u8 = 2;
