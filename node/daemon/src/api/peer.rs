//! The caller of a request. On a unix socket the kernel identifies it (SO_PEERCRED), over TCP a certificate or a token does.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::SystemTime;

use rustix::net::sockopt::socket_peercred;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::tenant::Tenant;

use super::grant::{Grant, Role};

/// A caller, and its grant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    client: u64,
    grant: Grant,
}

impl Peer {
    /// A user of this host: an administrator.
    pub fn user(uid: u32) -> Peer {
        Peer {
            client: uid.into(),
            grant: Grant::admin(),
        }
    }

    /// The owner of a token, by name: another token with that name belongs to the same caller.
    pub fn token(name: &str, grant: Grant) -> Peer {
        Peer {
            client: 1 << 62 | number(&within(name.as_bytes(), &grant)) >> 2,
            grant,
        }
    }

    /// The owner of a certificate, by its name in the file of roles, or else by the whole certificate. In the second case a renewed
    /// certificate is another caller.
    pub fn certificate(owner: &[u8], grant: Grant) -> Peer {
        Peer {
            client: 1 << 63 | number(&within(owner, &grant)),
            grant,
        }
    }

    /// The caller's number for idempotency keys: equal numbers mean the same caller. A user's number is its user ID; numbers of tokens and
    /// certificates are in separate ranges above all user IDs.
    pub fn client(&self) -> u64 {
        self.client
    }

    /// The number of the caller's share of the limits. All callers of a tenant have one share. Numbers of tenants are in a separate range.
    pub fn share(&self) -> u64 {
        match (self.role(), self.tenant()) {
            (Role::Read | Role::Operate, Some(tenant)) => 1 << 61 | number(tenant.as_str().as_bytes()) >> 3,
            _ => self.client,
        }
    }

    /// Its role and tenant.
    pub fn role(&self) -> Role {
        self.grant.role()
    }

    /// The tenant of the sandboxes it creates.
    pub fn tenant(&self) -> Option<&Tenant> {
        self.grant.tenant()
    }
}

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    pub peer: Peer,
    /// When its token expires.
    pub until: Option<SystemTime>,
}

/// A name within its tenant. A caller that moves to another tenant becomes another caller, and does not get the answers to its earlier
/// creations.
fn within(name: &[u8], grant: &Grant) -> Vec<u8> {
    match grant.tenant() {
        None => name.to_owned(),
        Some(tenant) => [name, b"\0", tenant.as_str().as_bytes()].concat(),
    }
}

/// The first bytes of a hash.
fn number(of: &[u8]) -> u64 {
    let hash = blake3::hash(of);
    let first = hash.as_bytes().iter().take(8);
    first.fold(0, |n, b| n << 8 | u64::from(*b))
}

/// The user whose process is at the other end of a unix socket.
pub fn user_of(socket: impl AsFd) -> std::io::Result<u32> {
    Ok(socket_peercred(socket)?.uid.as_raw())
}

/// Which users may use a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Members of this group may use the socket, besides root and the user of this process. The kernel checks membership when they connect,
    /// because the socket belongs to the group.
    pub group: Option<u32>,
}

impl Access {
    /// The mode of the socket's file.
    pub fn mode(self) -> u32 {
        match self.group {
            Some(_) => 0o660,
            None => 0o600,
        }
    }

    /// Whether a user that could connect is allowed.
    pub fn allows(self, uid: u32) -> bool {
        self.group.is_some() || uid == 0 || uid == rustix::process::geteuid().as_raw()
    }

    /// For a group by its name or number.
    pub fn for_group(group: &str) -> Result<Access, Error> {
        let groups = std::fs::read(Path::new("/etc/group")).unwrap_or_default();
        let group = group
            .parse()
            .ok()
            .or_else(|| number_of(group, &String::from_utf8_lossy(&groups)));
        match group {
            Some(_) => Ok(Access { group }),
            None => Err(Error::new(ErrorKind::Runtime, "there is no such group").remedy("see /etc/group")),
        }
    }
}

/// A group's number (group(5)).
fn number_of(group: &str, groups: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_this_user_may_and_others_by_their_group() {
        let me = rustix::process::geteuid().as_raw();
        let alone = Access::default();
        assert!(alone.allows(0) && alone.allows(me));
        assert!(!alone.allows(me + 1));
        let group = Access::for_group("12").unwrap();
        assert_eq!((group.group, group.mode()), (Some(12), 0o660));
        assert!(group.allows(me + 1));
        assert!(Access::for_group("no such group").is_err());
        assert_eq!(number_of("kvm", "root:x:0:\nkvm:x:36:a,b\n"), Some(36));
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(user_of(&one).unwrap(), me);
    }

    #[test]
    fn no_two_callers_are_one() {
        let of = |role, tenant: &str| Grant::new(role, Some(tenant.parse().unwrap())).unwrap();
        let all = [
            Peer::user(0),
            Peer::user(u32::MAX),
            Peer::token("a", Grant::admin()),
            Peer::token("b", Grant::admin()),
            Peer::token("a", of(Role::Operate, "b")),
            Peer::token("a", of(Role::Operate, "c")),
            Peer::certificate(b"a", Grant::admin()),
            Peer::certificate(b"b", Grant::admin()),
            Peer::certificate(b"a", of(Role::Read, "b")),
        ];
        let clients = all.iter().map(Peer::client);
        let distinct: std::collections::HashSet<_> = clients.collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn callers_of_a_tenant_share_its_limits() {
        let of = |role, tenant: &str| Grant::new(role, Some(tenant.parse().unwrap())).unwrap();
        let (one, two) = (
            Peer::token("one", of(Role::Operate, "acme")),
            Peer::certificate(b"two", of(Role::Read, "acme")),
        );
        assert_eq!(one.share(), two.share());
        assert_ne!(one.client(), two.client());
        assert_ne!(
            one.share(),
            Peer::token("one", of(Role::Operate, "other")).share()
        );
        let admin = Peer::token("one", of(Role::Admin, "acme"));
        assert_eq!(admin.share(), admin.client());
    }
}
