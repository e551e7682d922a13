//! Kernel parameters that `--sysctl` sets for a container. The guest has its own kernel and one container, so all of them may be set.

use std::str::FromStr;

use thaw_protocol::agent::oci;

/// A parameter and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysctl {
    name: String,
    value: String,
}

impl Sysctl {
    /// A parameter by its name, and its value.
    pub fn new(name: &str, value: &str) -> Result<Sysctl, String> {
        let is_plain = |name: &str| {
            let all = name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b));
            !name.is_empty() && all && !name.contains("..")
        };
        match is_plain(name) && !value.contains(['\0', '\n']) {
            true => Ok(Sysctl {
                name: name.into(),
                value: value.into(),
            }),
            false => Err(format!(
                "{name:?} is no kernel parameter: they are named as in `sysctl -a`"
            )),
        }
    }
}

impl FromStr for Sysctl {
    type Err = String;

    /// Reads `NAME=VALUE`.
    fn from_str(text: &str) -> Result<Sysctl, String> {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| format!("{text:?}: write NAME=VALUE, such as net.core.somaxconn=1024"))?;
        Sysctl::new(name, value)
    }
}

pub(super) fn set(linux: &mut oci::Linux, sysctls: &[Sysctl]) {
    for sysctl in sysctls {
        linux.Sysctl.insert(sysctl.name.clone(), sysctl.value.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_named_as_by_sysctl() {
        let sysctl: Sysctl = "net.core.somaxconn=1024".parse().unwrap();
        let mut linux = oci::Linux::new();
        set(&mut linux, &[sysctl]);
        assert_eq!(linux.Sysctl["net.core.somaxconn"], "1024");
        assert_eq!("kernel.domainname=a=b".parse::<Sysctl>().unwrap().value, "a=b");
        for wrong in ["net.core.somaxconn", "=1", "a b=1", "../x=1", "a=1\n2"] {
            assert!(wrong.parse::<Sysctl>().is_err(), "{wrong}");
        }
    }
}
