//! The data file of a layer: file data appended page by page, without zeros.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};

use thaw_imagefs::blob::BlobWriter;
use thaw_imagefs::tree::PAGE;

use super::LayerError;
use super::tree::Extent;

static ZERO_PAGE: [u8; PAGE as usize] = [0; PAGE as usize];

/// A contiguous run of a data file's bytes that is also contiguous in the stream. The data between pieces is zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where in the data file.
    pub data_offset: u64,
    /// Number of bytes; the last page of a file counts only with the file's bytes.
    pub length: u64,
    /// Where in the stream.
    pub stream_offset: u64,
}

/// Takes the bytes of a layer's data file, first to last, in whole pages.
pub trait DataSink {
    /// Appends bytes.
    ///
    /// # Errors
    /// Those of the storage, for example that it is full.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Appends `length` zeros, which need not be stored.
    ///
    /// # Errors
    /// Those of the storage.
    fn skip(&mut self, length: u64) -> io::Result<()> {
        let mut left = length;
        while left > 0 {
            let now = left.min(PAGE);
            self.append(&ZERO_PAGE[..now as usize])?;
            left -= now;
        }
        Ok(())
    }
}

impl DataSink for BlobWriter {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        io::copy(&mut io::repeat(0).take(length), self).map(drop)
    }
}

impl DataSink for Vec<u8> {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.extend_from_slice(bytes);
        Ok(())
    }
}

/// An empty file that becomes a data file; zeros become holes.
pub struct FileSink {
    file: BufWriter<File>,
    length: u64,
}

impl FileSink {
    /// Writes from the start of `file`, which must be empty.
    pub fn new(file: File) -> FileSink {
        FileSink {
            file: BufWriter::with_capacity(1 << 20, file),
            length: 0,
        }
    }

    /// Writes the buffered bytes and sets the file's length, including holes at its end.
    ///
    /// # Errors
    /// Those of the file system, for example that it is full.
    pub fn finish(self) -> io::Result<File> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.set_len(self.length)?;
        Ok(file)
    }
}

impl DataSink for FileSink {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.length += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        self.length += length;
        // Copying a page is cheaper than seeking over it, which flushes the buffer.
        if length <= PAGE {
            self.file.write_all(&ZERO_PAGE[..length as usize])
        } else {
            self.file.seek(SeekFrom::Start(self.length)).map(drop)
        }
    }
}

/// Why file data could not be copied.
pub enum DataError {
    Store(io::Error),
    TooLong(u64),
}

impl DataError {
    pub fn at(self, offset: u64) -> LayerError {
        match self {
            DataError::Store(error) => LayerError::Store(error),
            DataError::TooLong(limit) => LayerError::limit(offset, "bytes of file data", limit),
        }
    }
}

impl From<io::Error> for DataError {
    fn from(error: io::Error) -> DataError {
        DataError::Store(error)
    }
}

/// Least gap between extents. Smaller stretches of zeros are skipped in the data file and stay part of an extent, so
/// that a file's map stays small.
const LEAST_GRANULE: u64 = 64 << 10;
/// Most granules of a file, which bounds its extents.
const MOST_GRANULES: u64 = 1 << 16;

/// Cuts one file into pages and finds its holes.
///
/// The file is a row of *granules*; one that is all zeros becomes part of a gap, any other is stored whole (its pages of
/// zeros skipped in the sink). A granule's zeros are held back until the first page that is not zero decides.
pub struct FilePages<'a, D> {
    sink: &'a mut D,
    /// End of the data file so far.
    data_end: u64,
    data_limit: u64,
    size: u64,
    granule: u64,
    /// Bytes of the file in `extents`, in a gap, or held back; a multiple of a page.
    done: u64,
    /// Zeros held back since the granule's start.
    held: u64,
    /// Whether the current granule is stored.
    is_stored: bool,
    page: Box<[u8]>,
    /// Bytes of the file in `page`.
    filled: usize,
    extents: Vec<Extent>,
}

impl<'a, D: DataSink> FilePages<'a, D> {
    /// A file of `size` bytes, which will be stored from `data_end` on, the sink's position. The data file may grow to `data_limit`.
    pub fn new(sink: &'a mut D, data_end: u64, size: u64, data_limit: u64) -> FilePages<'a, D> {
        let granule = size
            .div_ceil(MOST_GRANULES)
            .next_power_of_two()
            .max(LEAST_GRANULE);
        FilePages {
            sink,
            data_end,
            data_limit,
            size,
            granule,
            done: 0,
            held: 0,
            is_stored: false,
            page: Box::new([0; PAGE as usize]),
            filled: 0,
            extents: Vec::new(),
        }
    }

    /// The file's next bytes.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), DataError> {
        if self.filled > 0 {
            let (head, rest) = bytes.split_at(bytes.len().min(PAGE as usize - self.filled));
            self.page[self.filled..self.filled + head.len()].copy_from_slice(head);
            self.filled += head.len();
            bytes = rest;
            self.flush_full_page()?;
        }
        let (pages, tail) = bytes.split_at(bytes.len() - bytes.len() % PAGE as usize);
        self.pages(pages)?;
        if !tail.is_empty() {
            self.page[..tail.len()].copy_from_slice(tail);
            self.filled = tail.len();
        }
        Ok(())
    }

    /// Adds zeros up to `offset` of the file, which must not be before the current position.
    pub fn zeros_until(&mut self, offset: u64) -> Result<(), DataError> {
        let mut left = offset - (self.done + self.filled as u64);
        if self.filled > 0 {
            let head = left.min(PAGE - self.filled as u64);
            self.page[self.filled..self.filled + head as usize].fill(0);
            self.filled += head as usize;
            left -= head;
            self.flush_full_page()?;
        }
        if left > 0 {
            let tail = left % PAGE;
            self.zero_pages(left - tail)?;
            self.page[..tail as usize].fill(0);
            self.filled = tail as usize;
        }
        Ok(())
    }

    /// Ends the file: zeros up to its size, then up to a page. Returns its extents and the end of the data file.
    pub fn finish(mut self) -> Result<(Vec<Extent>, u64), DataError> {
        self.zeros_until(self.size)?;
        if self.filled > 0 {
            self.page[self.filled..].fill(0);
            self.filled = PAGE as usize;
            self.flush_full_page()?;
        }
        self.extents.shrink_to_fit();
        Ok((self.extents, self.data_end))
    }

    fn flush_full_page(&mut self) -> Result<(), DataError> {
        if self.filled == PAGE as usize {
            self.filled = 0;
            let page = std::mem::take(&mut self.page);
            let result = self.pages(&page);
            self.page = page;
            result?;
        }
        Ok(())
    }

    /// Bytes left in the current granule.
    fn granule_left(&self) -> u64 {
        self.granule - self.done % self.granule
    }

    /// Adds whole pages of data, in alternating runs of zero and nonzero pages.
    fn pages(&mut self, mut pages: &[u8]) -> Result<(), DataError> {
        let is_zero = |page: &[u8]| page == ZERO_PAGE;
        while !pages.is_empty() {
            let zero_run = pages
                .chunks_exact(PAGE as usize)
                .take_while(|page| is_zero(page))
                .count();
            let (zeros, rest) = pages.split_at(zero_run * PAGE as usize);
            self.zero_pages(zeros.len() as u64)?;
            let data_run = rest
                .chunks_exact(PAGE as usize)
                .take_while(|page| !is_zero(page))
                .count();
            let (data, rest) = rest.split_at(data_run * PAGE as usize);
            self.data_pages(data)?;
            pages = rest;
        }
        Ok(())
    }

    fn data_pages(&mut self, mut pages: &[u8]) -> Result<(), DataError> {
        while !pages.is_empty() {
            let (now, rest) = pages.split_at(pages.len().min(self.granule_left() as usize));
            if !self.is_stored {
                self.begin_granule()?;
            }
            self.grow(now.len() as u64)?;
            self.sink.append(now)?;
            self.advance(now.len() as u64);
            pages = rest;
        }
        Ok(())
    }

    fn zero_pages(&mut self, length: u64) -> Result<(), DataError> {
        let mut left = length;
        while left > 0 {
            let mut now = left.min(self.granule_left());
            if self.is_stored {
                self.grow(now)?;
                self.sink.skip(now)?;
            } else {
                self.held += now;
                // Granules that consist of zeros are skipped in one step.
                if now == self.granule_left() && left - now >= self.granule {
                    now += (left - now) / self.granule * self.granule;
                }
            }
            self.advance(now);
            left -= now;
        }
        Ok(())
    }

    /// The current granule is stored, including the zeros that were held back.
    fn begin_granule(&mut self) -> Result<(), DataError> {
        let file_offset = self.done - self.held;
        let continues = self
            .extents
            .last()
            .is_some_and(|last| last.file_offset + last.length == file_offset);
        if !continues {
            self.extents.push(Extent {
                file_offset,
                data_offset: self.data_end,
                length: 0,
            });
        }
        self.is_stored = true;
        let held = std::mem::take(&mut self.held);
        if held > 0 {
            self.grow(held)?;
            self.sink.skip(held)?;
        }
        Ok(())
    }

    /// Counts bytes about to be stored.
    fn grow(&mut self, length: u64) -> Result<(), DataError> {
        self.data_end += length;
        if self.data_end > self.data_limit {
            return Err(DataError::TooLong(self.data_limit));
        }
        if let Some(extent) = self.extents.last_mut() {
            extent.length += length;
        }
        Ok(())
    }

    fn advance(&mut self, length: u64) {
        self.done += length;
        if self.done.is_multiple_of(self.granule) {
            self.is_stored = false;
            self.held = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::read_back;
    use super::*;

    fn cut(pieces: &[(u64, Vec<u8>)], size: u64) -> (Vec<Extent>, Vec<u8>) {
        let mut data = Vec::new();
        let mut pages = FilePages::new(&mut data, 0, size, 1 << 40);
        for (offset, bytes) in pieces {
            assert!(pages.zeros_until(*offset).is_ok());
            assert!(pages.write(bytes).is_ok());
        }
        let Ok((extents, end)) = pages.finish() else {
            panic!("a vector takes everything")
        };
        assert_eq!(end, data.len() as u64);
        (extents, data)
    }

    #[test]
    fn large_holes_are_gaps_and_small_ones_are_not() {
        let (extents, data) = cut(&[(0, vec![1; 10]), (100 << 10, vec![2; 10])], 200 << 10);
        assert_eq!(
            extents,
            [Extent {
                file_offset: 0,
                data_offset: 0,
                length: 128 << 10
            }]
        );
        assert_eq!(data.len(), 128 << 10);
        let (extents, _) = cut(&[(1 << 30, vec![1])], (1 << 30) + 1);
        assert_eq!(
            extents,
            [Extent {
                file_offset: 1 << 30,
                data_offset: 0,
                length: PAGE
            }]
        );
        assert_eq!(cut(&[], 1 << 40).0, []);
        assert_eq!(cut(&[(0, vec![0; 70000])], 70000).0, []);
    }

    proptest! {
        #[test]
        fn extents_give_the_file_back(
            pieces in prop::collection::vec((0u64..150_000, 1usize..90_000, 0u8..3), 0..6),
            tail in 0u64..200_000,
        ) {
            let mut offset = 0;
            let mut written = Vec::new();
            for (gap, length, byte) in pieces {
                offset += gap;
                written.push((offset, vec![byte; length]));
                offset += length as u64;
            }
            let size = offset + tail;
            let mut expected = vec![0; size as usize];
            for (offset, bytes) in &written {
                expected[*offset as usize..*offset as usize + bytes.len()].copy_from_slice(bytes);
            }
            let (extents, data) = cut(&written, size);
            prop_assert!(extents.is_sorted_by(|one, next| one.file_offset + one.length < next.file_offset));
            prop_assert!(read_back(&extents, &data, size) == expected);
        }
    }
}
