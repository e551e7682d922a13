use proptest::prelude::*;
use thaw_protocol::api::{Reason, Stage};

use super::*;

fn read(metrics: &Metrics) -> std::collections::BTreeMap<String, grammar::Read> {
    let mut families = Families::default();
    metrics.collect(&mut families);
    grammar::read(&families.text()).unwrap()
}

fn account(stages: &[(&str, u64)], reasons: &[&str]) -> Account {
    Account {
        stages: stages
            .iter()
            .map(|(name, ms)| Stage {
                name: (*name).into(),
                start_ns: 0,
                duration_ns: ms * 1_000_000,
            })
            .collect(),
        reasons: reasons
            .iter()
            .map(|code| Reason {
                code: (*code).into(),
                text: String::new(),
            })
            .collect(),
        counts: [("faults".into(), 7), ("populated_pages".into(), 100)].into(),
        notes: Default::default(),
    }
}

#[test]
fn a_start_is_counted_with_its_stages_and_its_reasons() {
    let metrics = Metrics::default();
    let told = account(&[("thaw", 2), ("handshake", 30)], &["no-shell"]);
    metrics.started(How::Create, Duration::from_millis(40), &told);
    metrics.started(How::Create, Duration::from_millis(60), &told);
    metrics.not_started(How::Thaw, "snapshot-damaged");
    let read = read(&metrics);
    let starts = &read["thaw_start_seconds"];
    assert_eq!(starts.value(&[("how", "create"), ("le", "0.05")]), Some(1.0));
    assert_eq!(starts.value(&[("how", "create"), ("le", "+Inf")]), Some(2.0));
    let stages = &read["thaw_start_stage_seconds"];
    assert_eq!(stages.value(&[("stage", "thaw"), ("le", "0.0025")]), Some(2.0));
    assert_eq!(
        stages.value(&[("stage", "handshake"), ("le", "0.025")]),
        Some(0.0)
    );
    let slow = &read["thaw_start_slow_total"];
    assert_eq!(slow.value(&[("reason", "no-shell")]), Some(2.0));
    let failures = &read["thaw_start_failures_total"];
    assert_eq!(
        failures.value(&[("how", "thaw"), ("code", "snapshot-damaged")]),
        Some(1.0)
    );
    assert_eq!(read["thaw_start_faults_total"].value(&[]), Some(14.0));
}

#[test]
fn later_report_of_a_start_is_no_second_start() {
    let metrics = Metrics::default();
    metrics.started(How::Thaw, Duration::from_millis(4), &Account::default());
    metrics.reported(How::Thaw, &account(&[("entry", 1)], &["pages-not-resident"]));
    let read = read(&metrics);
    let everything = [("how", "thaw"), ("le", "+Inf")];
    assert_eq!(read["thaw_start_seconds"].value(&everything), Some(1.0));
    let stages = &read["thaw_start_stage_seconds"];
    assert_eq!(stages.value(&[("stage", "entry"), ("le", "+Inf")]), Some(1.0));
    let slow = &read["thaw_start_slow_total"];
    assert_eq!(slow.value(&[("reason", "pages-not-resident")]), Some(1.0));
    assert_eq!(read["thaw_start_faults_total"].value(&[]), Some(7.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Whatever the names of stages and reasons, the exposition is valid and has few labels.
    #[test]
    fn names_from_elsewhere_cannot_grow_or_break_the_exposition(
        names in proptest::collection::vec(any::<String>(), 1..200),
    ) {
        let metrics = Metrics::default();
        for name in &names {
            metrics.started(How::Thaw, Duration::ZERO, &account(&[(name, 1)], &[name]));
        }
        let read = read(&metrics);
        let slow = &read["thaw_start_slow_total"].samples;
        prop_assert!(slow.len() <= MOST_NAMES + 1);
        prop_assert_eq!(slow.iter().map(|s| s.value).sum::<f64>(), names.len() as f64);
    }
}

#[test]
fn connections_are_counted_for_as_long_as_they_last() {
    let metrics = Metrics::default();
    let connections = || read(&metrics)["thaw_api_connections"].value(&[]);
    let (one, two) = (metrics.connected(), metrics.connected());
    assert_eq!(connections(), Some(2.0));
    drop(one);
    assert_eq!(connections(), Some(1.0));
    drop(two);
    assert_eq!(connections(), Some(0.0));
}
