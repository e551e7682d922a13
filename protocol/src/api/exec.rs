//! Processes that a caller runs in a sandbox's container.

use serde::{Deserialize, Serialize};

use super::problem::Problem;

/// How bytes are represented in a JSON string.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Encoding {
    /// As text.
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    /// RFC 4648 base64, with padding.
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
    /// `NAME=VALUE`, added to the container's environment.
    #[serde(default)]
    pub env: Vec<String>,
    /// Absolute path. The container's if absent.
    #[serde(default)]
    pub workdir: Option<String>,
    /// `USER[:GROUP]`, names or numbers. The container's if absent.
    #[serde(default)]
    pub user: Option<String>,
    /// Run it on a terminal; all its output is then stdout.
    #[serde(default)]
    pub tty: bool,
    /// The terminal's size.
    #[serde(default)]
    pub size: Option<TerminalSize>,
    /// All of its input. Over a WebSocket, input comes in messages instead.
    #[serde(default)]
    pub stdin: Option<String>,
    /// The encoding of `stdin`.
    #[serde(default)]
    pub encoding: Encoding,
    /// Answer with ExecEvents as they happen, one per line.
    #[serde(default)]
    pub stream: bool,
    /// Let it outlive this request: answer with its id as soon as it runs. The guest keeps the last 256 KiB of its output. Its input stays
    /// open unless `stdin` is given, of at most 64 KiB.
    #[serde(default)]
    pub keep: bool,
}

/// A process that a caller started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeptProcess {
    pub id: String,
    /// The program and its arguments, at most 1 KiB of them.
    pub command: Vec<String>,
    /// In the container's PID namespace. Absent if it has ended.
    pub pid: Option<i32>,
    /// It outlives its caller, and its output is kept.
    pub keep: bool,
    /// Its exit code, or 128 plus the number of the signal that ended it. Absent while it runs.
    pub exit_code: Option<i32>,
}

/// The processes that callers started in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProcessList {
    pub items: Vec<KeptProcess>,
}

/// Input of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ProcessInput {
    /// The process's id.
    pub process: String,
    #[serde(default)]
    pub data: Option<String>,
    /// The encoding of `data`.
    #[serde(default)]
    pub encoding: Encoding,
    /// Close its input afterwards.
    #[serde(default)]
    pub eof: bool,
}

/// A signal for a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ProcessSignal {
    /// The process's id.
    pub process: String,
    /// Its number, 1 to 64.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 64))]
    pub signal: u8,
}

/// A terminal's size; both are at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    pub rows: u16,
    pub columns: u16,
}

/// The result of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecResult {
    /// Its exit code, or 128 plus the number of the signal that ended it.
    pub exit_code: i32,
    pub stdout: String,
    pub stderr: String,
    /// The encoding of both: `base64` if either is not UTF-8.
    pub encoding: Encoding,
    /// The output exceeded the limit: only the first 256 KiB of each stream are included.
    pub truncated: bool,
}

/// An event of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum ExecEvent {
    /// Output to stdout.
    Stdout(Piece),
    /// Output to stderr.
    Stderr(Piece),
    /// The process ended. The last event.
    Exit(Exit),
    /// The process did not start, or its result is unknown. The last event.
    Error(Problem),
}

/// A piece of a process's output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Piece {
    pub data: String,
    /// The encoding of `data`: `base64` if it is not UTF-8.
    pub encoding: Encoding,
    /// Of a process with `keep`: bytes of output before this piece, stdout and stderr together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Exit {
    /// Its exit code, or 128 plus the number of the signal that ended it.
    pub exit_code: i32,
}

/// A text message from the caller to a process over a WebSocket.
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
    /// End of input.
    Eof,
    /// Send it this signal, by number.
    Signal(u8),
}

/// A signal for the process of a sandbox's container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SignalContainer {
    /// The number of the signal, as Linux numbers it on x86-64.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 64))]
    pub signal: u8,
}

/// First byte of a binary message with output to stdout.
pub const STDOUT_CHANNEL: u8 = 1;
/// First byte of a binary message with output to stderr.
pub const STDERR_CHANNEL: u8 = 2;
