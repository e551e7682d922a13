//! Cutting files into chunks.
//!
//! Cuts are on pages only. A chunk is then whole pages of a data file in every image that refers to it: one piece of page cache to which an
//! EROFS block map can point and which DAX can map. The cost: data that is shifted by less than a page shares nothing.
//!
//! Invariant: where a run of file data is cut depends only on its bytes (and, for fixed chunks, on its place in the
//! file), never on where it is stored, so that other images cut the same file alike.

use std::fmt;
use std::str::FromStr;

use crate::accelerated::table::MAX_CHUNK;
use crate::accelerated::wire::PAGE;

/// How files are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunking {
    /// At multiples of `size` in the file: a power of two.
    Fixed { size: u64 },
    /// After a page whose hash matches. No chunk except a file's last is shorter than `min`, and none is longer than `max`. All sizes are
    /// powers of two.
    ContentDefined { min: u64, average: u64, max: u64 },
}

/// 256 KiB: a frame's worth.
const FIXED: u64 = 256 << 10;
const CONTENT_DEFINED: (u64, u64, u64) = (64 << 10, 256 << 10, 1 << 20);

impl Default for Chunking {
    fn default() -> Self {
        Self::Fixed { size: FIXED }
    }
}

/// Why a text is not a valid chunking.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no chunking: use fixed, fixed:SIZE, cdc or cdc:MIN:AVERAGE:MAX, with sizes that are powers of two from 4K to 4M in ascending order"
)]
pub struct ChunkingError(String);

impl Chunking {
    /// Whether the sizes are valid.
    fn is_sound(&self) -> bool {
        let is_size = |size: u64| size.is_power_of_two() && (PAGE..=MAX_CHUNK).contains(&size);
        match *self {
            Self::Fixed { size } => is_size(size),
            Self::ContentDefined { min, average, max } => {
                is_size(min) && is_size(average) && is_size(max) && min < average && average < max
            }
        }
    }

    /// Longest chunk.
    pub fn max(&self) -> u64 {
        match *self {
            Self::Fixed { size } => size,
            Self::ContentDefined { max, .. } => max,
        }
    }

    /// Length of the chunk with which `pages`, at `file_offset` of a file, begin. `pages` are whole pages, at least one, and
    /// [`Chunking::max`] bytes unless the file ends before.
    pub fn cut(&self, pages: &[u8], file_offset: u64) -> usize {
        match *self {
            Self::Fixed { size } => pages.len().min((size - file_offset % size) as usize),
            Self::ContentDefined { min, average, max } => content_defined(pages, min, average, max),
        }
    }
}

/// Follows FastCDC's normalised chunking, on pages: before the average length, a cut requires one more zero bit in the hash than the
/// average demands, after it one less. Each page is judged alone. Two files with the same run of pages therefore agree on the cuts in it
/// from the first cut that they share.
fn content_defined(pages: &[u8], min: u64, average: u64, max: u64) -> usize {
    let bits = (average / PAGE).trailing_zeros();
    let mut length = 0;
    for page in pages.chunks(PAGE as usize) {
        length += page.len();
        if length as u64 >= max {
            break;
        }
        if (length as u64) < min {
            continue;
        }
        let wanted = if (length as u64) < average {
            bits + 1
        } else {
            bits.saturating_sub(1)
        };
        if page_hash(page).leading_zeros() >= wanted {
            break;
        }
    }
    length
}

/// A page's 64-bit hash: its little-endian words folded by rotation, exclusive or and multiplication. The high bits are the well-mixed
/// ones.
fn page_hash(page: &[u8]) -> u64 {
    const MULTIPLIER: u64 = 0x517c_c1b7_2722_0a95;
    let (words, _) = page.as_chunks::<8>();
    words.iter().fold(0u64, |hash, word| {
        (hash.rotate_left(5) ^ u64::from_le_bytes(*word)).wrapping_mul(MULTIPLIER)
    })
}

impl fmt::Display for Chunking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed { size } => write!(f, "fixed:{size}"),
            Self::ContentDefined { min, average, max } => write!(f, "cdc:{min}:{average}:{max}"),
        }
    }
}

impl FromStr for Chunking {
    type Err = ChunkingError;

    fn from_str(text: &str) -> Result<Self, ChunkingError> {
        let size = |text: &str| -> Option<u64> {
            let (digits, unit) = match text.as_bytes().last()? {
                b'K' | b'k' => (&text[..text.len() - 1], 10),
                b'M' | b'm' => (&text[..text.len() - 1], 20),
                _ => (text, 0),
            };
            digits.parse::<u64>().ok()?.checked_mul(1 << unit)
        };
        let parts: Vec<&str> = text.split(':').collect();
        let chunking = match parts[..] {
            ["fixed"] => Some(Self::default()),
            ["fixed", one] => size(one).map(|size| Self::Fixed { size }),
            ["cdc"] => {
                let (min, average, max) = CONTENT_DEFINED;
                Some(Self::ContentDefined { min, average, max })
            }
            ["cdc", min, average, max] => size(min)
                .zip(size(average))
                .zip(size(max))
                .map(|((min, average), max)| Self::ContentDefined { min, average, max }),
            _ => None,
        };
        chunking
            .filter(Self::is_sound)
            .ok_or_else(|| ChunkingError(text.chars().take(200).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(pages: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        (0..pages * PAGE as usize / 8).flat_map(|_| next()).collect()
    }

    fn cuts(chunking: Chunking, data: &[u8]) -> Vec<usize> {
        let mut at = 0;
        let mut cuts = Vec::new();
        while at < data.len() {
            let window = &data[at..data.len().min(at + chunking.max() as usize)];
            at += chunking.cut(window, at as u64);
            cuts.push(at);
        }
        cuts
    }

    #[test]
    fn text_and_back() {
        for text in ["fixed:4096", "fixed:4194304", "cdc:4096:8192:16384"] {
            assert_eq!(text.parse::<Chunking>().unwrap().to_string(), text);
        }
        assert_eq!("fixed".parse::<Chunking>().unwrap().to_string(), "fixed:262144");
        assert_eq!("cdc:64K:256k:1M".parse::<Chunking>(), "cdc".parse::<Chunking>());
        for bad in [
            "",
            "fixed:",
            "fixed:3K",
            "fixed:2K",
            "fixed:8M",
            "cdc:1M:256K:64K",
            "cdc:4K:4K:8K",
            "rabin",
            "fixed:99999999999999999999M",
            "fixed:18014398509481984K",
        ] {
            assert!(bad.parse::<Chunking>().is_err(), "{bad}");
        }
    }

    #[test]
    fn fixed_chunks_keep_to_the_files_grid() {
        let chunking = Chunking::Fixed { size: 16 << 10 };
        let data = noise(10, 1);
        assert_eq!(cuts(chunking, &data), [4 << 12, 8 << 12, 10 << 12]);
        // A piece after a hole that ends off the grid.
        assert_eq!(chunking.cut(&data[..16 << 10], 4096), 12 << 10);
    }

    #[test]
    fn content_defined_chunks_keep_to_their_bounds_and_average() {
        let chunking: Chunking = "cdc".parse().unwrap();
        let data = noise(32 << 10, 7);
        let cuts = cuts(chunking, &data);
        let lengths: Vec<usize> = cuts
            .iter()
            .scan(0, |last, cut| {
                let length = cut - *last;
                *last = *cut;
                Some(length)
            })
            .collect();
        let (_, all_but_last) = lengths.split_last().unwrap();
        assert!(
            all_but_last
                .iter()
                .all(|length| (64 << 10..=1 << 20).contains(length))
        );
        let average = data.len() / lengths.len();
        assert!((128 << 10..512 << 10).contains(&average), "{average}");
    }

    #[test]
    fn cuts_find_each_other_again_after_an_insertion() {
        let chunking: Chunking = "cdc:16K:64K:256K".parse().unwrap();
        let data = noise(8 << 10, 3);
        let mut longer = data.clone();
        let page = noise(1, 9);
        longer.splice(100 * 4096..100 * 4096, page.iter().copied());
        let one: Vec<usize> = cuts(chunking, &data).iter().map(|cut| data.len() - cut).collect();
        let other: Vec<usize> = cuts(chunking, &longer)
            .iter()
            .map(|cut| longer.len() - cut)
            .collect();
        let shared = one.iter().filter(|cut| other.contains(cut)).count();
        assert!(shared + 12 > one.len(), "{shared} of {}", one.len());
    }
}
