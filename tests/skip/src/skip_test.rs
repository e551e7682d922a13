use std::process::Command;

use super::list::{accepted, parse};
use super::*;

const TEXT: &str = "# a comment\n\nupgrade::a\tTHAW_PREVIOUS names no\tmake test-upgrade runs it\nthaw_vmm::net::*\tno tap\tnot root\n";

#[test]
fn skip_is_accepted_by_its_name_and_the_beginning_of_its_reason() {
    let list = parse(TEXT);
    assert_eq!(list.len(), 2);
    for (test, reason, why) in [
        (
            "upgrade::a",
            "THAW_PREVIOUS names no programs",
            Some("make test-upgrade runs it"),
        ),
        ("upgrade::a", "no /dev/kvm", None),
        ("upgrade::ab", "THAW_PREVIOUS names no programs", None),
        ("thaw_vmm::net::x", "no tap: EPERM", Some("not root")),
        ("thaw_vmm::network", "no tap", None),
    ] {
        assert_eq!(
            accepted(&list, test, reason).map(|listed| listed.why),
            why,
            "{test} {reason}"
        );
    }
}

#[test]
#[should_panic(expected = "not `TEST<tab>REASON<tab>WHY`")]
fn entry_without_a_reason_is_refused() {
    parse("upgrade::a\tTHAW_PREVIOUS\n");
}

#[test]
fn committed_list_is_sound() {
    let list = parse(LIST);
    for (n, entry) in list.iter().enumerate() {
        let twice = list[..n]
            .iter()
            .any(|other| (other.test, other.reason) == (entry.test, entry.reason));
        assert!(!twice, "{entry:?} is listed twice");
        assert!(entry.test.contains("::"), "{entry:?}: a test is `PROGRAM::TEST`");
    }
}

#[test]
fn test_is_named_by_its_program_and_thread() {
    let program = Path::new("/target/release/deps/thaw_vmm-0123456789abcdef");
    assert_eq!(test(program, Some("bus::reads")), "thaw_vmm::bus::reads");
    assert_eq!(test(Path::new("limits"), None), "limits::unnamed thread");
}

/// Not a test of its own: what the next one runs in a process with other variables.
#[test]
#[ignore = "run by the other tests"]
fn skipping() {
    skip("this host\nis none");
}

#[test]
fn unlisted_skip_fails_in_ci_alone_and_is_recorded() {
    let directory = tempdir();
    let run = |ci: bool| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::skipping", "--include-ignored"]);
        command.env("THAW_RECORD", &directory).env_remove("THAW_CI");
        if ci {
            command.env("THAW_CI", "1");
        }
        command.output().unwrap()
    };
    let line = "thaw_test_skip::tests::skipping: this host is none";
    let here = run(false);
    assert!(here.status.success());
    let said = String::from_utf8(here.stderr).unwrap();
    assert!(said.contains(&format!("skipped: {line}")), "{said}");
    let in_ci = run(true);
    assert!(!in_ci.status.success());
    let said = String::from_utf8(in_ci.stdout).unwrap();
    assert!(
        said.contains("tests::skipping is skipped in CI: this host is none"),
        "{said}"
    );
    let record = std::fs::read_to_string(directory.join("skips")).unwrap();
    let recorded = "thaw_test_skip::tests::skipping\tthis host is none\tNOT LISTED\n";
    assert_eq!(record, recorded.repeat(2));
    std::fs::remove_dir_all(directory).unwrap();
}

fn tempdir() -> PathBuf {
    let directory = std::env::temp_dir().join(format!("thaw-skip-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}
