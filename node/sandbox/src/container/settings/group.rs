//! Supplementary groups that `--group-add` gives a container's processes. The agent looks names up in the image.

use std::str::FromStr;

use thaw_protocol::agent::oci;

/// Longest name of a group, in bytes.
const MAX_NAME: usize = 256;

/// A group, by its name in the image or its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group(String);

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Group, String> {
        let is_plain = |c: char| !c.is_control() && !c.is_whitespace() && !":,".contains(c);
        match (1..=MAX_NAME).contains(&text.len()) && text.chars().all(is_plain) {
            true => Ok(Group(text.into())),
            false => Err(format!(
                "{text:?} is no group: write a name that the image has, or a number"
            )),
        }
    }
}

pub(super) fn add(user: &mut oci::User, groups: &[Group]) {
    let names = groups.iter().map(|group| group.0.clone());
    user.AdditionalGroups.extend(names);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_names_or_numbers() {
        let mut user = oci::User::new();
        add(&mut user, &["audio".parse().unwrap(), "44".parse().unwrap()]);
        assert_eq!(user.AdditionalGroups, ["audio", "44"]);
        for wrong in ["", "a b", "a:b", "a,b", "a\0", &"x".repeat(257)] {
            assert!(wrong.parse::<Group>().is_err(), "{wrong}");
        }
    }
}
