//! What a child inherits, at numbers low in our table of descriptors.
//!
//! A child shares the table with us until it takes a copy of the table's beginning, which ends after the last descriptor that it inherits. Copies of
//! what it inherits are put at low numbers, which are kept for this. So a start costs the same however many descriptors we have; thawd has nine
//! for each sandbox.
//!
//! Invariant: a place that no child is starting with holds the null device, so it keeps nothing open.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Mutex;

use rustix::io::{DupFlags, dup3, fcntl_dupfd_cloexec};
use thaw_sys::lock::Lock;

/// Most descriptors that one child inherits.
const MOST: usize = 12;

/// What [`reserve`] has made, less what children are starting with.
static RESERVED: Mutex<Vec<Vec<OwnedFd>>> = Mutex::new(Vec::new());

/// Places for the descriptors of one child, above the numbers that it gives them, and the null device.
fn places() -> io::Result<Vec<OwnedFd>> {
    let null = File::open("/dev/null")?;
    let place = |_| Ok(fcntl_dupfd_cloexec(&null, MOST as RawFd)?);
    (0..=MOST).map(place).collect()
}

/// Keeps places for this many children that start at the same time. Children beyond these start too, at a cost that grows with the number of
/// our descriptors. To be called while we have few.
///
/// # Errors
/// The null device cannot be opened, or no descriptor is left.
pub fn reserve(children: usize) -> io::Result<()> {
    for _ in 0..children {
        let places = places()?;
        RESERVED.locked().push(places);
    }
    Ok(())
}

/// Copies of what one child inherits.
pub struct Inherited {
    places: Vec<OwnedFd>,
    used: usize,
    is_reserved: bool,
}

impl Inherited {
    /// Copies these descriptors.
    ///
    /// # Errors
    /// There are more than [`MOST`], or no descriptor is left.
    pub fn copy(descriptors: &[BorrowedFd<'_>]) -> io::Result<Inherited> {
        if descriptors.len() > MOST {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let reserved = RESERVED.locked().pop();
        let mut copied = Inherited {
            is_reserved: reserved.is_some(),
            places: reserved.map_or_else(places, Ok)?,
            used: descriptors.len(),
        };
        for (descriptor, place) in descriptors.iter().zip(&mut copied.places) {
            dup3(descriptor, place, DupFlags::CLOEXEC)?;
        }
        Ok(copied)
    }

    /// The numbers of the copies.
    pub fn numbers(&self) -> impl Iterator<Item = RawFd> {
        self.places[..self.used].iter().map(AsRawFd::as_raw_fd)
    }

    /// The copies are below this number.
    pub fn end(&self) -> RawFd {
        self.numbers().max().map_or(0, |last| last + 1)
    }
}

impl Drop for Inherited {
    fn drop(&mut self) {
        if !self.is_reserved {
            return;
        }
        let mut places = std::mem::take(&mut self.places);
        let Some((null, used)) = places.split_last_mut() else {
            return;
        };
        let emptied = used[..self.used]
            .iter_mut()
            .try_for_each(|place| dup3(&*null, place, DupFlags::CLOEXEC));
        // If one could not be emptied, all are closed.
        if emptied.is_ok() {
            RESERVED.locked().push(places);
        }
    }
}
