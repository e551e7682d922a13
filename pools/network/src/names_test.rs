use super::*;

use crate::testbed::policy;

fn addresses(texts: &[&str]) -> Vec<Ipv4Addr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn rebound_name_leads_to_no_private_address() {
    let by_name = policy(&["allow=a.org", "default=deny"]);
    for inside in [
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "100.64.0.2",
        "100.127.255.255",
        "127.0.0.1",
        "0.0.0.0",
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
    ] {
        let asked = addresses(&[inside, "203.0.113.7"]);
        let public = addresses(&["203.0.113.7"]);
        let (told, reachable) = admissible(&by_name, Range::default(), &asked);
        assert_eq!((told, reachable), (public.clone(), public), "{inside}");
    }
}

#[test]
fn private_address_that_a_rule_allows_is_told() {
    let with_rule = policy(&["allow=a.org", "allow=10.1.0.0/16:443", "allow=169.254.0.0/16"]);
    let asked = addresses(&["10.1.2.3", "10.2.0.1", "169.254.169.254", "203.0.113.7"]);
    let (told, reachable) = admissible(&with_rule, Range::default(), &asked);
    assert_eq!(told, addresses(&["10.1.2.3", "203.0.113.7"]));
    // The rule decides about its ports; the name opens none.
    assert_eq!(reachable, addresses(&["203.0.113.7"]));
}
