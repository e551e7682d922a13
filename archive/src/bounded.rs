//! Bounds what the tar reader holds in memory. The tar crate reads long names and extended headers whole, whatever length they claim.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

/// Most bytes that describe one entry: header blocks, long names, extended headers and the map of a sparse file.
pub const MAX_HEADERS: u64 = 1 << 20;

/// A reader that fails when a budget is spent.
#[derive(Debug)]
pub struct Bounded<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

/// The budget of a [`Bounded`] reader.
#[derive(Clone, Debug)]
pub struct Budget(Rc<Cell<u64>>);

impl Budget {
    /// The next bytes describe an entry.
    pub fn for_headers(&self) {
        self.0.set(MAX_HEADERS);
    }

    /// The next bytes are an entry's contents. They are passed on and not kept, so their number has no limit here.
    pub fn for_contents(&self) {
        self.0.set(u64::MAX);
    }
}

/// Wraps a reader. It starts with the budget for headers.
pub fn bounded<R: Read>(inner: R) -> (Bounded<R>, Budget) {
    let left = Rc::new(Cell::new(MAX_HEADERS));
    let budget = Budget(left.clone());
    (Bounded { inner, left }, budget)
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 && !buffer.is_empty() {
            return Err(io::Error::other(format!(
                "an entry's headers have more than {MAX_HEADERS} bytes"
            )));
        }
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.inner.read(&mut buffer[..most])?;
        self.left.set(left - read as u64);
        Ok(read)
    }
}
