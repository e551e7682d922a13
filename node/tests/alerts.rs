//! The alert rules for Prometheus: they ask for metrics that exist, link to sections that exist, and fire when they must.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn in_tree(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(in_tree(path)).unwrap()
}

/// The rules, without comments and annotations.
fn expressions(rules: &str) -> impl Iterator<Item = &str> {
    let lines = rules.lines().map(str::trim);
    lines.filter(|l| {
        !["#", "summary:", "description:", "runbook:"]
            .iter()
            .any(|p| l.starts_with(p))
    })
}

#[test]
fn alerts_use_metrics_of_the_document() {
    let document = read("docs/metrics.md");
    let name = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
    let known: BTreeSet<String> = document.lines().filter_map(name).collect();
    let rules = read("packaging/prometheus/alerts.yaml");
    let mut used = 0;
    for line in expressions(&rules) {
        let words = line.split(|c: char| !(c.is_ascii_lowercase() || c == '_'));
        for word in words.filter(|w| w.starts_with("thaw_") || w.starts_with("process_")) {
            let family = word.trim_end_matches("_bucket").trim_end_matches("_count");
            assert!(known.contains(family), "{word} is no metric: {line}");
            used += 1;
        }
    }
    assert!(used > 15, "{used}");
}

#[test]
fn alerts_link_to_sections_that_exist() {
    let rules = read("packaging/prometheus/alerts.yaml");
    let links: Vec<&str> = rules
        .lines()
        .filter_map(|l| l.trim().strip_prefix("runbook: "))
        .collect();
    assert_eq!(
        links.len(),
        rules.matches("- alert: ").count(),
        "each alert has one"
    );
    for link in links {
        let (file, section) = link.split_once('#').unwrap();
        let text = read(file);
        let mut headings = text.lines().filter_map(|l| l.strip_prefix("## "));
        assert!(
            headings.any(|h| h.to_lowercase().replace(' ', "-") == section),
            "{link}"
        );
    }
}

#[test]
fn alerts_fire_when_they_must() {
    for arguments in [
        ["check", "rules", "alerts.yaml"],
        ["test", "rules", "alerts_test.yaml"],
    ] {
        let mut promtool = Command::new("promtool");
        promtool
            .args(arguments)
            .current_dir(in_tree("packaging/prometheus"));
        let Ok(output) = promtool.output() else {
            return thaw_test_skip::skip("promtool is not installed");
        };
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    }
}
