//! The NIS domain name of a container (`setdomainname(2)`), which `--domainname` sets.

use std::str::FromStr;

use thaw_protocol::agent::oci;

use super::super::names::is_name;

/// `__NEW_UTS_LEN`, include/uapi/linux/utsname.h.
const MAX_NAME: usize = 64;

/// A domain name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domainname(String);

impl FromStr for Domainname {
    type Err = String;

    fn from_str(text: &str) -> Result<Domainname, String> {
        match is_name(text) && text.len() <= MAX_NAME {
            true => Ok(Domainname(text.into())),
            false => Err(format!(
                "{text:?} is no domain name: write at most {MAX_NAME} of letters, digits, '-', '_' and '.'"
            )),
        }
    }
}

impl Domainname {
    pub(super) fn set(&self, linux: &mut oci::Linux) {
        // The parameter is of the container's UTS namespace.
        linux.Sysctl.insert("kernel.domainname".into(), self.0.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_name_is_a_parameter_of_the_kernel() {
        let mut linux = oci::Linux::new();
        "corp.example".parse::<Domainname>().unwrap().set(&mut linux);
        assert_eq!(linux.Sysctl["kernel.domainname"], "corp.example");
        for wrong in ["", "a b", ".a", &"x".repeat(65)] {
            assert!(wrong.parse::<Domainname>().is_err(), "{wrong}");
        }
    }
}
