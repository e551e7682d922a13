//! The files of a snapshot that the VMM reads: `state` and `working-set`. The hash in front keeps no hostile writer out,
//! so what follows it is read without.

use thaw_vmm::snapshot::Snapshot;
use thaw_vmm::snapshot::working_set::WorkingSet;

// One byte says which file; the rest is its body.
pub fn run(input: &[u8]) {
    let [file, body @ ..] = input else { return };
    match file % 4 {
        0 => drop(Snapshot::decode(body)),
        1 => drop(WorkingSet::decode(body)),
        2 => {
            if let Ok(set) = WorkingSet::decode_body(body) {
                assert!(set.runs().iter().all(|run| run.pages > 0));
            }
        }
        _ => {
            if let Ok(snapshot) = Snapshot::decode_body(body) {
                check(&snapshot);
            }
        }
    }
}

/// What decodes can be written and reads the same, and its memory lies where its files have it.
fn check(snapshot: &Snapshot) {
    let again = Snapshot::decode_body(&snapshot.encode_body()).expect("it was read from bytes");
    assert_eq!(again.encode_body(), snapshot.encode_body());
    let memory = &snapshot.memory;
    assert_eq!(usize::from(snapshot.shape.vcpus), snapshot.vcpus.len());
    for extent in memory.extents() {
        let offset = memory
            .file_offset(extent.guest_address)
            .expect("it is in a region");
        assert!(offset + extent.size <= memory.bytes_of_layer(extent.layer));
        assert!(offset + extent.size <= memory.file_size());
        let ranges = memory.guest_ranges(offset..offset + extent.size);
        assert_eq!(ranges, [extent.range()]);
    }
}
