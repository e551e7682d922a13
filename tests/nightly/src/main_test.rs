use super::*;

/// Cargo runs tests in their package's directory.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

#[test]
fn committed_document_is_what_the_committed_results_render() {
    let root = Path::new(ROOT);
    let results = Results::read(&root.join(KEPT)).unwrap();
    let rendered = table::document(&results);
    if std::env::var_os("THAW_WRITE_DOCS").is_some() {
        std::fs::write(root.join(DOCUMENT), &rendered).unwrap();
    }
    let committed = std::fs::read_to_string(root.join(DOCUMENT)).unwrap_or_default();
    assert!(
        committed == rendered,
        "{DOCUMENT} is not what {KEPT} renders: run the tests with THAW_WRITE_DOCS=1"
    );
}

#[test]
fn parts_are_chosen_by_name_and_run_in_their_own_order() {
    let names = |words: &[&str]| words.iter().map(|word| word.to_string()).collect::<Vec<_>>();
    let chosen_names = |words: &[&str]| {
        chosen(&names(words)).map(|parts| parts.iter().map(|part| part.name).collect::<Vec<_>>())
    };
    assert_eq!(chosen_names(&["upgrade", "fuzz"]).unwrap(), ["fuzz", "upgrade"]);
    assert_eq!(chosen(&[]).unwrap().len(), PARTS.len());
    let refused = chosen_names(&["fuzz", "fuz"]).unwrap_err();
    assert!(
        refused.starts_with("there is no part fuz; there are lint, "),
        "{refused}"
    );
}

#[test]
fn every_script_of_a_part_is_there_and_every_name_is_given_once() {
    for (n, part) in PARTS.iter().enumerate() {
        assert!(PARTS[..n].iter().all(|other| other.name != part.name));
        let command = part.command.split(' ').next().unwrap();
        let is_there = command == "make" || Path::new(ROOT).join(command).exists();
        assert!(is_there, "{}: {command} is not there", part.name);
    }
}

#[test]
fn exit_code_of_a_part_is_its_verdict() {
    for (command, verdict) in [
        ("exit 0", Verdict::Pass),
        ("exit 1", Verdict::Fail),
        ("exit 77", Verdict::Skipped),
        ("exit 124", Verdict::TimedOut),
    ] {
        let part = Part {
            name: "self-test",
            about: "",
            command,
            minutes: 1,
            reasons: None,
        };
        let directory = tempfile::tempdir().unwrap();
        let row = run_part(&part, "abc", directory.path(), Stdio::null()).unwrap();
        assert_eq!((row.verdict, row.counts), (verdict, None));
    }
}

#[test]
fn part_that_fails_keeps_its_counts_skips_and_reruns() {
    let part = Part {
        name: "self-test",
        about: "",
        command: "echo 'test result: FAILED. 3 passed; 1 failed; 0 ignored;'; mkdir -p $THAW_RECORD; \
                  printf 'a::b\\tno tap\\tnot root\\n' >$THAW_RECORD/skips; printf 'x\\texit-125\\n' >$THAW_RECORD/reruns; \
                  echo $THAW_COMMIT $THAW_CI; exit 3",
        minutes: 1,
        reasons: None,
    };
    let directory = tempfile::tempdir().unwrap();
    // Shown, it would be counted as a result of this test program.
    let row = run_part(&part, "abc", directory.path(), Stdio::null()).unwrap();
    assert_eq!(row.verdict, Verdict::Fail);
    let counts = row.counts.unwrap();
    assert_eq!((counts.passed, counts.failed), (3, 1));
    assert_eq!(
        (row.skips[0].why.as_str(), row.reruns.as_slice()),
        ("not root", &["x: exit-125".to_string()][..])
    );
    let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
    assert!(log.ends_with("abc 1\n"), "{log}");
}
