//! Files of a sandbox's container.

use serde::{Deserialize, Serialize};

use super::exec::Encoding;
use super::problem::Problem;

/// Most entries in one page of a directory.
pub const FILES_PAGE: u16 = 1000;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Link,
    CharacterDevice,
    BlockDevice,
    Fifo,
    Socket,
    /// Something that this version does not know.
    Unknown,
}

/// A file of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileInfo {
    /// The last part of its path.
    pub name: String,
    pub kind: FileKind,
    /// Permission bits, in octal.
    pub mode: String,
    /// Bytes.
    pub size: u64,
    pub uid: u32,
    pub gid: u32,
    /// Time of the last change of its contents: seconds since 1970, and nanoseconds.
    pub modified_s: i64,
    pub modified_ns: u32,
    /// Where a link leads.
    pub target: Option<String>,
    /// The encoding of `name` and `target`: `base64` if either is not UTF-8.
    pub encoding: Encoding,
}

/// A page of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileList {
    /// In the order of their names' bytes.
    pub items: Vec<FileInfo>,
    /// Returns the next page as the parameter `continue`. Absent on the last page.
    pub continue_token: Option<String>,
}

/// A directory to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MakeDirectory {
    /// Absolute path in the container, without `..`.
    #[cfg_attr(feature = "openapi", schema(max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub path: String,
    /// Permission bits, in octal [default: 0755].
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(pattern = "^[0-7]{1,4}$"))]
    pub mode: Option<String>,
    /// Make missing directories above it too, and accept one that exists.
    #[serde(default)]
    pub parents: bool,
}

/// A file or directory to move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveFile {
    /// Absolute path in the container, without `..`.
    #[cfg_attr(feature = "openapi", schema(max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub from: String,
    /// Its new path, in a directory that exists on the same file system.
    #[cfg_attr(feature = "openapi", schema(max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub to: String,
    /// Replace a file that is there.
    #[serde(default)]
    pub replace: bool,
}

/// An event of a watched directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum FileEvent {
    /// A file was made in the directory, or moved into it.
    Create(ChangedFile),
    /// A file was written or truncated.
    Write(ChangedFile),
    /// A file was removed.
    Remove(ChangedFile),
    /// A file has this name no more. Its new name, if it is in a watched directory, is a `CREATE` of its own.
    Rename(ChangedFile),
    /// The mode, owner, times or extended attributes of a file changed.
    Chmod(ChangedFile),
    /// Events were lost here: list the directory again.
    Overflow,
    /// Nothing has happened for 30 s.
    Keepalive,
    /// The watch is over. The last event.
    End(WatchEnd),
    /// The watch failed. The last event.
    Error(Problem),
}

/// A file of a watched directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChangedFile {
    /// Its path, relative to the watched directory. `.` is the directory itself.
    pub name: String,
    /// The encoding of `name`: `base64` if it is not UTF-8.
    pub encoding: Encoding,
}

/// The end of a watch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WatchEnd {
    /// Why it is over: the directory was removed or moved, or the container has ended.
    pub reason: String,
}
