//! The images one VMM was given, which are the only ones it may read, and the refusal of others.
//!
//! Invariant: an image is granted before its VMM can use it, and revoked after the VMM can no longer use it. So a VMM is never refused
//! bytes of an image it has, and bytes of other images are never fetched for it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_imagefs::blob::CHUNK_SIZE;
use thaw_imagefs::digest::Digest;
use thaw_images::store::Image;
use thaw_protocol::miss::Miss;
use thaw_sys::lock::Lock;

use crate::miss_counts::{MAX_LENGTH, Refusal};

/// The images of one VMM, by slot. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Given(Arc<Mutex<BTreeMap<u16, Blobs>>>);

/// An image's blobs, and their sizes in bytes.
type Blobs = HashMap<Digest, u64>;

impl Given {
    /// Allows bytes of this image, which the VMM is about to get.
    pub fn grant(&self, slot: u16, image: &Image) {
        let blobs = image.blobs.iter().map(|blob| (blob.id, blob.length));
        self.locked().insert(slot, blobs.collect());
    }

    /// Ends the permission for the image of this slot, which the VMM no longer has.
    pub fn revoke(&self, slot: u16) {
        self.locked().remove(&slot);
    }

    /// Whether a miss is for bytes of the VMM's own images.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn check(&self, miss: &Miss) -> Result<(), Refusal> {
        if miss.length == 0 || miss.length > MAX_LENGTH {
            return Err(Refusal::Length);
        }
        let blob = Digest::from(miss.blob);
        let has = self.locked().values().find_map(|blobs| blobs.get(&blob).copied());
        // A VMM may ask for a blob's last chunk in full.
        let end = has.ok_or(Refusal::NotGiven)?.next_multiple_of(CHUNK_SIZE);
        match miss.offset.checked_add(miss.length.into()) {
            Some(last) if last <= end => Ok(()),
            _ => Err(Refusal::OutOfRange),
        }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<u16, Blobs>> {
        self.0.locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn given(blobs: &[(u16, u8, u64)]) -> Given {
        let given = Given::default();
        for (slot, blob, length) in blobs {
            let mut all = given.locked();
            all.entry(*slot).or_default().insert([*blob; 32].into(), *length);
        }
        given
    }

    fn miss(blob: u8, offset: u64, length: u32) -> Miss {
        Miss {
            id: 1,
            blob: [blob; 32],
            offset,
            length,
        }
    }

    #[test]
    fn blob_of_a_revoked_image_is_refused() {
        let given = given(&[(1, 1, 8192), (2, 1, 8192), (2, 2, 8192)]);
        assert_eq!(given.check(&miss(2, 4096, 4096)), Ok(()));
        given.revoke(2);
        assert_eq!(given.check(&miss(1, 0, 1)), Ok(()), "another image has it");
        assert_eq!(given.check(&miss(2, 0, 1)), Err(Refusal::NotGiven));
        given.revoke(1);
        assert_eq!(given.check(&miss(1, 0, 1)), Err(Refusal::NotGiven));
    }

    #[test]
    fn misses_beyond_their_blob_are_refused() {
        let given = given(&[(1, 1, CHUNK_SIZE + 4096)]);
        let last = CHUNK_SIZE as u32;
        assert_eq!(given.check(&miss(1, CHUNK_SIZE, last)), Ok(()));
        for (offset, length) in [
            (CHUNK_SIZE, last + 1),
            (2 * CHUNK_SIZE, 1),
            (u64::MAX, 1),
            (u64::MAX, MAX_LENGTH),
        ] {
            let refused = given.check(&miss(1, offset, length));
            assert_eq!(refused, Err(Refusal::OutOfRange), "{offset} {length}");
        }
        for length in [0, MAX_LENGTH + 1, u32::MAX] {
            assert_eq!(given.check(&miss(1, 0, length)), Err(Refusal::Length), "{length}");
        }
    }

    proptest! {
        #[test]
        fn only_bytes_of_a_given_blob_pass(blob in 0u8..4, offset: u64, length: u32, small: bool) {
            let offset = if small { offset % (2 * CHUNK_SIZE) } else { offset };
            let length = if small { length % (1 << 18) } else { length };
            let given = given(&[(1, 1, CHUNK_SIZE), (7, 2, 4096)]);
            if given.check(&miss(blob, offset, length)).is_ok() {
                prop_assert!(blob == 1 || blob == 2);
                prop_assert!(offset + u64::from(length) <= CHUNK_SIZE);
                prop_assert!((1..=MAX_LENGTH).contains(&length));
            }
        }
    }
}
