//! A device's configuration space (virtio 1.2 §2.5): the bytes the guest sees, and their generation.
//!
//! Read by vCPU threads and changed by the device, it has a lock of its own, held for a copy and no longer. The
//! generation changes with every change the device makes, so a driver that reads it before and after a multi-byte
//! read knows whether the bytes belong together.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Configuration bytes shared by a device and its transport.
#[derive(Debug)]
pub struct ConfigSpace {
    inner: Mutex<Inner>,
    /// What the driver may write.
    writable: Range<usize>,
    /// What a backend may change: it may differ from what was frozen.
    varying: Range<usize>,
}

/// A frozen configuration is not one of this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigMismatch {
    Length { frozen: usize, here: usize },
    Byte { offset: usize, frozen: u8, here: u8 },
}

#[derive(Debug)]
struct Inner {
    bytes: Vec<u8>,
    generation: u32,
}

impl ConfigMismatch {
    /// What was frozen, and what is here.
    pub fn sides(self) -> (String, String) {
        match self {
            ConfigMismatch::Length { frozen, here } => (format!("{frozen} bytes"), format!("{here} bytes")),
            ConfigMismatch::Byte { offset, frozen, here } => (
                format!("{frozen:#x} at offset {offset}"),
                format!("{here:#x} at offset {offset}"),
            ),
        }
    }
}

impl ConfigSpace {
    /// A configuration the driver may only read.
    pub fn new(bytes: Vec<u8>) -> ConfigSpace {
        ConfigSpace::with_writable(bytes, 0..0)
    }

    /// A configuration of which the driver may write the bytes `writable`.
    pub fn with_writable(bytes: Vec<u8>, writable: Range<usize>) -> ConfigSpace {
        ConfigSpace {
            inner: Mutex::new(Inner { bytes, generation: 0 }),
            varying: writable.clone(),
            writable,
        }
    }

    /// Says that the device changes the bytes `varying` too.
    pub fn varying(mut self, varying: Range<usize>) -> ConfigSpace {
        self.varying = varying;
        self
    }

    /// The driver reads at `offset`; bytes past the end are zero.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        data.fill(0);
        let inner = self.lock();
        if let Some(bytes) = inner.bytes.get(offset..) {
            let n = bytes.len().min(data.len());
            data[..n].copy_from_slice(&bytes[..n]);
        }
    }

    /// The driver writes at `offset`; ignored unless all of it is writable.
    pub fn write(&self, offset: usize, data: &[u8]) {
        let Some(end) = offset.checked_add(data.len()) else {
            return;
        };
        if offset >= self.writable.start && end <= self.writable.end {
            self.lock().bytes[offset..end].copy_from_slice(data);
        }
    }

    /// Changes with every change the device makes.
    pub fn generation(&self) -> u32 {
        self.lock().generation
    }

    /// The device replaces the bytes at `offset`. True if that changed anything: the driver wants an interrupt then.
    pub fn set(&self, offset: usize, data: &[u8]) -> bool {
        let mut inner = self.lock();
        let old = &mut inner.bytes[offset..offset + data.len()];
        if old == data {
            return false;
        }
        old.copy_from_slice(data);
        inner.generation = inner.generation.wrapping_add(1);
        true
    }

    /// All bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    /// All bytes and their generation, which belong together.
    pub fn snapshot(&self) -> (Vec<u8>, u32) {
        let inner = self.lock();
        (inner.bytes.clone(), inner.generation)
    }

    /// Whether `bytes` may be restored: they differ only where a backend or the driver makes them.
    pub fn check(&self, bytes: &[u8]) -> Result<(), ConfigMismatch> {
        let inner = self.lock();
        if bytes.len() != inner.bytes.len() {
            return Err(ConfigMismatch::Length {
                frozen: bytes.len(),
                here: inner.bytes.len(),
            });
        }
        let differs = |offset: &usize| {
            bytes[*offset] != inner.bytes[*offset]
                && !self.varying.contains(offset)
                && !self.writable.contains(offset)
        };
        match (0..bytes.len()).find(differs) {
            Some(offset) => Err(ConfigMismatch::Byte {
                offset,
                frozen: bytes[offset],
                here: inner.bytes[offset],
            }),
            None => Ok(()),
        }
    }

    /// Takes a frozen configuration, which [`Self::check`] has accepted.
    pub fn restore(&self, bytes: &[u8], generation: u32) {
        let mut inner = self.lock();
        if inner.bytes.len() == bytes.len() {
            inner.bytes.copy_from_slice(bytes);
            inner.generation = generation;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic between a copy's first and last byte cannot happen: the bytes are whole whoever held the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_past_the_end_are_zero() {
        let config = ConfigSpace::new(vec![1, 2, 3]);
        let mut data = [9; 4];
        config.read(1, &mut data);
        assert_eq!(data, [2, 3, 0, 0]);
        config.read(usize::MAX, &mut data);
        assert_eq!(data, [0; 4]);
    }

    #[test]
    fn the_driver_writes_only_what_is_writable() {
        let config = ConfigSpace::with_writable(vec![0; 8], 4..8);
        config.write(0, &[1; 4]);
        config.write(2, &[1; 4]);
        config.write(6, &[1; 4]);
        config.write(usize::MAX, &[1; 4]);
        assert_eq!(config.bytes(), [0; 8]);
        config.write(4, &[1; 4]);
        assert_eq!(config.bytes(), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(config.generation(), 0);
    }

    #[test]
    fn a_frozen_configuration_may_differ_only_where_it_varies() {
        let config = ConfigSpace::with_writable(vec![0; 8], 4..6).varying(0..2);
        config.check(&[1, 1, 0, 0, 1, 1, 0, 0]).unwrap();
        let byte = ConfigMismatch::Byte {
            offset: 6,
            frozen: 1,
            here: 0,
        };
        assert_eq!(config.check(&[1, 1, 0, 0, 1, 1, 1, 0]), Err(byte));
        let length = ConfigMismatch::Length { frozen: 7, here: 8 };
        assert_eq!(config.check(&[0; 7]), Err(length));
        config.restore(&[1, 1, 0, 0, 1, 1, 0, 0], 9);
        assert_eq!((config.bytes()[0], config.generation()), (1, 9));
    }

    #[test]
    fn the_generation_counts_changes_not_writes() {
        let config = ConfigSpace::new(vec![0; 8]);
        assert!(config.set(0, &[1]));
        assert!(!config.set(0, &[1]));
        assert!(config.set(0, &[2]));
        assert_eq!(config.generation(), 2);
    }
}
