use super::*;

fn missing_in(files: &[(&str, &str)]) -> Vec<String> {
    missing(
        &files
            .iter()
            .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
            .collect(),
    )
}

#[test]
fn documents_that_do_not_exist_are_found() {
    let text = "//! As DESIGN says.\nlet x = 1; // DESIGN\n    // See docs/x.md and docs/y.md, NOTES.md.\n";
    assert_eq!(
        missing_in(&[("a.rs", text), ("docs/x.md", "")]),
        ["a.rs:1: DESIGN", "a.rs:3: docs/y.md", "a.rs:3: NOTES.md"]
    );
}

#[test]
fn documents_that_exist_are_accepted_by_any_end() {
    let text = "// DESIGN, docs/x, docs/, the README.md, FILE.rs, vmm/src/b.rs, b.rs::some_test, https://y.z/a.md.\n";
    let files = [
        ("a.rs", text),
        ("DESIGN.md", ""),
        ("docs/x.md", ""),
        ("node/README.md", ""),
        ("vmm/src/b.rs", ""),
    ];
    assert_eq!(missing_in(&files), [""; 0]);
}

#[test]
fn source_files_that_do_not_exist_are_found() {
    assert_eq!(
        missing_in(&[("a.rs", "/// Like fs.rs does.\n")]),
        ["a.rs:1: fs.rs"]
    );
}

#[test]
fn scripts_are_read_and_other_files_are_not() {
    let files = [
        ("run", "#!/bin/sh\n# See docs/z.md.\necho DESIGN\n"),
        ("a.txt", "# docs/z.md\n"),
    ];
    assert_eq!(missing_in(&files), ["run:2: docs/z.md"]);
}
