use super::*;
use proptest::prelude::*;

fn all(journal: &Journal) -> Vec<Frame> {
    let (mut at, mut all) = (0, Vec::new());
    loop {
        let frames = journal.read(at).unwrap();
        if frames.frames.is_empty() {
            return all;
        }
        at = frames.next;
        all.extend(frames.frames);
    }
}

fn size(directory: &Path) -> u64 {
    Journal::size(&directory.join(FILE))
}

#[test]
fn one_whose_next_file_was_not_begun_is_there_and_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let journal = Journal::open(directory.path()).unwrap();
    assert!(Journal::exists(directory.path()));
    journal.append(Output::Stdout, b"before").unwrap();
    drop(journal);
    // State after thawd is killed between the two steps of the rotation.
    fs::rename(directory.path().join(FILE), before(&directory.path().join(FILE))).unwrap();
    assert!(Journal::exists(directory.path()));
    let journal = Journal::open(directory.path()).unwrap();
    journal.append(Output::Stdout, b"after").unwrap();
    let kept: Vec<Vec<u8>> = all(&journal).into_iter().map(|frame| frame.data).collect();
    assert_eq!(kept, [b"before".to_vec(), b"after".to_vec()]);
}

#[test]
fn the_last_of_it_is_kept_and_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let journal = Journal::open(directory.path()).unwrap();
    for number in 0..100u8 {
        journal.append(Output::Stdout, &vec![number; 100_000]).unwrap();
        assert!(size(directory.path()) <= 2 * MOST_OF_FILE);
    }
    let kept = all(&journal);
    assert_eq!(kept.last().unwrap().data[0], 99);
    let bytes: usize = kept.iter().map(|frame| frame.data.len()).sum();
    assert!(bytes as u64 > MOST_OF_FILE);
    let numbers: Vec<u8> = kept.iter().map(|frame| frame.data[0]).collect();
    assert!(numbers.is_sorted());
    // A late reader begins at the oldest frame.
    assert!(journal.read(0).unwrap().start > 0);
    let end = journal.extent().borrow().end;
    assert_eq!(journal.read(end).unwrap().next, end);
    drop(journal);
    assert_eq!(all(&Journal::open(directory.path()).unwrap()), kept);
}

proptest! {
    #[test]
    fn whatever_a_crash_left_is_opened_and_goes_on(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..50), 0..8),
        cut in 0usize..500,
        noise in prop::collection::vec(any::<u8>(), 0..50),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(directory.path()).unwrap();
        for piece in &pieces {
            journal.append(Output::Stderr, piece).unwrap();
        }
        drop(journal);
        let path = directory.path().join(FILE);
        let mut bytes = fs::read(&path).unwrap();
        bytes.truncate(cut);
        bytes.extend(noise);
        fs::write(&path, bytes).unwrap();
        let journal = Journal::open(directory.path()).unwrap();
        let before = all(&journal);
        journal.append(Output::Stdout, b"x").unwrap();
        let mut after = all(&journal);
        let last = after.pop().unwrap();
        prop_assert_eq!((last.output, last.data), (Output::Stdout, b"x".to_vec()));
        prop_assert_eq!(after, before);
    }
}

#[test]
fn journal_of_the_previous_release_is_read_and_continued() {
    let directory = tempfile::tempdir().unwrap();
    let old = [&[1, 3, 0, 0, 0][..], b"old", &[2, 3, 0, 0, 0], b"bad"].concat();
    fs::write(directory.path().join(FILE), old).unwrap();
    let journal = Journal::open(directory.path()).unwrap();
    journal.append(Output::Stderr, b"new").unwrap();
    let frames = all(&journal);
    let seen: Vec<_> = frames.iter().map(|f| (f.output, f.at > 0, &f.data[..])).collect();
    assert_eq!(
        seen,
        [
            (Output::Stdout, false, &b"old"[..]),
            (Output::Stderr, false, b"bad"),
            (Output::Stderr, true, b"new")
        ]
    );
}

#[test]
fn kept_journal_is_complete_where_it_was_moved() {
    let (directory, records) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = records.path().join("aa.output");
    assert!(Journal::kept(&file).unwrap().is_none());
    Journal::keep(directory.path(), &file).unwrap();
    assert!(Journal::kept(&file).unwrap().is_none(), "there was none to keep");
    let journal = Journal::open(directory.path()).unwrap();
    for number in 0..20u8 {
        journal.append(Output::Stdout, &vec![number; 100_000]).unwrap();
    }
    let written = all(&journal);
    Journal::keep(directory.path(), &file).unwrap();
    assert!(!Journal::exists(directory.path()));
    assert_eq!(all(&journal), written, "who has it open reads on");
    let kept = Journal::kept(&file).unwrap().unwrap();
    assert_eq!((all(&kept), kept.extent().borrow().over), (written, true));
    assert_eq!(Journal::size(&file), Journal::remove(&file));
    assert!(Journal::kept(&file).unwrap().is_none());
}
