//! Checks docs/threat-model.md: each defence names tests that exist and that run by default.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// The head of a table of defences.
const HEAD: &str = "| attack | what stops it | tests |";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The tests that a text names: `` `FILE.rs::NAME` ``.
fn named(text: &str) -> Vec<(&str, &str)> {
    let words = text.split('`').skip(1).step_by(2);
    words.filter_map(|word| word.split_once(".rs::")).collect()
}

/// The problem with a named test; `None` if it exists and runs.
fn wrong(file: &str, name: &str) -> Option<String> {
    let Ok(source) = fs::read_to_string(root().join(format!("{file}.rs"))) else {
        return Some(format!("there is no {file}.rs"));
    };
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let Some(at) = lines.iter().position(|line| is_head_of(line, name)) else {
        return Some(format!("{file}.rs has no {name}"));
    };
    let attributes: Vec<&&str> = lines[..at]
        .iter()
        .rev()
        .take_while(|line| line.starts_with('#') || line.starts_with("//"))
        .collect();
    let is_test = |line: &&&str| line.starts_with("#[test") || line.starts_with("#[tokio::test");
    if !attributes.iter().any(is_test) {
        return Some(format!("{name} of {file}.rs is no test"));
    }
    let is_ignored = attributes.iter().any(|line| line.starts_with("#[ignore"));
    is_ignored.then(|| format!("{name} of {file}.rs is ignored"))
}

fn is_head_of(line: &str, name: &str) -> bool {
    let rest = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
    rest.and_then(|rest| rest.strip_prefix(name))
        .is_some_and(|rest| rest.starts_with('('))
}

#[test]
fn every_defence_names_tests_that_exist_and_run() {
    let document = fs::read_to_string(root().join("docs/threat-model.md")).unwrap();
    let mut faults: Vec<String> = named(&document)
        .into_iter()
        .filter_map(|(file, name)| wrong(file, name))
        .collect();
    let mut rows = 0;
    for table in document.split(HEAD).skip(1) {
        // Skips the head and the line below it.
        let defences = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        for row in defences {
            rows += 1;
            let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
            let tests = named(cells.last().unwrap()).len();
            if cells.len() != 3 || tests == 0 {
                faults.push(format!("a defence without a test: {row}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(rows > 40, "{rows} defences were found");
}

#[test]
fn tests_that_are_not_there_are_noticed() {
    let here = "node/tests/threat_model";
    let fault = |file: &str, name: &str| wrong(file, name).unwrap_or_default();
    assert_eq!(fault(here, "every_defence_names_tests_that_exist_and_run"), "");
    assert!(fault(here, "every_defence").contains("has no"));
    assert!(fault(here, "is_head_of").contains("is no test"));
    assert!(fault("node/tests/none", "x").contains("there is no"));
    assert!(fault("vmm/src/jail/filter_test", "one_call").contains("is ignored"));
    assert_eq!(
        named("a `b/c.rs::d`, `e` and `f.rs::g`"),
        [("b/c", "d"), ("f", "g")]
    );
}
