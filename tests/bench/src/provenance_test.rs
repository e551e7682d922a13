use super::*;

/// A result of a release build at `commit`.
fn of(commit: &str) -> Report {
    let mut report = Report::new("boot");
    report.commit = commit.into();
    report.profile = Some("release".into());
    report
}

/// A history that has one commit, so many behind HEAD.
fn only(known: &'static str, commits: usize) -> impl Fn(&str) -> Option<usize> {
    move |commit| (commit == known).then_some(commits)
}

#[test]
fn result_of_a_release_build_of_a_recent_commit_is_shown() {
    for commits in [0, 1, MOST_COMMITS] {
        assert_eq!(refusals(&of("abc123"), only("abc123", commits)), []);
    }
}

#[test]
fn result_more_than_200_commits_old_is_refused() {
    let refused = refusals(&of("abc123"), only("abc123", MOST_COMMITS + 1));
    assert_eq!(refused, [Refusal::Old(201)]);
    assert_eq!(refused[0].to_string(), "it is 201 commits old, 200 are allowed");
}

#[test]
fn result_of_a_dirty_tree_is_refused_whatever_its_commit() {
    let recent = only("abc123", 3);
    assert_eq!(refusals(&of("abc123-dirty"), &recent), [Refusal::Dirty]);
    assert_eq!(
        refusals(&of("fff-dirty"), &recent),
        [Refusal::Dirty, Refusal::UnknownCommit]
    );
}

#[test]
fn result_of_a_commit_that_is_not_in_the_history_is_refused() {
    for commit in ["fff", "unknown", "", "HEAD", "--all"] {
        assert_eq!(
            refusals(&of(commit), only("abc123", 3)),
            [Refusal::UnknownCommit],
            "{commit}"
        );
    }
    // Only a hexadecimal number reaches git.
    refusals(&of("--all"), |commit| panic!("asked for {commit}"));
}

#[test]
fn result_of_a_debug_build_or_of_an_unknown_one_is_refused() {
    let mut report = of("abc123");
    for (profile, refusal) in [
        (Some("debug"), Refusal::DebugBuild),
        (None, Refusal::UnknownBuild),
    ] {
        report.profile = profile.map(String::from);
        assert_eq!(refusals(&report, only("abc123", 3)), [refusal]);
    }
}

#[test]
fn report_without_a_profile_reads_as_one_of_an_unknown_build() {
    let old = r#"{"machine": "m", "commit": "abc123", "rows": [], "ratios": {}}"#;
    let report: Report = serde_json::from_str(old).unwrap();
    assert_eq!(refusals(&report, only("abc123", 3)), [Refusal::UnknownBuild]);
}

#[test]
fn git_counts_the_commits_and_knows_only_its_own() {
    assert_eq!(behind_head("HEAD"), Some(0));
    assert_eq!(behind_head("0000000000000000000000000000000000000000"), None);
}

#[test]
fn parts_of_a_benchmark_are_measured_by_its_command() {
    for (name, target) in [
        ("boot", "make bench-boot"),
        ("thaw-linux", "make bench-thaw"),
        ("create-linux", "make bench-create"),
        ("service-linux", "make bench-service"),
        ("image-bytes", "make bench-image"),
    ] {
        assert_eq!(command(name), target);
        let makefile = include_str!("../../../Makefile");
        let rule = format!("\n{}:", target.trim_start_matches("make "));
        assert!(makefile.contains(&rule), "{target} is no command");
    }
}
