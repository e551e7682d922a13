//! A ready file, whoever wrote it, as the VMM opens it and as its owner does. What opens is within bounds: its bits are
//! where they should be, and what is said to be missing lies in the blob, in order.

use std::io::Write;

use thaw_imagefs::blob::{BlobFile, ReadyFile};

/// Bytes of the data file beside it: sparse.
const DATA: u64 = 1 << 30;

pub fn run(bytes: &[u8]) {
    let mut ready = tempfile::tempfile().expect("a temporary file can be made");
    ready.write_all(bytes).expect("it can be written");
    let data = tempfile::tempfile().expect("a temporary file can be made");
    data.set_len(DATA).expect("it can be sparse");
    let clone = |file: &std::fs::File| file.try_clone().expect("there are descriptors");
    if let Ok(blob) = BlobFile::open(clone(&data), clone(&ready)) {
        let mut end = 0;
        for missing in blob.missing(0, u64::MAX) {
            assert!(missing.start >= end && missing.end > missing.start && missing.end <= blob.len());
            end = missing.end;
        }
        assert!(!blob.is_ready(blob.len(), 1));
    }
    if let Ok(owner) = ReadyFile::open(ready) {
        let mut buffer = Vec::new();
        for chunk in (0..owner.chunk_count()).take(16) {
            let _ = owner.verify(&data, chunk, &mut buffer);
        }
        assert!(owner.digest(owner.chunk_count()).is_err());
        assert!(owner.ready_count() <= owner.chunk_count().next_multiple_of(4096 * 8));
    }
}
