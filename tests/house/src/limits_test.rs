use super::*;

fn limits(pairs: &[(&str, usize)]) -> Limits {
    pairs
        .iter()
        .map(|(name, limit)| ((*name).to_owned(), *limit))
        .collect()
}

#[test]
fn written_limits_are_read_again() {
    let some = limits(&[("a", 1), ("b", 0)]);
    assert_eq!(parse(&render(&some)), Ok(some));
}

#[test]
fn line_of_another_form_is_refused() {
    assert_eq!(parse("a 1\nb\n"), Err("no limit: b".to_owned()));
    assert_eq!(parse("a -1\n"), Err("no limit: a -1".to_owned()));
}

#[test]
fn limits_are_lowered_and_never_raised() {
    let before = limits(&[("fewer", 5), ("more", 5), ("gone", 5)]);
    let after = lowered(&before, [("fewer", 3), ("more", 7), ("new", 2)]);
    assert_eq!(after, limits(&[("fewer", 3), ("more", 5), ("new", 2)]));
}
