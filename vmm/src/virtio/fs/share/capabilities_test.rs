use super::*;

#[test]
fn answer_is_used_for_as_long_as_other_attributes() {
    let now = Instant::now();
    let mut files = WithoutCapabilities::default();
    files.add(7, now);
    assert!(files.has(7, now + FRESH / 2));
    assert!(!files.has(8, now));
    assert!(!files.has(7, now + FRESH));
    files.add(7, now + FRESH);
    assert!(files.has(7, now + FRESH));
    files.clear();
    assert!(!files.has(7, now + FRESH));
}

#[test]
fn only_so_many_files_are_remembered_at_a_time() {
    let now = Instant::now();
    let mut files = WithoutCapabilities::default();
    (0..FILES as u64).for_each(|node| files.add(node, now));
    files.add(FILES as u64, now);
    assert!(!files.has(FILES as u64, now));
    let later = now + FRESH;
    files.add(FILES as u64, later);
    assert!(files.has(FILES as u64, later));
    assert_eq!(files.found.len(), 1);
}
