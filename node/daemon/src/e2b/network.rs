//! Where a sandbox may connect to, in E2B's words: allowed networks and domains come before denied ones, and what is in neither is allowed.
//! They become the rules and the domains of thawd's network policy, and these become E2B's words again.
//!
//! Invariant: a restriction that a policy cannot express is refused, never dropped.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thaw_network::domains::Pattern;
use thaw_protocol::api::{DomainLists, Egress, EgressRule, NetworkPolicy};

use super::failure::Failure;

/// The network of all addresses.
const ALL: &str = "0.0.0.0/0";

/// The network of a request for a sandbox, and of a sandbox in an answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Network {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allow_out: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deny_out: Vec<String>,
    /// Whether anyone may connect to its ports. In answers only if not.
    #[serde(skip_serializing_if = "Option::is_none")]
    allow_public_traffic: Option<bool>,
    /// The name servers for domains. Ignored: the node's own resolve them.
    #[serde(skip_serializing)]
    dns_servers: Option<Vec<String>>,
    #[serde(skip_serializing)]
    egress_proxy: Option<Value>,
    #[serde(skip_serializing)]
    mask_request_host: Option<Value>,
    #[serde(skip_serializing)]
    https_ports: Vec<Value>,
    #[serde(skip_serializing)]
    rules: serde_json::Map<String, Value>,
}

/// A change of a running sandbox's network. What is absent is reset.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkChange {
    #[serde(rename = "allowOut")]
    allow_out: Vec<String>,
    #[serde(rename = "denyOut")]
    deny_out: Vec<String>,
    #[serde(rename = "dnsServers")]
    dns_servers: Option<Vec<String>>,
    #[serde(rename = "egressProxy")]
    egress_proxy: Option<Value>,
    rules: serde_json::Map<String, Value>,
    /// The only field in this form.
    allow_internet_access: Option<bool>,
}

impl NetworkChange {
    /// The whole new policy.
    ///
    /// # Errors
    /// See [`Network::policy`].
    pub fn policy(self) -> Result<NetworkPolicy, Failure> {
        let network = Network {
            allow_out: self.allow_out,
            deny_out: self.deny_out,
            dns_servers: self.dns_servers,
            egress_proxy: self.egress_proxy,
            rules: self.rules,
            ..Network::default()
        };
        network.policy(self.allow_internet_access)
    }
}

impl Network {
    /// Whether only requests with a token may connect to its ports.
    pub fn is_private(&self) -> bool {
        self.allow_public_traffic == Some(false)
    }

    /// Whether it says only who may connect to the sandbox's ports, and not where the sandbox may connect to.
    pub fn is_of_ports(&self) -> bool {
        let rest = Network {
            allow_public_traffic: None,
            ..self.clone()
        };
        self.allow_public_traffic.is_some() && rest == Network::default()
    }

    /// The words for the policy of a sandbox, if it has one, and for its ports; `None` if all is allowed.
    pub fn shown(policy: Option<&NetworkPolicy>, is_private: bool) -> Option<Network> {
        let shown = policy.and_then(Network::of_policy);
        match is_private {
            true => Some(Network {
                allow_public_traffic: Some(false),
                ..shown.unwrap_or_default()
            }),
            false => shown,
        }
    }

    /// The policy of a sandbox with this network. `internet` is `false` to deny what is not allowed.
    ///
    /// # Errors
    /// It says something that a policy cannot express, or a network that cannot be.
    pub fn policy(&self, internet: Option<bool>) -> Result<NetworkPolicy, Failure> {
        let unsupported = [
            ("network.egressProxy", self.egress_proxy.is_some()),
            ("network.maskRequestHost", self.mask_request_host.is_some()),
            ("network.httpsPorts", !self.https_ports.is_empty()),
            ("network.rules", !self.rules.is_empty()),
        ];
        if let Some((what, _)) = unsupported.into_iter().find(|(_, is_there)| *is_there) {
            return Err(Failure::unsupported(what));
        }
        let (allowed_domains, allowed) = divided(&self.allow_out);
        let (denied_domains, denied) = divided(&self.deny_out);
        let allowed = allowed.into_iter().map(|to| EgressRule {
            allow: Some(to),
            ..EgressRule::default()
        });
        let denied = denied.into_iter().map(|to| EgressRule {
            deny: Some(to),
            ..EgressRule::default()
        });
        let denies_all = internet == Some(false) || self.deny_out.iter().any(|to| to == ALL);
        if !allowed_domains.is_empty() && !denies_all {
            let why = format!(
                "network: allowOut has domains, so denyOut has to have {ALL}: otherwise they allow nothing more"
            );
            return Err(Failure::Bad(why));
        }
        // Allowed ones come first here; in a policy the longest decides.
        let is_left = |denied: &&Pattern| !allowed_domains.iter().any(|allowed| allowed.covers(denied));
        let domains = DomainLists {
            deny: denied_domains
                .iter()
                .filter(is_left)
                .map(Pattern::to_string)
                .collect(),
            allow: allowed_domains.iter().map(Pattern::to_string).collect(),
        };
        let policy = match self.allow_out.iter().any(|to| to == ALL) {
            true => NetworkPolicy::default(),
            false => NetworkPolicy {
                egress: allowed.chain(denied).collect(),
                default: if denies_all { Egress::Deny } else { Egress::Allow },
                domains,
            },
        };
        let read = thaw_network::Terms::read(Some(&policy), &[]);
        read.map(|_| policy).map_err(|why| {
            let why =
                format!("network: {why}. allowOut and denyOut have IPv4 networks, addresses and domains");
            Failure::Bad(why)
        })
    }

    /// The words for a policy; `None` for one that denies nothing.
    fn of_policy(policy: &NetworkPolicy) -> Option<Network> {
        if *policy == NetworkPolicy::default() {
            return None;
        }
        let rules = policy.egress.iter();
        let denies_all = policy.default == Egress::Deny || !policy.domains.allow.is_empty();
        let domains = policy.domains.clone();
        Some(Network {
            allow_out: rules
                .clone()
                .filter_map(|rule| rule.allow.clone())
                .chain(domains.allow)
                .collect(),
            deny_out: rules
                .filter_map(|rule| rule.deny.clone())
                .chain(domains.deny)
                .chain(denies_all.then(|| ALL.to_owned()))
                .collect(),
            ..Network::default()
        })
    }
}

/// The domains of a list, and everything else but [`ALL`].
fn divided(list: &[String]) -> (Vec<Pattern>, Vec<String>) {
    let (mut domains, mut others) = (Vec::new(), Vec::new());
    for to in list.iter().filter(|to| *to != ALL) {
        match to.parse() {
            Ok(domain) => domains.push(domain),
            Err(_) => others.push(to.clone()),
        }
    }
    (domains, others)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(network: Value) -> Network {
        serde_json::from_value(network).unwrap()
    }

    fn policy(network: Value, internet: Option<bool>) -> NetworkPolicy {
        read(network).policy(internet).unwrap()
    }

    #[test]
    fn allowed_networks_come_before_denied_ones() {
        let network =
            json!({"denyOut": ["0.0.0.0/0", "192.0.2.0/24"], "allowOut": ["192.0.2.7", "198.51.100.0/24"]});
        let expected = json!({"default": "deny", "egress": [{"allow": "192.0.2.7"}, {"allow": "198.51.100.0/24"}, {"deny": "192.0.2.0/24"}]});
        let made = policy(network, None);
        assert_eq!(serde_json::to_value(&made).unwrap(), expected);
        let shown = serde_json::to_value(Network::of_policy(&made)).unwrap();
        assert_eq!(
            shown,
            json!({"allowOut": ["192.0.2.7", "198.51.100.0/24"], "denyOut": ["192.0.2.0/24", "0.0.0.0/0"]})
        );
        assert_eq!(read(shown).policy(None).unwrap(), made);
    }

    #[test]
    fn no_internet_denies_what_is_not_allowed() {
        assert_eq!(policy(json!({}), Some(false)).default, Egress::Deny);
        assert_eq!(
            policy(json!({"denyOut": ["0.0.0.0/0"]}), None),
            policy(json!({}), Some(false))
        );
        let all = policy(
            json!({"allowOut": ["0.0.0.0/0"], "denyOut": ["192.0.2.0/24"]}),
            Some(false),
        );
        assert_eq!(all, NetworkPolicy::default());
        for open in [None, Some(true)] {
            assert_eq!(
                Network::of_policy(&policy(json!({"dnsServers": ["192.0.2.53"]}), open)),
                None
            );
        }
    }

    #[test]
    fn private_ports_are_shown_and_restrict_nothing_else() {
        let network = read(json!({"allowPublicTraffic": false}));
        assert!(network.is_private() && network.is_of_ports());
        assert_eq!(network.policy(None).unwrap(), NetworkPolicy::default());
        let open = read(json!({"allowPublicTraffic": true, "denyOut": ["192.0.2.1"]}));
        assert!(!open.is_private() && !open.is_of_ports() && !Network::default().is_of_ports());
        let shown = |policy, is_private| serde_json::to_value(Network::shown(policy, is_private)).unwrap();
        let denying = open.policy(None).unwrap();
        assert_eq!(shown(None, true), json!({"allowPublicTraffic": false}));
        assert_eq!(
            shown(Some(&denying), true),
            json!({"allowPublicTraffic": false, "denyOut": ["192.0.2.1"]})
        );
        assert_eq!(shown(Some(&denying), false), json!({"denyOut": ["192.0.2.1"]}));
        assert_eq!(shown(None, false), Value::Null);
    }

    #[test]
    fn domains_become_the_domains_of_the_policy() {
        let network = json!({
            "allowOut": ["pypi.org", "*.Example.com", "192.0.2.7"],
            "denyOut": ["0.0.0.0/0", "evil.example.com", "evil.org"],
        });
        let made = policy(network, None);
        let expected = json!({
            "default": "deny", "egress": [{"allow": "192.0.2.7"}],
            // What is allowed comes first at E2B, so the denied name below it is none.
            "domains": {"allow": ["pypi.org", "*.example.com"], "deny": ["evil.org"]},
        });
        assert_eq!(serde_json::to_value(&made).unwrap(), expected);
        let shown = serde_json::to_value(Network::of_policy(&made)).unwrap();
        assert_eq!(
            shown,
            json!({"allowOut": ["192.0.2.7", "pypi.org", "*.example.com"], "denyOut": ["evil.org", "0.0.0.0/0"]})
        );
        assert_eq!(read(shown).policy(None).unwrap(), made);
        let denying = policy(json!({"denyOut": ["evil.org"]}), None);
        assert_eq!(
            (denying.default, denying.domains.deny),
            (Egress::Allow, vec!["evil.org".to_owned()])
        );
        let Err(Failure::Bad(why)) = read(json!({"allowOut": ["pypi.org"]})).policy(None) else {
            panic!("allowed domains without a denial of the rest were taken");
        };
        assert!(why.contains("0.0.0.0/0"), "{why}");
    }

    #[test]
    fn restrictions_that_no_policy_has_are_refused() {
        for (network, name) in [
            (
                json!({"egressProxy": {"address": "proxy.example:1080"}}),
                "egressProxy",
            ),
            (json!({"maskRequestHost": "x"}), "maskRequestHost"),
            (json!({"httpsPorts": [443]}), "httpsPorts"),
            (json!({"rules": {"a.example": []}}), "rules"),
        ] {
            let Err(Failure::Unsupported(why)) = read(network).policy(None) else {
                panic!("{name} was taken");
            };
            assert!(why.contains(name), "{why}");
        }
        for bad in ["com", "*", "a b.org", "::1", "", "192.0.2.1/33"] {
            let refused = read(json!({"allowOut": [bad]})).policy(None);
            assert!(matches!(refused, Err(Failure::Bad(_))), "{bad}");
        }
        assert!(serde_json::from_value::<Network>(json!({"denyIn": []})).is_err());
        let change: NetworkChange =
            serde_json::from_value(json!({"allow_internet_access": false, "allowOut": ["192.0.2.7"]}))
                .unwrap();
        assert_eq!(change.policy().unwrap().default, Egress::Deny);
    }
}
