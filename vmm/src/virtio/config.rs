//! A device's configuration space (virtio 1.2 §2.5): the bytes the guest sees, and their generation.
//!
//! A device accesses the fields of its device type's structure ([`Config`]); the transport accesses bytes ([`ConfigSpace`]).
//!
//! vCPU threads read the configuration and the device changes it, so it has its own lock, which is held only for a copy. The generation
//! changes with every change by the device. A driver that reads the generation before and after a multi-byte read knows whether the bytes
//! belong together.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_sys::lock::Lock;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A configuration structure in the specification's layout: `#[repr(C)]`, no padding, and integers in little-endian order, which is that of
/// the only supported architecture.
pub trait Fields: FromBytes + IntoBytes + Immutable {}

impl<T: FromBytes + IntoBytes + Immutable> Fields for T {}

/// The configuration space of a device type whose structure is `T`.
#[derive(Debug)]
pub struct Config<T> {
    space: Arc<ConfigSpace>,
    fields: PhantomData<fn() -> T>,
}

impl<T: Fields> Config<T> {
    /// A configuration that never changes.
    pub fn new(fields: T) -> Config<T> {
        Config::of(ConfigSpace::new(fields.as_bytes().to_vec()))
    }

    /// A configuration in which the driver may write the bytes `writable`.
    pub fn with_writable(fields: T, writable: Range<usize>) -> Config<T> {
        Config::of(ConfigSpace::with_writable(fields.as_bytes().to_vec(), writable))
    }

    /// A configuration in which the device changes the bytes `varying`, so a restored machine may have other values there.
    pub fn with_varying(fields: T, varying: Range<usize>) -> Config<T> {
        Config::of(ConfigSpace::new(fields.as_bytes().to_vec()).varying(varying))
    }

    /// `space` must have the size of a `T`.
    pub(super) fn of(space: ConfigSpace) -> Config<T> {
        Config {
            space: Arc::new(space),
            fields: PhantomData,
        }
    }

    /// The bytes that the transport serves the guest's reads from.
    pub fn space(&self) -> Arc<ConfigSpace> {
        self.space.clone()
    }

    /// Changes fields for the device. Returns whether a value changed; if so, the driver must be interrupted.
    pub fn change(&self, change: impl FnOnce(&mut T)) -> bool {
        let mut inner = self.space.lock();
        // Never fails: the bytes were those of a `T`, and their number does not change.
        let Ok(mut fields) = T::read_from_bytes(&inner.bytes) else {
            return false;
        };
        change(&mut fields);
        inner.replace(fields.as_bytes())
    }
}

/// Configuration bytes shared by a device and its transport.
#[derive(Debug)]
pub struct ConfigSpace {
    inner: Mutex<Inner>,
    /// The bytes that the driver may write.
    writable: Range<usize>,
    /// The bytes that a backend may change, so they may differ from the frozen ones.
    varying: Range<usize>,
}

/// How a frozen configuration does not fit this device.
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

impl Inner {
    /// Replaces all bytes; `bytes` must be as many. Returns whether they differed.
    fn replace(&mut self, bytes: &[u8]) -> bool {
        if self.bytes == bytes {
            return false;
        }
        self.bytes.copy_from_slice(bytes);
        self.generation = self.generation.wrapping_add(1);
        true
    }
}

impl ConfigMismatch {
    /// The frozen value, and this device's.
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
    /// A configuration that the driver may only read.
    pub fn new(bytes: Vec<u8>) -> ConfigSpace {
        ConfigSpace::with_writable(bytes, 0..0)
    }

    /// A configuration in which the driver may write the bytes `writable`.
    pub fn with_writable(bytes: Vec<u8>, writable: Range<usize>) -> ConfigSpace {
        ConfigSpace {
            inner: Mutex::new(Inner { bytes, generation: 0 }),
            varying: writable.clone(),
            writable,
        }
    }

    /// Declares that the device also changes the bytes `varying`.
    pub fn varying(mut self, varying: Range<usize>) -> ConfigSpace {
        self.varying = varying;
        self
    }

    /// The driver reads at `offset`. Bytes past the end are zero.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        data.fill(0);
        let inner = self.lock();
        if let Some(bytes) = inner.bytes.get(offset..) {
            let n = bytes.len().min(data.len());
            data[..n].copy_from_slice(&bytes[..n]);
        }
    }

    /// The driver writes at `offset`. Ignored unless all of the bytes are writable.
    pub fn write(&self, offset: usize, data: &[u8]) {
        let Some(end) = offset.checked_add(data.len()) else {
            return;
        };
        if offset >= self.writable.start && end <= self.writable.end {
            self.lock().bytes[offset..end].copy_from_slice(data);
        }
    }

    /// Changes whenever the device changes a value.
    pub fn generation(&self) -> u32 {
        self.lock().generation
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

    /// Whether `bytes` may be restored: they may differ only where a backend or the driver changes them.
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

    /// Takes a frozen configuration. [`Self::check`] must have accepted it.
    pub fn restore(&self, bytes: &[u8], generation: u32) {
        let mut inner = self.lock();
        if inner.bytes.len() == bytes.len() {
            inner.bytes.copy_from_slice(bytes);
            inner.generation = generation;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic cannot happen in the middle of a copy, so the bytes are consistent.
        self.inner.locked()
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
    fn device_change_keeps_what_the_driver_wrote() {
        let config = Config::with_writable([0u32; 2], 4..8);
        config.space().write(4, &[7; 4]);
        assert!(config.change(|words| words[0] = 1));
        assert_eq!(config.space().bytes(), [1, 0, 0, 0, 7, 7, 7, 7]);
    }

    #[test]
    fn the_generation_counts_changes_not_writes() {
        let config = Config::new([0u32; 2]);
        assert!(config.change(|words| words[0] = 1));
        assert!(!config.change(|words| words[0] = 1));
        assert!(config.change(|words| words[0] = 2));
        let space = config.space();
        assert_eq!(
            (space.bytes(), space.generation()),
            (vec![2, 0, 0, 0, 0, 0, 0, 0], 2)
        );
    }
}
