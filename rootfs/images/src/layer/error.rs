//! Why a layer was refused, and at which offset of its stream.

use std::io;

/// Why a layer was refused. Offsets count bytes of the uncompressed stream to the entry's header.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("the layer is truncated: it ends at byte {offset} within {what}; fetch it again")]
    TruncatedLayer { offset: u64, what: &'static str },
    #[error("the layer has an unsafe path \"{path}\" at byte {offset} ({why}): do not use this image")]
    UnsafePath {
        offset: u64,
        path: String,
        why: &'static str,
    },
    #[error(
        "the layer's entry \"{path}\" at byte {offset} is a hard link out of the tree, to \"{target}\": do not use this image"
    )]
    UnsafeHardLink {
        offset: u64,
        path: String,
        target: String,
    },
    #[error("the layer is not a tar archive or is damaged: the header at byte {offset} has a wrong checksum")]
    BadChecksum { offset: u64 },
    #[error("the layer's entry \"{entry}\" at byte {offset} is malformed: {why}")]
    BadHeader {
        offset: u64,
        entry: String,
        why: &'static str,
    },
    #[error(
        "the layer's entry \"{entry}\" at byte {offset} is of a type that is not supported: '{type_flag}'"
    )]
    UnsupportedType {
        offset: u64,
        entry: String,
        type_flag: String,
    },
    #[error("the layer has more than {limit} {what}, seen at byte {offset}: raise the limit if you trust it")]
    LimitExceeded {
        offset: u64,
        what: &'static str,
        limit: u64,
    },
    #[error("the layer cannot be read at byte {offset}: {source}")]
    Read { offset: u64, source: io::Error },
    #[error("the layer's file data cannot be stored: {0}")]
    Store(#[source] io::Error),
}

fn printable(name: &[u8]) -> String {
    // Long enough to find the entry by, too short to fill a log.
    const SHOWN: usize = 512;
    match name.len() {
        0..=SHOWN => name.escape_ascii().to_string(),
        _ => format!("{}…", name[..SHOWN].escape_ascii()),
    }
}

impl LayerError {
    pub(super) fn truncated(offset: u64, what: &'static str) -> LayerError {
        LayerError::TruncatedLayer { offset, what }
    }

    pub(super) fn unsafe_path(offset: u64, path: &[u8], why: &'static str) -> LayerError {
        LayerError::UnsafePath {
            offset,
            path: printable(path),
            why,
        }
    }

    pub(super) fn unsafe_hard_link(offset: u64, path: &[u8], target: &[u8]) -> LayerError {
        LayerError::UnsafeHardLink {
            offset,
            path: printable(path),
            target: printable(target),
        }
    }

    pub(crate) fn bad_header(offset: u64, entry: &[u8], why: &'static str) -> LayerError {
        LayerError::BadHeader {
            offset,
            entry: printable(entry),
            why,
        }
    }

    pub(crate) fn unsupported(offset: u64, entry: &[u8], type_flag: u8) -> LayerError {
        LayerError::UnsupportedType {
            offset,
            entry: printable(entry),
            type_flag: type_flag.escape_ascii().to_string(),
        }
    }

    pub(crate) fn limit(offset: u64, what: &'static str, limit: u64) -> LayerError {
        LayerError::LimitExceeded { offset, what, limit }
    }

    /// An error of the stream's source. An unexpected end becomes the layer's truncation error.
    pub(super) fn read(offset: u64, what: &'static str, source: io::Error) -> LayerError {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => LayerError::truncated(offset, what),
            _ => LayerError::Read { offset, source },
        }
    }
}
