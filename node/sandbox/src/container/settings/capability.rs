//! Capabilities (`capabilities(7)`), as `--cap-add` and `--cap-drop` name them.

use std::str::FromStr;

use thaw_protocol::agent::capabilities::NAMES;

use super::super::defaults;
use crate::closest::closest;

/// One capability, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    All,
    One(&'static str),
}

impl FromStr for Capability {
    type Err = String;

    /// Reads a name in upper or lower case, with or without `CAP_`.
    fn from_str(text: &str) -> Result<Capability, String> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("CAP_").unwrap_or(&upper);
        if name == "ALL" {
            return Ok(Capability::All);
        }
        let known = NAMES.iter().find(|known| **known == name);
        known.map(|known| Capability::One(known)).ok_or_else(|| {
            let closest = closest(name, NAMES);
            format!("{text:?} is no capability: write a name of capabilities(7), such as NET_ADMIN, or ALL{closest}")
        })
    }
}

/// The capabilities that a caller adds to docker's default set and drops from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    pub add: Vec<Capability>,
    pub drop: Vec<Capability>,
}

impl Chosen {
    /// The names of the resulting capabilities, with `CAP_`. As under docker, `drop` wins over a name in `add`, and a name in either wins
    /// over ALL in the other.
    pub(super) fn held(&self, privileged: bool) -> Vec<String> {
        let (add_all, drop_all) = (
            self.add.contains(&Capability::All),
            self.drop.contains(&Capability::All),
        );
        let is_held = |name: &&&'static str| {
            let one = Capability::One(name);
            let default = privileged || add_all || (!drop_all && defaults::has_capability(name));
            !self.drop.contains(&one) && (default || self.add.contains(&one))
        };
        let held = NAMES.iter().filter(is_held);
        held.map(|name| format!("CAP_{name}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(add: &[&str], drop: &[&str]) -> Vec<String> {
        let read = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect();
        let chosen = Chosen {
            add: read(add),
            drop: read(drop),
        };
        chosen.held(false)
    }

    #[test]
    fn names_are_read_as_docker_reads_them() {
        for text in ["NET_ADMIN", "CAP_NET_ADMIN", "net_admin", "cap_Net_admin"] {
            assert_eq!(text.parse(), Ok(Capability::One("NET_ADMIN")), "{text}");
        }
        assert_eq!("all".parse(), Ok(Capability::All));
        let refused = "cap_net_admins".parse::<Capability>().unwrap_err();
        assert!(
            refused.contains("cap_net_admins") && refused.ends_with("closest is NET_ADMIN"),
            "{refused}"
        );
    }

    #[test]
    fn added_and_dropped_combine_as_under_docker() {
        let default = held(&[], &[]);
        assert_eq!(default.len(), 14);
        assert!(default.contains(&"CAP_CHOWN".into()) && !default.contains(&"CAP_SYS_ADMIN".into()));
        assert!(held(&["SYS_ADMIN"], &[]).contains(&"CAP_SYS_ADMIN".into()));
        assert!(!held(&[], &["CHOWN"]).contains(&"CAP_CHOWN".into()));
        assert_eq!(held(&["CHOWN"], &["ALL"]), ["CAP_CHOWN"]);
        assert_eq!(held(&["ALL"], &[]).len(), NAMES.len());
        assert_eq!(held(&["ALL"], &["SYS_ADMIN"]).len(), NAMES.len() - 1);
        assert!(
            held(&["CHOWN"], &["CHOWN"])
                .iter()
                .all(|name| name != "CAP_CHOWN")
        );
    }
}
