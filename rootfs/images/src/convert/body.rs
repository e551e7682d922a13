//! Where the bytes of a part of a converted image are.

use std::fs::File;

/// Content of a part.
pub enum Body {
    Bytes(Vec<u8>),
    File(File),
    /// A blob of the dictionary with this index.
    Dictionary(usize),
}
