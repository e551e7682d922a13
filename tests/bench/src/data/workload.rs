//! What is asked of a disk by its driver, and of a file by a plain program with one thread.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use super::driver::{Driver, LONGEST, Operation};

/// Bytes of a disk. They are in the page cache.
pub const BYTES: u64 = 256 << 20;
/// Bytes of a random request.
pub const BLOCK: usize = 4096;
/// Requests of [`LONGEST`] bytes in flight.
const LONG_SLOTS: usize = 4;

/// Random offsets, the same each time.
pub struct Offsets {
    state: u64,
    blocks: u64,
}

impl Offsets {
    pub fn new(bytes: u64) -> Offsets {
        Offsets {
            state: 0x9E37_79B9_7F4A_7C15,
            blocks: bytes / BLOCK as u64,
        }
    }

    /// xorshift64.
    pub fn random(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % self.blocks * BLOCK as u64
    }
}

/// A disk whose driver keeps so many random requests in flight.
pub struct Deep<'d> {
    pub driver: &'d mut Driver,
    /// At most [`super::driver::SLOTS`].
    pub depth: usize,
}

/// What random requests are sent to.
pub trait Random {
    /// Sends so many requests of [`BLOCK`] bytes, and waits for all.
    fn random(&mut self, operation: Operation, offsets: &mut Offsets, count: usize) -> Result<(), String>;
}

/// A disk, or a file.
pub trait Store {
    /// All of it, in requests of [`LONGEST`] bytes.
    fn sequential(&mut self, operation: Operation) -> Result<(), String>;
    /// Random writes, and a sync after each.
    fn write_and_sync(&mut self, offsets: &mut Offsets, count: usize) -> Result<(), String>;
}

impl Driver {
    /// Keeps so many requests in flight until all of `requests` are answered.
    fn pipeline(
        &mut self,
        operation: Operation,
        (depth, length): (usize, usize),
        mut requests: impl Iterator<Item = u64>,
    ) -> Result<(), String> {
        let mut free: Vec<usize> = (0..depth).collect();
        let mut more = true;
        loop {
            while more && let Some(slot) = free.pop() {
                match requests.next() {
                    Some(offset) => self.submit(slot, operation, offset, length)?,
                    None => {
                        free.push(slot);
                        more = false;
                    }
                }
            }
            self.publish()?;
            if free.len() == depth {
                return Ok(());
            }
            self.collect(&mut free)?;
        }
    }
}

impl Driver {
    /// Times reads, one after the other, while the same disk is written and synced without a pause, µs.
    pub fn reads_beside_syncs(&mut self, count: usize) -> Result<Vec<f64>, String> {
        const READS: usize = 0;
        const SYNCS: usize = 1;
        let (mut reads, mut writes) = (Offsets::new(BYTES), Offsets::new(BYTES));
        let mut change = Operation::Write;
        let mut began = Instant::now();
        let mut trips = Vec::new();
        let mut free = vec![READS, SYNCS];
        while trips.len() < count {
            for slot in free.drain(..) {
                if slot == READS {
                    began = Instant::now();
                    self.submit(READS, Operation::Read, reads.random(), BLOCK)?;
                } else {
                    self.submit(SYNCS, change, writes.random(), BLOCK)?;
                    change = match change {
                        Operation::Write => Operation::Flush,
                        _ => Operation::Write,
                    };
                }
            }
            self.publish()?;
            self.collect(&mut free)?;
            if free.contains(&READS) {
                trips.push(began.elapsed().as_secs_f64() * 1e6);
            }
        }
        while !free.contains(&SYNCS) {
            self.collect(&mut free)?;
        }
        Ok(trips)
    }
}

impl Random for Deep<'_> {
    fn random(&mut self, operation: Operation, offsets: &mut Offsets, count: usize) -> Result<(), String> {
        let requests = (0..count).map(|_| offsets.random());
        self.driver.pipeline(operation, (self.depth, BLOCK), requests)
    }
}

impl Store for Driver {
    fn sequential(&mut self, operation: Operation) -> Result<(), String> {
        self.pipeline(operation, (LONG_SLOTS, LONGEST), (0..BYTES).step_by(LONGEST))
    }

    fn write_and_sync(&mut self, offsets: &mut Offsets, count: usize) -> Result<(), String> {
        for _ in 0..count {
            self.request(Operation::Write, offsets.random(), BLOCK)?;
            self.request(Operation::Flush, 0, 0)?;
        }
        Ok(())
    }
}

/// A plain program's view of a file.
pub struct Plain {
    pub file: File,
    pub buffer: Vec<u8>,
}

impl Plain {
    pub fn new(file: File) -> Plain {
        Plain {
            file,
            buffer: vec![1; LONGEST],
        }
    }

    fn call(&mut self, operation: Operation, offset: u64, length: usize) -> Result<(), String> {
        let buffer = &mut self.buffer[..length];
        let done = match operation {
            Operation::Read => self.file.read_exact_at(buffer, offset),
            Operation::Write => self.file.write_all_at(buffer, offset),
            Operation::Flush => self.file.sync_data(),
        };
        done.map_err(|e| format!("the plain file: {e}"))
    }
}

impl Random for Plain {
    fn random(&mut self, operation: Operation, offsets: &mut Offsets, count: usize) -> Result<(), String> {
        (0..count).try_for_each(|_| self.call(operation, offsets.random(), BLOCK))
    }
}

impl Store for Plain {
    fn sequential(&mut self, operation: Operation) -> Result<(), String> {
        let mut offsets = (0..BYTES).step_by(LONGEST);
        offsets.try_for_each(|offset| self.call(operation, offset, LONGEST))
    }

    fn write_and_sync(&mut self, offsets: &mut Offsets, count: usize) -> Result<(), String> {
        (0..count).try_for_each(|_| {
            self.call(Operation::Write, offsets.random(), BLOCK)?;
            self.call(Operation::Flush, 0, 0)
        })
    }
}
