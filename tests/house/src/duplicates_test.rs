use super::*;

fn numbered(text: &str) -> Vec<(usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line))
        .collect()
}

const SIX: &str = "a();\nb();\nc();\nd();\ne();\nf();\n";

#[test]
fn six_shared_lines_are_found_in_both_places() {
    let there = format!("x();\n\n{}", SIX.replace("c();", "  c();\n// why\n}"));
    let found = duplicates([("one", numbered(SIX)), ("two", numbered(&there))]);
    let expected = [
        Place {
            file: "one".into(),
            line: 1,
            lines: 6,
            other: "two:3".into(),
        },
        Place {
            file: "two".into(),
            line: 3,
            lines: 6,
            other: "one:1".into(),
        },
    ];
    assert_eq!(found, expected);
}

#[test]
fn five_shared_lines_are_not_found() {
    let there = SIX.replace("f();", "g();");
    assert_eq!(
        duplicates([("one", numbered(SIX)), ("two", numbered(&there))]),
        []
    );
}

#[test]
fn longer_run_is_one_place() {
    let long = format!("{SIX}g();\nh();\n");
    let found = duplicates([("one", numbered(&long)), ("two", numbered(&long))]);
    assert_eq!(found.iter().map(|place| place.lines).collect::<Vec<_>>(), [8, 8]);
}

#[test]
fn copy_within_one_file_is_found_once_each() {
    let twice = format!("{SIX}z();\n{SIX}");
    let found = duplicates([("one", numbered(&twice))]);
    assert_eq!(found.iter().map(|place| place.line).collect::<Vec<_>>(), [1, 8]);
}

#[test]
fn rows_that_repeat_are_no_copy_of_themselves() {
    let rows = "row(1);\n".repeat(8);
    assert_eq!(duplicates([("one", numbered(&rows))]), []);
}
