//! Reads sparse files chunk by chunk, on all cores.
//!
//! Invariants: holes are never read. A chunk of zeros is the same chunk whether or not it is a hole. If several chunks fail, the
//! error of the lowest one is returned.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::hash::Hash;
use super::manifest::{CHUNK, ChunkedFile, WholeFile};

/// Maximum number of threads that read and hash: more would only wait for the page cache.
const MOST_THREADS: usize = 4;
/// Granularity at which zeros are detected.
const PAGE: usize = 4096;

/// The result of one thread: results by chunk number, or the error of a chunk.
type Part<T, E> = Result<Vec<(u64, T)>, (u64, E)>;

/// Calls `each` on several threads with the number and the bytes of every chunk in the first `bytes` bytes of `file`; with `None` if all
/// bytes of the chunk are zero. Returns the results of `each` that are not `None`, by chunk number. Beyond the file's end are zeros: the
/// caller checks the length.
pub(super) fn scan<T: Send, E: From<io::Error> + Send>(
    file: &File,
    bytes: u64,
    each: impl Fn(u64, Option<&[u8]>) -> Result<Option<T>, E> + Sync,
) -> Result<Vec<(u64, T)>, E> {
    let count = bytes.div_ceil(CHUNK);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = cores.min(MOST_THREADS).min(count as usize).max(1);
    let (next, stop) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
    let work = || {
        let mut buffer = Vec::new();
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count || number >= stop.load(Ordering::Relaxed) {
                return Ok(done);
            }
            let start = number * CHUNK;
            let result = read_part(file, start..(start + CHUNK).min(bytes), &mut buffer)
                .map_err(E::from)
                .and_then(|any| each(number, any.then_some(&buffer[..])));
            match result {
                Ok(Some(value)) => done.push((number, value)),
                Ok(None) => {}
                Err(e) => {
                    // Chunks are taken in order: every lower one is done or in progress.
                    stop.fetch_min(number, Ordering::Relaxed);
                    return Err((number, e));
                }
            }
        }
    };
    let results: Vec<Part<T, E>> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let joined = others.into_iter().map(|t| {
            let gone = |_| Err((u64::MAX, E::from(io::Error::other("a hashing thread panicked"))));
            t.join().unwrap_or_else(gone)
        });
        std::iter::once(own).chain(joined).collect()
    });
    let mut all = Vec::new();
    let mut first_error: Option<(u64, E)> = None;
    for result in results {
        match result {
            Ok(part) => all.extend(part),
            Err((number, e)) if first_error.as_ref().is_none_or(|(first, _)| number < *first) => {
                first_error = Some((number, e));
            }
            Err(_) => {}
        }
    }
    match first_error {
        Some((_, e)) => Err(e),
        None => {
            all.sort_by_key(|(number, _)| *number);
            Ok(all)
        }
    }
}

/// Reads a part of a file into `buffer`. Returns whether it has a non-zero byte. Holes are not read.
pub(super) fn read_part(file: &File, part: Range<u64>, buffer: &mut Vec<u8>) -> io::Result<bool> {
    let Range { start, end } = part;
    let mut at = start;
    let mut cleared = false;
    while let Some((from, to)) = data_range(file, at, end)? {
        if !cleared {
            buffer.clear();
            buffer.resize((end - start) as usize, 0);
            cleared = true;
        }
        file.read_exact_at(&mut buffer[(from - start) as usize..(to - start) as usize], from)?;
        at = to;
    }
    Ok(cleared && !is_zero(buffer))
}

/// The first range of data between `at` and `end`. `at` may be beyond the end.
pub(super) fn data_range(file: &File, at: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= end {
        return Ok(None);
    }
    let from = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(from) => from,
        Err(Errno::NXIO) => return Ok(None),
        // The filesystem does not support holes: everything is data.
        Err(Errno::INVAL) => return Ok(Some((at, end))),
        Err(e) => return Err(e.into()),
    };
    if from >= end {
        return Ok(None);
    }
    let to = rustix::fs::seek(file, SeekFrom::Hole(from))?.min(end);
    Ok(Some((from, to)))
}

/// Whether all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; PAGE] = [0; PAGE];
    bytes.chunks(PAGE).all(|page| page == &ZEROS[..page.len()])
}

/// The ranges of pages with a non-zero byte.
pub(super) fn data_pages(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (number, page) in bytes.chunks(PAGE).enumerate() {
        if is_zero(page) {
            continue;
        }
        let start = number * PAGE;
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end += page.len(),
            _ => ranges.push(start..start + page.len()),
        }
    }
    ranges
}

/// Hashes a sparse file.
pub fn hash_chunks(file: &File) -> io::Result<ChunkedFile> {
    let bytes = file.metadata()?.len();
    let hashes = scan(file, bytes, |_, data| Ok::<_, io::Error>(data.map(Hash::of)))?;
    Ok(ChunkedFile::from_hashes(bytes, data_bytes(file, bytes)?, hashes))
}

fn data_bytes(file: &File, bytes: u64) -> io::Result<u64> {
    let (mut at, mut sum) = (0, 0);
    while let Some((from, to)) = data_range(file, at, bytes)? {
        sum += to - from;
        at = to;
    }
    Ok(sum)
}

/// Hashes a whole file from its start, whatever the descriptor's offset.
pub fn hash_whole(file: &File) -> io::Result<WholeFile> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        match file.read_at(&mut buffer, bytes) {
            Ok(0) => break,
            Ok(n) => {
                hasher.update(&buffer[..n]);
                bytes += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(WholeFile {
        bytes,
        blake3: hasher.finalize().into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sparse() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(5 * CHUNK + 100).unwrap();
        file.write_all_at(b"first", 0).unwrap();
        file.write_all_at(b"third", 2 * CHUNK + 4096).unwrap();
        file.write_all_at(b"last", 5 * CHUNK + 96).unwrap();
        file
    }

    #[test]
    fn a_hash_is_of_contents_not_of_holes() {
        let (sparse, dense) = (sparse(), tempfile::tempfile().unwrap());
        let mut bytes = vec![0; (5 * CHUNK + 100) as usize];
        sparse.read_exact_at(&mut bytes, 0).unwrap();
        dense.write_all_at(&bytes, 0).unwrap();
        let (a, b) = (hash_chunks(&sparse).unwrap(), hash_chunks(&dense).unwrap());
        assert_eq!((a.bytes, &a.chunks), (b.bytes, &b.chunks));
        assert!(a.data_bytes < b.data_bytes);
        let firsts: Vec<_> = a.chunks.iter().map(|r| (r.first, r.blake3.len())).collect();
        assert_eq!(firsts, [(0, 1), (2, 1), (5, 1)]);
        assert_eq!(
            a.chunks[1].blake3[0],
            Hash::of(&bytes[2 * CHUNK as usize..3 * CHUNK as usize])
        );
        assert_eq!(a.chunks[2].blake3[0], Hash::of(&bytes[5 * CHUNK as usize..]));
    }

    #[test]
    fn the_error_told_is_the_first_in_the_file() {
        let file = sparse();
        for _ in 0..20 {
            let error = scan(&file, 5 * CHUNK, |number, _| match number {
                1.. => Err(io::Error::other(number.to_string())),
                0 => Ok(Some(())),
            });
            assert_eq!(error.unwrap_err().to_string(), "1");
        }
    }

    #[test]
    fn beyond_a_files_end_is_no_data() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        assert_eq!(hash_chunks(&file).unwrap().bytes, 4096);
        let seen = scan(&file, 2 * CHUNK, |n, d| Ok::<_, io::Error>(d.map(|_| n))).unwrap();
        assert_eq!(seen, [(0, 0)]);
    }

    #[test]
    fn pages_of_data_are_found() {
        let mut bytes = vec![0; 5 * PAGE + 10];
        bytes[PAGE] = 1;
        bytes[3 * PAGE - 1] = 1;
        bytes[5 * PAGE + 9] = 1;
        assert_eq!(data_pages(&bytes), [PAGE..3 * PAGE, 5 * PAGE..5 * PAGE + 10]);
    }
}
