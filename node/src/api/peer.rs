//! Who asks: of a unix socket the kernel says (SO_PEERCRED), over TCP a certificate or a token does.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::net::sockopt::socket_peercred;
use rustls::pki_types::CertificateDer;

use crate::exit::{ExitCode, Failure};

/// One caller, as limits and idempotency keys know it: the same number is the same caller. A user's is its id, a token's is
/// above those, a certificate's above these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub client: u64,
}

impl Peer {
    /// A user of this host.
    pub fn user(uid: u32) -> Peer {
        Peer { client: uid.into() }
    }

    /// Whether it is one.
    pub fn is_user(self) -> bool {
        u32::try_from(self.client).is_ok()
    }

    /// Who brings a token, by its name: its owner stays who he is when he is given another.
    pub fn token(name: &str) -> Peer {
        Peer {
            client: 1 << 62 | number(name.as_bytes()) >> 2,
        }
    }

    /// Who has shown a certificate, by its hash.
    pub fn certificate(certificate: &CertificateDer<'_>) -> Peer {
        Peer {
            client: 1 << 63 | number(certificate),
        }
    }
}

/// The first of a hash.
fn number(of: &[u8]) -> u64 {
    let hash = blake3::hash(of);
    let first = hash.as_bytes().iter().take(8);
    first.fold(0, |n, b| n << 8 | u64::from(*b))
}

/// The user whose process is at the other end of a unix socket.
pub fn user_of(socket: impl AsFd) -> std::io::Result<u32> {
    Ok(socket_peercred(socket)?.uid.as_raw())
}

/// Who may use a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Its members may, besides root and the user this process runs as. Who is one, the kernel decides when they connect: the
    /// socket is the group's, and nobody else's.
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

    /// Whether somebody who could connect may go on.
    pub fn allows(self, uid: u32) -> bool {
        self.group.is_some() || uid == 0 || uid == rustix::process::geteuid().as_raw()
    }

    /// For a group by its name or number.
    pub fn for_group(group: &str) -> Result<Access, Failure> {
        let groups = std::fs::read(Path::new("/etc/group")).unwrap_or_default();
        let group = group
            .parse()
            .ok()
            .or_else(|| number_of(group, &String::from_utf8_lossy(&groups)));
        match group {
            Some(_) => Ok(Access { group }),
            None => Err(Failure::new(ExitCode::Runtime, "there is no such group").remedy("see /etc/group")),
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
        assert!(Peer::user(me).is_user() && !Peer::token("a").is_user());
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
    fn no_two_kinds_of_callers_are_one() {
        let certificate = |bytes: &'static [u8]| Peer::certificate(&CertificateDer::from(bytes));
        let all = [
            Peer::user(0),
            Peer::user(u32::MAX),
            Peer::token("a"),
            Peer::token("b"),
            certificate(b"a"),
            certificate(b"b"),
        ];
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
