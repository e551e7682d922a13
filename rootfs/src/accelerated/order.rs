//! The load order: which parts of the data files a start reads, in order.

use crate::error::Error;

use super::LoadRange;
use super::wire::{Cursor, PAGE, Put};

const MAGIC: &[u8; 8] = b"THAWLOAD";
const VERSION: u32 = 1;
const RANGE: usize = 12;

/// Largest document: a million ranges.
pub const MAX_DOCUMENT: u64 = 16 + (RANGE as u64) * (1 << 20);

/// The document. Ranges are of whole pages.
pub fn encode(ranges: &[LoadRange]) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + ranges.len() * RANGE);
    out.extend_from_slice(MAGIC);
    out.put_u32(VERSION);
    out.put_u32(ranges.len() as u32);
    for range in ranges {
        out.put_u32(range.blob);
        out.put_u32((range.offset / PAGE) as u32);
        out.put_u32((range.length / PAGE) as u32);
    }
    out
}

/// Reads a document; `blobs` are the lengths of the data files.
///
/// # Errors
/// `Malformed`, also for a range that leaves its data file.
pub fn decode(what: &str, bytes: &[u8], blobs: &[u64]) -> Result<Vec<LoadRange>, Error> {
    let mut cursor = Cursor::new(what, bytes);
    cursor.head(MAGIC, VERSION)?;
    let count = cursor.u32()?;
    let count = cursor.count(count, RANGE)?;
    let mut ranges = Vec::with_capacity(count);
    for _ in 0..count {
        let blob = cursor.u32()?;
        let (offset, length) = (u64::from(cursor.u32()?) * PAGE, u64::from(cursor.u32()?) * PAGE);
        let fits = blobs
            .get(blob as usize)
            .is_some_and(|available| length > 0 && offset + length <= *available);
        if !fits {
            return Err(cursor.malformed("a range is empty or leaves its blob"));
        }
        ranges.push(LoadRange { blob, offset, length });
    }
    match cursor.rest().is_empty() {
        true => Ok(ranges),
        false => Err(cursor.malformed("it goes on after its last range")),
    }
}
