use super::*;

#[test]
fn batch_of_two_objects_gives_both_texts() {
    let printed = b"aa blob 3\na\nb\nbb blob 0\n\n";
    assert_eq!(parse_batch(printed).unwrap(), ["a\nb", ""]);
}

#[test]
fn batch_with_a_missing_object_is_refused() {
    assert_eq!(parse_batch(b"aa missing\n"), None);
    assert_eq!(parse_batch(b"aa blob 9\nshort\n"), None);
}
