//! `Server-Timing`: a header with the durations of a creation's stages (W3C Server Timing).
//!
//! Invariant: whatever the names of stages, the header is valid and has at most [`MOST`] entries.

use axum::http::{HeaderName, HeaderValue};
use thaw_protocol::api::Account;

/// The header.
pub const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Most stages, and most reasons.
const MOST: usize = 64;

/// The stages with their milliseconds, `total` to the end of the last, and each reason for slowness as `slow` with the reason's code.
pub fn server_timing(account: &Account) -> HeaderValue {
    let milliseconds = |ns: u64| ns as f64 / 1e6;
    let ends = account
        .stages
        .iter()
        .map(|s| s.start_ns.saturating_add(s.duration_ns));
    let total = [("total".to_owned(), ends.max().unwrap_or(0))];
    let stages = account.stages.iter().take(MOST);
    let stages = stages.map(|stage| (token(&stage.name), stage.duration_ns));
    let timed = stages
        .chain(total)
        .map(|(name, ns)| format!("{name};dur={:.3}", milliseconds(ns)));
    let slow = account.reasons.iter().take(MOST);
    let slow = slow.map(|reason| format!("slow;desc={}", token(&reason.code)));
    let text = timed.chain(slow).collect::<Vec<_>>().join(", ");
    HeaderValue::try_from(text).expect("tokens, numbers and punctuation are a header's value")
}

/// A name as an HTTP token (RFC 9110, 5.6.2).
fn token(name: &str) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    let token: String = name.chars().map(|c| if good(c) { c } else { '-' }).collect();
    match token.is_empty() {
        true => "-".into(),
        false => token,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use thaw_protocol::api::{Reason, Stage};

    use super::*;

    fn account(stages: &[(&str, u64, u64)], reasons: &[&str]) -> Account {
        let stage = |(name, start_ns, duration_ns): &(&str, u64, u64)| Stage {
            name: (*name).into(),
            start_ns: *start_ns,
            duration_ns: *duration_ns,
        };
        let reason = |code: &&str| Reason {
            code: (*code).into(),
            text: "because".into(),
        };
        Account {
            stages: stages.iter().map(stage).collect(),
            reasons: reasons.iter().map(reason).collect(),
            ..Account::default()
        }
    }

    #[test]
    fn every_stage_has_its_milliseconds() {
        let told = account(
            &[("vmm start", 0, 1_500_000), ("thaw", 1_000_000, 2_000_400)],
            &["no-shell"],
        );
        assert_eq!(
            server_timing(&told),
            "vmm-start;dur=1.500, thaw;dur=2.000, total;dur=3.000, slow;desc=no-shell"
        );
        assert_eq!(server_timing(&Account::default()), "total;dur=0.000");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// Whatever the names of stages, the header has few entries, each a token with a parameter.
        #[test]
        fn names_from_elsewhere_cannot_break_the_header(
            names in proptest::collection::vec((any::<String>(), any::<u64>()), 0..200),
        ) {
            let stages: Vec<_> = names.iter().map(|(name, ns)| (name.as_str(), *ns, *ns)).collect();
            let reasons: Vec<_> = names.iter().map(|(name, _)| name.as_str()).collect();
            let header = server_timing(&account(&stages, &reasons));
            let text = header.to_str().unwrap();
            let entries: Vec<_> = text.split(", ").collect();
            prop_assert_eq!(entries.len(), 2 * names.len().min(MOST) + 1);
            for entry in entries {
                let (name, parameter) = entry.split_once(';').unwrap();
                let (key, value) = parameter.split_once('=').unwrap();
                prop_assert_eq!(token(name), name);
                prop_assert_eq!(token(value), value);
                prop_assert!(key == "dur" && value.parse::<f64>().is_ok() || key == "desc" && name == "slow");
            }
        }
    }
}
