//! Sparse files in tar: fragments of data at offsets of the file, zeros between and after them.

use std::io::Read;

use super::LayerError;
use super::decimal::decimal;
use super::stream::{BLOCK, TarStream};

/// A piece of a file whose bytes are in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    pub offset: u64,
    pub length: u64,
}

/// Checks that fragments ascend, do not overlap, lie in the file and have exactly the bytes of the stream.
pub fn check(fragments: &[Fragment], size: u64, stored: u64) -> Result<(), &'static str> {
    let mut end = 0u64;
    let mut total = 0u64;
    for fragment in fragments {
        if fragment.offset < end {
            return Err("fragments of a sparse file overlap or are out of order");
        }
        end = fragment
            .offset
            .checked_add(fragment.length)
            .ok_or("a fragment of a sparse file ends beyond 2^64")?;
        // Cannot overflow: the fragments do not overlap, so their sum is at most `end`.
        total += fragment.length;
    }
    if end > size {
        return Err("a fragment of a sparse file lies behind its end");
    }
    if total != stored {
        return Err("the fragments of a sparse file are not as long as its data");
    }
    Ok(())
}

/// The map before the data of a PAX 1.0 sparse file: decimal numbers on separate lines, first the number of fragments, then offset and
/// length of each, padded to a block. Also returns its number of bytes.
pub fn read_map<R: Read>(
    stream: &mut TarStream<R>,
    limit: u64,
    offset: u64,
    name: &[u8],
) -> Result<(Vec<Fragment>, u64), LayerError> {
    let bad = |why| LayerError::bad_header(offset, name, why);
    let mut fragments: Vec<Fragment> = Vec::new();
    let mut count = None;
    let mut pending_offset = None;
    let mut line = Vec::new();
    let mut bytes = 0;
    loop {
        bytes += BLOCK as u64;
        if bytes > limit {
            return Err(bad("a sparse map is longer than the file's data or the limit"));
        }
        for byte in stream.block("a sparse map")? {
            if count == Some(fragments.len() as u64) {
                break;
            }
            if byte != b'\n' {
                if line.len() == 20 {
                    return Err(bad("a sparse map entry is not a number"));
                }
                line.push(byte);
                continue;
            }
            let value = decimal(&line).ok_or(bad("a sparse map entry is not a number"))?;
            line.clear();
            match (count, pending_offset.take()) {
                (None, _) => count = Some(value),
                (Some(_), None) => pending_offset = Some(value),
                (Some(_), Some(offset)) => fragments.push(Fragment {
                    offset,
                    length: value,
                }),
            }
        }
        if count == Some(fragments.len() as u64) {
            return Ok((fragments, bytes));
        }
    }
}
