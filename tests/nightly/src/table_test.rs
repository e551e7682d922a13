use super::*;
use crate::counts::Counts;
use crate::results::Skip;

fn row(verdict: Verdict, counts: Option<Counts>) -> Row {
    Row {
        verdict,
        counts,
        skips: vec![Skip {
            test: "thaw_vmm::a".into(),
            reason: "no tap".into(),
            why: "not root".into(),
        }],
        reruns: vec!["running a: triple-fault".into()],
        minutes: 12,
        commit: "abc".into(),
        date: "2026-11-24".into(),
    }
}

fn line<'a>(text: &'a str, begins: &str) -> &'a str {
    text.lines()
        .find(|line| line.starts_with(begins))
        .unwrap_or_else(|| panic!("no line begins with {begins}:\n{text}"))
}

#[test]
fn parts_of_other_runs_show_their_last_result_and_its_commit() {
    let mut results = Results::default();
    let counts = Counts {
        passed: 5,
        failed: 1,
        ignored: 2,
        excepted: 0,
    };
    results.begin("abc", "2026-11-24");
    results.add("unit", row(Verdict::Fail, Some(counts)));
    results.begin("def", "2026-11-25");
    results.add("lint", row(Verdict::Pass, None));
    let text = document(&results);
    assert!(
        line(&text, "| unit |")
            .ends_with("| not in this run; last: **FAIL** | 5 | 1 | 1 | 1 | 12 | `abc` | 2026-11-24 |")
    );
    assert!(line(&text, "| lint |").contains("| pass |  |  | 1 | 1 | 12 |"));
    assert!(line(&text, "| fuzz |").contains("| never run |"));
    let run = format!(
        "2026-11-25, commit `def`, 1 of {} parts, 1 reruns (3 at most are allowed): good.",
        PARTS.len()
    );
    assert!(line(&text, "The latest run").contains(&run));
    assert_eq!(
        line(&text, "- unit: `thaw_vmm"),
        "- unit: `thaw_vmm::a`: no tap (not root)"
    );
    assert!(text.contains("- lint: running a: triple-fault\n"));
    assert!(text.contains("- unit: 2 tests marked `#[ignore]`\n"));
}

#[test]
fn run_that_failed_says_so_in_its_first_sentence() {
    let mut results = Results::default();
    results.begin("abc", "2026-11-24");
    results.add("unit", row(Verdict::TimedOut, None));
    let text = document(&results);
    assert!(line(&text, "The latest run").ends_with("**not good**: unit failed."));
    assert!(line(&text, "| unit |").contains("| **FAIL**: out of time |"));
}

#[test]
fn tests_with_a_reason_in_a_suite_s_document_count_as_skipped() {
    let mut results = Results::default();
    results.begin("abc", "2026-11-24");
    let counts = Counts {
        passed: 155,
        failed: 0,
        ignored: 0,
        excepted: 12,
    };
    results.add("containerd", row(Verdict::Pass, Some(counts)));
    let text = document(&results);
    assert!(line(&text, "| containerd |").contains("| 155 | 0 | 13 | 1 |"));
    assert!(line(&text, "- containerd: 12 tests").ends_with("[containerd-suite.md](containerd-suite.md)"));
}
