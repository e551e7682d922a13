use super::*;

fn row(verdict: Verdict, reruns: usize) -> Row {
    Row {
        verdict,
        counts: None,
        skips: Vec::new(),
        reruns: vec!["e2e a: triple-fault".into(); reruns],
        minutes: 1,
        commit: "abc".into(),
        date: "2026-11-24".into(),
    }
}

#[test]
fn run_is_good_with_three_reruns_and_not_with_four() {
    let mut results = Results::default();
    results.begin("abc", "2026-11-24");
    results.add("e2e", row(Verdict::Pass, 2));
    results.add("soak", row(Verdict::Pass, 1));
    results.add("nydus", row(Verdict::Skipped, 0));
    assert_eq!(results.problems(), Vec::<String>::new());
    results.add("upgrade", row(Verdict::Pass, 1));
    assert_eq!(results.problems(), ["4 reruns, 3 at most are allowed"]);
}

#[test]
fn run_is_judged_by_its_own_parts_alone() {
    let mut results = Results::default();
    results.begin("abc", "2026-11-24");
    results.add("e2e", row(Verdict::Fail, 4));
    results.add("unit", row(Verdict::TimedOut, 0));
    assert_eq!(
        results.problems(),
        ["e2e failed", "unit failed", "4 reruns, 3 at most are allowed"]
    );
    results.begin("def", "2026-11-25");
    results.add("unit", row(Verdict::Pass, 0));
    assert_eq!(results.problems(), Vec::<String>::new());
    assert_eq!(
        (results.is_of_run("unit"), results.is_of_run("e2e")),
        (true, false)
    );
    // Its last result stays.
    assert_eq!(results.parts["e2e"].verdict, Verdict::Fail);
}

#[test]
fn results_are_read_as_they_were_written() {
    let mut results = Results::default();
    results.begin("abc", "2026-11-24");
    let mut counted = row(Verdict::TimedOut, 1);
    counted.counts = Some(Counts {
        passed: 1,
        failed: 2,
        ignored: 3,
        excepted: 4,
    });
    results.add("e2e", counted);
    let text = serde_json::to_string(&results).unwrap();
    assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), results);
    assert_eq!(
        Results::read(Path::new("/no/such/file")).unwrap(),
        Results::default()
    );
}

#[test]
fn record_of_a_part_holds_what_its_labs_brought_back() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path().join("record");
    assert_eq!(recorded(&directory).unwrap(), (vec![], vec![]));
    std::fs::create_dir_all(directory.join("lab.7")).unwrap();
    std::fs::write(directory.join("skips"), "a::b\tno tap\tnot root\n").unwrap();
    std::fs::write(
        directory.join("lab.7/skips"),
        "c::d\tno x\tNOT LISTED\na::b\tno tap\tnot root\n",
    )
    .unwrap();
    std::fs::write(directory.join("reruns"), "running a\ttriple-fault\n").unwrap();
    let (skips, reruns) = recorded(&directory).unwrap();
    let tests: Vec<_> = skips
        .iter()
        .map(|skip| (skip.test.as_str(), skip.why.as_str()))
        .collect();
    assert_eq!(tests, [("a::b", "not root"), ("c::d", "NOT LISTED")]);
    assert_eq!(reruns, ["running a: triple-fault"]);
}
