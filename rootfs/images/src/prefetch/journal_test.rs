use proptest::prelude::*;

use crate::prefetch::{Provenance, find};

use super::*;

fn image(directory: &Path) -> (Image, Vec<OrderedBlob>) {
    let blobs = [b"one", b"two"].map(|name| OrderedBlob {
        digest: Digest::of(name),
        layer: None,
        length: 10 * CHUNK_SIZE,
    });
    (Image::bare(directory), blobs.into())
}

fn runs(image: &Image) -> Option<Vec<(u32, u64)>> {
    let (order, whose) = find(image)?;
    assert_eq!((whose, order.image), (Provenance::Recorded, image.digest));
    Some(
        order
            .runs
            .iter()
            .map(|run| (run.blob, run.offset / CHUNK_SIZE))
            .collect(),
    )
}

fn length(image: &Image) -> u64 {
    std::fs::metadata(path(image)).unwrap().len()
}

#[test]
fn what_a_killed_process_had_recorded_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let (image, blobs) = image(directory.path());
    let mut recorder = Recorder::default();
    let mut journal = Journal::begin(&image, blobs.clone()).unwrap().unwrap();
    for (blob, chunk) in [(1, 5), (0, 2), (1, 5), (0, 7)] {
        recorder.access(&blobs[blob].digest, chunk * CHUNK_SIZE, 1);
        recorder.access(&Digest::of(b"another"), chunk * CHUNK_SIZE, 1);
        journal.follow(&recorder).unwrap();
    }
    // While the recording runs, no other process takes its journal or records the same image.
    assert_eq!(runs(&image), None);
    assert!(Journal::begin(&image, blobs.clone()).unwrap().is_none());
    drop(journal);
    assert_eq!(runs(&image), Some(vec![(1, 5), (0, 2), (0, 7)]));
    assert_eq!(length(&image), 0);

    // The image has a load order now, which is worth more than the rest of another recording.
    let mut journal = Journal::begin(&image, blobs.clone()).unwrap().unwrap();
    let mut recorder = Recorder::default();
    recorder.access(&blobs[0].digest, 0, 1);
    journal.follow(&recorder).unwrap();
    drop(journal);
    assert_eq!(runs(&image).unwrap().len(), 3);
    assert_eq!(length(&image), 0);
}

#[test]
fn what_is_ended_in_order_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (image, blobs) = image(directory.path());
    let mut recorder = Recorder::default();
    recorder.access(&blobs[0].digest, 0, 1);
    let mut journal = Journal::begin(&image, blobs.clone()).unwrap().unwrap();
    journal.follow(&recorder).unwrap();
    journal.end().unwrap();
    assert_eq!((runs(&image), length(&image)), (None, 0));
    // An empty recording leaves nothing either.
    drop(Journal::begin(&image, blobs).unwrap());
    assert_eq!((runs(&image), length(&image)), (None, 0));
}

#[test]
fn the_next_recording_finds_what_the_last_one_left() {
    let directory = tempfile::tempdir().unwrap();
    let (image, blobs) = image(directory.path());
    let mut recorder = Recorder::default();
    recorder.access(&blobs[0].digest, CHUNK_SIZE, 1);
    let mut journal = Journal::begin(&image, blobs.clone()).unwrap().unwrap();
    journal.follow(&recorder).unwrap();
    drop(journal);
    Journal::begin(&image, blobs).unwrap().unwrap().end().unwrap();
    assert_eq!(runs(&image), Some(vec![(0, 1)]));
}

proptest! {
    /// A truncated journal yields a beginning of the recording; a damaged one yields some order, or none.
    #[test]
    fn a_torn_journal_is_read_as_far_as_it_goes(cut in 0usize..600, at in 0usize..600, byte in any::<u8>()) {
        let directory = tempfile::tempdir().unwrap();
        let (image, blobs) = image(directory.path());
        let mut recorder = Recorder::default();
        for chunk in [9, 3, 0, 6] {
            recorder.access(&blobs[1].digest, chunk * CHUNK_SIZE, 1);
        }
        let mut journal = Journal::begin(&image, blobs).unwrap().unwrap();
        journal.follow(&recorder).unwrap();
        drop(journal);
        let mut bytes = std::fs::read(path(&image)).unwrap();
        bytes.truncate(cut);
        std::fs::write(path(&image), &bytes).unwrap();
        let whole = [(1, 9), (1, 3), (1, 0), (1, 6)];
        let found = read(&File::open(path(&image)).unwrap()).unwrap();
        if let Some(order) = found {
            let runs: Vec<_> = order.runs.iter().map(|run| (run.blob, run.offset / CHUNK_SIZE)).collect();
            prop_assert!(whole.starts_with(&runs));
        }
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
            std::fs::write(path(&image), &bytes).unwrap();
            let _ = read(&File::open(path(&image)).unwrap()).unwrap();
        }
    }
}
