//! Looks up a process's user by name in `/etc/passwd` and `/etc/group` of the root file system, after that has
//! become the root.

use std::fs::File;
use std::io::Read;

use super::spec::UserSpec;
use crate::error::{Error, Result};

/// Largest passwd or group file that is read.
const MOST: u64 = 4 << 20;

/// A user's numeric ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
}

/// Looks `spec` up in the current root.
pub fn look_up(spec: &UserSpec) -> Result<User> {
    resolve(spec, &read("/etc/passwd"), &read("/etc/group"))
}

/// An image may lack these files; then only numbers work.
fn read(path: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(MOST).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn resolve(spec: &UserSpec, passwd: &str, group: &str) -> Result<User> {
    match spec {
        UserSpec::Ids { uid, gid, groups } => {
            let home = entries(passwd)
                .find(|e| field(e, 2) == Some(*uid))
                .and_then(|e| e.get(5).copied());
            Ok(User {
                uid: *uid,
                gid: *gid,
                groups: groups.clone(),
                home: home_or_root(home),
            })
        }
        UserSpec::Name { user, more_groups } => by_name(user, more_groups, passwd, group),
    }
}

fn by_name(text: &str, more_groups: &[String], passwd: &str, group: &str) -> Result<User> {
    let (name, wanted) = match text.split_once(':') {
        Some((n, g)) => (n, Some(g).filter(|g| !g.is_empty())),
        None => (text, None),
    };
    let name = if name.is_empty() { "0" } else { name };
    let number = name.parse::<u32>().ok();
    // A user's name may be a number. As in other container engines, the name is looked up first.
    let entry = entries(passwd)
        .find(|e| e[0] == name)
        .or_else(|| number.and_then(|uid| entries(passwd).find(|e| field(e, 2) == Some(uid))));
    let (uid, own_gid, home, login) = match (&entry, number) {
        (Some(e), _) => {
            let broken = || {
                Error::Invalid(format!(
                    "/etc/passwd of the image: the entry of {name:?} is broken"
                ))
            };
            let uid = field(e, 2).ok_or_else(broken)?;
            (
                uid,
                field(e, 3).ok_or_else(broken)?,
                e.get(5).copied(),
                Some(e[0]),
            )
        }
        (None, Some(uid)) => (uid, 0, None, None),
        (None, None) => {
            return Err(Error::Invalid(format!(
                "user {name:?}: no matching entry in /etc/passwd of the image"
            )));
        }
    };
    let gid = match wanted {
        None => own_gid,
        Some(name) => group_id(name, group)?,
    };
    // If a group is given, only that group applies, and those that are added.
    let mut groups: Vec<u32> = match (wanted, login) {
        (None, Some(login)) => entries(group)
            .filter(|e| {
                e.get(3)
                    .is_some_and(|members| members.split(',').any(|m| m == login))
            })
            .filter_map(|e| field(&e, 2))
            .collect(),
        _ => Vec::new(),
    };
    for name in more_groups {
        let id = group_id(name, group)?;
        if !groups.contains(&id) {
            groups.push(id);
        }
    }
    Ok(User {
        uid,
        gid,
        groups,
        home: home_or_root(home),
    })
}

/// The id of a group by name or number.
fn group_id(name: &str, group: &str) -> Result<u32> {
    let entry = entries(group).find(|e| e[0] == name);
    let id = entry.and_then(|e| field(&e, 2)).or_else(|| name.parse().ok());
    id.ok_or_else(|| {
        Error::Invalid(format!(
            "group {name:?}: no matching entry in /etc/group of the image"
        ))
    })
}

fn home_or_root(home: Option<&str>) -> String {
    home.filter(|h| h.starts_with('/')).unwrap_or("/").to_owned()
}

fn entries(file: &str) -> impl Iterator<Item = Vec<&str>> {
    file.lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(|l| l.split(':').collect::<Vec<_>>())
}

fn field(entry: &[&str], at: usize) -> Option<u32> {
    entry.get(at)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nwww:x:33:33::/var/www:/bin/false\n42:x:7:8::/home/n:/bin/sh\nbad:x:y:z\n";
    const GROUP: &str = "root:x:0:\nwww:x:33:\nssl:x:101:www,root\naudio:x:29:www\n";

    fn named(text: &str) -> Result<User> {
        with_groups(text, &[])
    }

    fn with_groups(user: &str, more: &[&str]) -> Result<User> {
        let spec = UserSpec::Name {
            user: user.into(),
            more_groups: more.iter().map(|name| (*name).to_owned()).collect(),
        };
        resolve(&spec, PASSWD, GROUP)
    }

    #[test]
    fn added_groups_are_names_or_numbers() {
        assert_eq!(with_groups("www", &["audio", "7"]).unwrap().groups, [101, 29, 7]);
        assert_eq!(with_groups("www:ssl", &["audio"]).unwrap().groups, [29]);
        let root = with_groups("", &["7"]).unwrap();
        assert_eq!((root.uid, root.groups), (0, vec![101, 7]));
        let unknown = with_groups("www", &["nogroup"]).unwrap_err().to_string();
        assert!(unknown.contains("nogroup"), "{unknown}");
    }

    #[test]
    fn user_name_gives_group_groups_and_home() {
        let user = User {
            uid: 33,
            gid: 33,
            groups: vec![101, 29],
            home: "/var/www".into(),
        };
        assert_eq!(named("www").unwrap(), user);
        assert_eq!(named("33").unwrap(), user);
    }

    #[test]
    fn given_group_replaces_all_others() {
        assert_eq!(
            named("www:ssl").unwrap(),
            User {
                uid: 33,
                gid: 101,
                groups: vec![],
                home: "/var/www".into()
            }
        );
        assert_eq!(
            named("1000:1001").unwrap(),
            User {
                uid: 1000,
                gid: 1001,
                groups: vec![],
                home: "/".into()
            }
        );
    }

    #[test]
    fn numeric_user_is_looked_up_as_name_first() {
        assert_eq!(named("42").unwrap().uid, 7);
    }

    #[test]
    fn unknown_names_and_broken_entries_are_errors() {
        for bad in ["nobody", "www:nogroup", "bad"] {
            assert!(matches!(named(bad), Err(Error::Invalid(_))), "{bad}");
        }
    }

    #[test]
    fn numbers_need_no_entry() {
        let user = resolve(
            &UserSpec::Ids {
                uid: 33,
                gid: 5,
                groups: vec![9],
            },
            PASSWD,
            GROUP,
        )
        .unwrap();
        assert_eq!(
            user,
            User {
                uid: 33,
                gid: 5,
                groups: vec![9],
                home: "/var/www".into()
            }
        );
        assert_eq!(
            named("4000").unwrap(),
            User {
                uid: 4000,
                gid: 0,
                groups: vec![],
                home: "/".into()
            }
        );
    }
}
