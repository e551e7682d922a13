use super::*;

fn counts(passed: u64, failed: u64, ignored: u64, excepted: u64) -> Option<Counts> {
    Some(Counts {
        passed,
        failed,
        ignored,
        excepted,
    })
}

#[test]
fn results_of_all_programs_of_a_cargo_run_are_added() {
    let output = "\
running 5 tests
test a ... ok
test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
skipped: x::y: a reasontest result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 9 filtered out; finished in 1.00s
";
    assert_eq!(of(output), counts(8, 2, 1, 0));
}

#[test]
fn test_that_was_run_again_counts_once() {
    let output = "\
test result: ok. 10 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
== running
test result: FAILED. 4 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 9.00s
rerun: running a: triple-fault
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 6 filtered out; finished in 9.00s
== running: exit 0 after 20 s
e2e: 5 passed, 0 failed, 2 not run
";
    assert_eq!(of(output), counts(15, 0, 2, 0));
}

#[test]
fn e2e_tests_cut_off_are_counted_from_their_programs() {
    let output =
        "== running\ntest result: FAILED. 4 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out\n";
    assert_eq!(of(output), counts(4, 1, 2, 0));
}

#[test]
fn suite_table_counts_passes_and_explained_failures() {
    let output = "runc: 167 pass, 4 fail, 7 skip. Thaw: 155 pass, 11 fail, 10 skip. Passing with runc alone: 12, of which 2 without a reason.\n";
    assert_eq!(of(output), counts(155, 2, 0, 10));
    let none = "runc: 2 pass. Thaw: 2 fail. Passing with runc alone: 2, of which 2 without a reason.\n";
    assert_eq!(of(none), counts(0, 2, 0, 0));
}

#[test]
fn output_that_counts_nothing_has_no_counts() {
    assert_eq!(of(""), None);
    assert_eq!(
        of("e2e: nothing\ntest result: odd\nrunc: words Thaw: words\n"),
        None
    );
}
