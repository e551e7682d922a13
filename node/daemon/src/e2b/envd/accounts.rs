//! The users and groups of a container, from its `/etc/passwd` and `/etc/group`.
//!
//! The guest writes these files, so they are hints: for names that are shown, and for where a relative path begins. At most one piece of
//! each is read.

use std::collections::HashMap;
use std::sync::Arc;

use crate::api::files::Files;

/// Where paths of an unknown user begin.
const NO_HOME: &str = "/";

/// The users and groups of a container.
#[derive(Debug, Default)]
pub struct Accounts {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
    homes: HashMap<String, String>,
}

impl Accounts {
    /// Reads them. A file that cannot be read has none.
    pub async fn read(files: &Arc<dyn Files>) -> Accounts {
        let read = async |path| match files.read(path, 0, 0).await {
            Ok(piece) => String::from_utf8_lossy(&piece.data).into_owned(),
            Err(_) => String::new(),
        };
        let (passwd, group) = tokio::join!(read("/etc/passwd"), read("/etc/group"));
        Accounts::parse(&passwd, &group)
    }

    fn parse(passwd: &str, group: &str) -> Accounts {
        let mut accounts = Accounts::default();
        for fields in lines(passwd) {
            let [name, _, id, _, _, home, ..] = fields[..] else {
                continue;
            };
            // The first of two with one id or name counts.
            if let Ok(id) = id.parse() {
                accounts.users.entry(id).or_insert_with(|| name.into());
                accounts
                    .homes
                    .entry(id.to_string())
                    .or_insert_with(|| home.into());
            }
            accounts.homes.entry(name.into()).or_insert_with(|| home.into());
        }
        for fields in lines(group) {
            let [name, _, id, ..] = fields[..] else { continue };
            if let Ok(id) = id.parse() {
                accounts.groups.entry(id).or_insert_with(|| name.into());
            }
        }
        accounts
    }

    /// The name of a user, or the number.
    pub fn user(&self, id: u32) -> String {
        self.users.get(&id).cloned().unwrap_or_else(|| id.to_string())
    }

    /// The name of a group, or the number.
    pub fn group(&self, id: u32) -> String {
        self.groups.get(&id).cloned().unwrap_or_else(|| id.to_string())
    }

    /// The home of a user, by name or number. A group after it is ignored.
    pub fn home(&self, user: &str) -> &str {
        let user = user.split(':').next().unwrap_or_default();
        let home = self.homes.get(user).map(String::as_str);
        home.filter(|home| home.starts_with('/')).unwrap_or(NO_HOME)
    }
}

fn lines(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.split(':').collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_have_names_and_homes() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\napp:x:1000:100:::/bin/sh\ntwin:x:0:0::/twin:/bin/sh\nbad:x:y:0::relative:x";
        let accounts = Accounts::parse(passwd, "root:x:0:\nusers:x:100:app\n:::");
        assert_eq!(
            (accounts.user(0), accounts.user(1000), accounts.user(7)),
            ("root".into(), "app".into(), "7".into())
        );
        assert_eq!(
            (accounts.group(100), accounts.group(7)),
            ("users".into(), "7".into())
        );
        assert_eq!(
            (accounts.home("root:x"), accounts.home("0"), accounts.home("twin")),
            ("/root", "/root", "/twin")
        );
        for homeless in ["app", "bad", "nobody"] {
            assert_eq!(accounts.home(homeless), "/", "{homeless}");
        }
    }
}
