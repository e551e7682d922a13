//! The places of the bytes of a converted image's parts.

use std::fs::File;

/// Content of a part.
pub enum Body {
    Bytes(Vec<u8>),
    File(File),
    /// A blob of the dictionary with this index.
    Dictionary(usize),
}
