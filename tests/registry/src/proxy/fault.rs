//! What goes wrong, and when.

use std::collections::HashMap;
use std::time::Duration;

use super::http::{Answer, Head};

/// A way of doing wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This status and these headers, without a body, instead of asking the registry.
    Answer {
        status: u16,
        headers: Vec<(String, String)>,
    },
    /// No answer, until the client hangs up.
    Hang,
    /// The connection is closed after so many bytes of the body.
    CutAfter(u64),
    /// A slow loris: after so many bytes of the body, one byte each time.
    Trickle { after: u64, every: Duration },
    /// One bit of this byte of the body is wrong.
    Flip(u64),
    /// The whole blob, with 200, where a range was asked for.
    WholeForRange,
}

/// The requests a rule is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct On {
    pub method: Option<&'static str>,
    /// The target contains this.
    pub target: String,
    /// Only requests with a range, or only those without.
    pub range: Option<bool>,
}

impl On {
    /// Reads of blobs by range.
    pub fn ranges() -> On {
        On {
            method: Some("GET"),
            target: "/blobs/".into(),
            range: Some(true),
        }
    }

    /// Reads of blobs, whole or not.
    pub fn blobs() -> On {
        On {
            range: None,
            ..On::ranges()
        }
    }
}

/// A fault for the requests that fit, but the first `skip`, and no more than `times`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub on: On,
    pub skip: usize,
    pub times: usize,
    pub fault: Fault,
}

impl Rule {
    /// A rule for every request that fits.
    pub fn always(on: On, fault: Fault) -> Rule {
        Rule {
            on,
            skip: 0,
            times: usize::MAX,
            fault,
        }
    }

    /// A rule for the first `times` requests that fit.
    pub fn times(on: On, times: usize, fault: Fault) -> Rule {
        Rule {
            times,
            ..Rule::always(on, fault)
        }
    }
}

#[derive(Default)]
pub(super) struct Plan {
    /// Each rule, and how many requests fitted.
    rules: Vec<(Rule, usize)>,
}

impl Plan {
    pub(super) fn new(rules: Vec<Rule>) -> Plan {
        Plan {
            rules: rules.into_iter().map(|rule| (rule, 0)).collect(),
        }
    }

    pub(super) fn fault_for(&mut self, request: &Head) -> Option<Fault> {
        for (rule, seen) in &mut self.rules {
            let on = &rule.on;
            let fits = on.method.is_none_or(|method| method == request.method)
                && request.target.contains(&on.target)
                && on
                    .range
                    .is_none_or(|range| range == request.header("range").is_some());
            if !fits {
                continue;
            }
            *seen += 1;
            if *seen > rule.skip && *seen - rule.skip <= rule.times {
                return Some(rule.fault.clone());
            }
        }
        None
    }

    pub(super) fn applied(&self) -> Vec<usize> {
        self.rules
            .iter()
            .map(|(rule, seen)| seen.saturating_sub(rule.skip).min(rule.times))
            .collect()
    }
}

/// Bearer tokens (distribution's token authentication), each good for some requests.
pub(super) struct Tokens {
    uses: usize,
    given: usize,
    left: HashMap<String, usize>,
}

impl Tokens {
    pub(super) fn new(uses: usize) -> Tokens {
        Tokens {
            uses,
            given: 0,
            left: HashMap::new(),
        }
    }

    pub(super) fn given(&self) -> usize {
        self.given
    }

    /// A token, or a refusal; none for a request that carries a good one.
    pub(super) fn answer(&mut self, request: &Head) -> Option<Answer> {
        if request.target.starts_with("/token") {
            self.given += 1;
            let token = format!("token-{}", self.given);
            self.left.insert(token.clone(), self.uses);
            let json = format!(r#"{{"token":"{token}","expires_in":300}}"#);
            let headers = [("Content-Type".to_string(), "application/json".to_string())];
            return Some(Answer::new(200, &headers, json.as_bytes()));
        }
        let bearer = request
            .header("authorization")
            .and_then(|value| value.strip_prefix("Bearer "));
        if let Some(left) = bearer.and_then(|token| self.left.get_mut(token))
            && *left > 0
        {
            *left -= 1;
            return None;
        }
        let host = request.header("host").unwrap_or("localhost");
        let challenge = format!(
            r#"Bearer realm="http://{host}/token",service="thaw-test",scope="repository:any:pull",error="invalid_token""#
        );
        Some(Answer::new(401, &[("WWW-Authenticate".into(), challenge)], b""))
    }
}
