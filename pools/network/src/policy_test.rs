use super::*;

fn policy(texts: &[&str]) -> Result<Policy, String> {
    let mut policy = NetworkPolicy::default();
    for text in texts {
        parse_into(&mut policy, text)?;
    }
    Policy::new(policy).map_err(|e| e.to_string())
}

fn decides(policy: &Policy, to: &str, protocol: u8, port: u16) -> bool {
    policy.decides(to.parse().unwrap(), protocol, port) == Decision::Allow
}

#[test]
fn policy_first_matching_rule_decides() {
    let policy = policy(&[
        "deny=10.0.0.7",
        "allow=10.0.0.0/8:443,8000-8999/tcp",
        "allow=192.0.2.1:53",
        "allow=198.51.100.0/24/icmp",
        "default=deny",
    ])
    .unwrap();
    for (to, protocol, port, allowed) in [
        ("10.0.0.7", TCP, 443, false),
        ("10.0.0.8", TCP, 443, true),
        ("10.0.0.8", TCP, 8500, true),
        ("10.0.0.8", TCP, 9000, false),
        ("10.0.0.8", UDP, 443, false),
        ("192.0.2.1", UDP, 53, true),
        ("192.0.2.1", TCP, 53, true),
        ("192.0.2.1", ICMP, 0, false),
        ("198.51.100.9", ICMP, 0, true),
        ("198.51.100.9", TCP, 1, false),
        ("203.0.113.1", TCP, 80, false),
    ] {
        assert_eq!(
            decides(&policy, to, protocol, port),
            allowed,
            "{to} {protocol} {port}"
        );
    }
    // Each port range and protocol is a rule of its own, and the default is the last.
    assert_eq!(policy.rules("denied").len(), 1 + 2 + 2 + 1 + 1);
}

#[test]
fn policy_without_rules_allows_all() {
    let policy = Policy::default();
    assert!(policy.allows_all() && decides(&policy, "8.8.8.8", 47, 0));
    assert_eq!(policy.rules("denied").len(), 1);
}

#[test]
fn invalid_rule_is_named_in_its_error() {
    for (texts, why) in [
        (&["allow"][..], "neither"),
        (&["permit=10.0.0.0/8"], "neither"),
        (&["default=maybe"], "neither"),
        (&["allow=10.0.0.0/8", "deny=10.0.0.1/8"], "rule 2"),
        (&["allow=10.0.0.0/8:0"], "no port"),
        (&["allow=10.0.0.0/8:9-1"], "no port"),
        (&["allow=10.0.0.0/8:1-"], "no port"),
        (&["allow=10.0.0.0/8:65536"], "no port"),
        (&["allow=10.0.0.0/8:80/sctp"], "no protocol"),
        (&["allow=10.0.0.0/8:80/icmp"], "no ports"),
        (&["allow=fd00::/8"], "rule 1"),
    ] {
        let error = policy(texts).unwrap_err();
        assert!(error.contains(why), "{texts:?}: {error}");
    }
    let both = EgressRule {
        allow: Some("10.0.0.0/8".into()),
        deny: Some("10.0.0.0/8".into()),
        ..EgressRule::default()
    };
    let policy = |egress| NetworkPolicy {
        egress,
        ..NetworkPolicy::default()
    };
    assert_eq!(Policy::new(policy(vec![both])), Err(PolicyError::Verdict(1)));
    assert_eq!(
        Policy::new(policy(vec![EgressRule::default()])),
        Err(PolicyError::Verdict(1))
    );
}

#[test]
fn policy_of_too_many_rules_is_refused() {
    let rule = |ports: usize| EgressRule {
        allow: Some("10.0.0.0/8".into()),
        ports: (1..=ports).map(|p| p.to_string()).collect(),
        ..EgressRule::default()
    };
    let of = |egress| {
        Policy::new(NetworkPolicy {
            egress,
            default: Egress::Deny,
            ..NetworkPolicy::default()
        })
    };
    assert!(of(vec![rule(0); MAX_RULES]).is_ok());
    assert_eq!(of(vec![rule(0); MAX_RULES + 1]), Err(PolicyError::TooMany));
    assert!(of(vec![rule(MAX_EXPANDED / 2)]).is_ok());
    assert_eq!(of(vec![rule(MAX_EXPANDED / 2 + 1)]), Err(PolicyError::TooMany));
}

proptest::proptest! {
    #[test]
    fn reading_any_text_does_not_panic(text in ".{0,40}", more in "(allow|deny)=[0-9./:,-]{0,24}[a-z]{0,5}") {
        let _ = policy(&[&text]);
        let _ = policy(&[&more]);
    }
}

#[test]
fn policy_with_domains_decides_by_name_after_its_rules() {
    let policy = policy(&[
        "allow=pypi.org",
        "deny=203.0.113.0/24",
        "allow=10.0.0.0/8:443",
        "default=allow",
    ])
    .unwrap();
    assert!(policy.has_domains() && !policy.allows_all());
    let decides = |to: &str, protocol, port| policy.decides(to.parse().unwrap(), protocol, port);
    assert_eq!(decides("203.0.113.1", TCP, 443), Decision::Deny);
    assert_eq!(decides("10.0.0.1", TCP, 443), Decision::Allow);
    assert_eq!(decides("10.0.0.1", TCP, 80), Decision::ByName);
    assert_eq!(decides("198.51.100.1", ICMP, 0), Decision::ByName);
    assert_eq!(decides("198.51.100.1", UDP, 123), Decision::ByName);
    assert_eq!(decides("198.51.100.1", UDP, 443), Decision::Deny, "HTTP/3");
    assert_eq!(decides("10.0.0.1", UDP, 443), Decision::Allow);
    // DNS goes to the node alone, also if a rule allows another server.
    for protocol in [TCP, UDP] {
        assert_eq!(decides("10.0.0.1", protocol, 53), Decision::Deny);
    }
    // Queries, the rules, and: HTTP/3, connections that exist, resolved addresses, the rest.
    assert_eq!(policy.rules("denied").len(), 2 + 3 + 4);
    // DNS, and the rules.
    assert_eq!(policy.deciding().count(), 1 + 3);
    assert!(policy.allows_name("pypi.org") && !policy.allows_name("evil.org"));
}

#[test]
fn other_domains_have_another_set() {
    let set = |texts: &[&str]| policy(texts).unwrap().resolved_set();
    assert_eq!(set(&["deny=10.0.0.0/8"]), None);
    assert_eq!(set(&["allow=a.org", "deny=10.0.0.0/8"]), set(&["allow=A.ORG"]));
    assert_ne!(set(&["allow=a.org"]), set(&["allow=b.org"]));
    let error = policy(&["allow=a.org"]).map(|policy| {
        let mut text = policy.text().clone();
        text.domains.deny.push("not a domain".into());
        Policy::new(text).unwrap_err().to_string()
    });
    assert!(error.unwrap().contains("\"not a domain\""));
}
