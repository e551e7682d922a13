//! Who is at the other end of a connection: the kernel says (SO_PEERCRED).

use std::os::fd::AsFd;
use std::path::Path;

use rustix::net::sockopt::socket_peercred;

use crate::exit::{ExitCode, Failure};

/// Whose process connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub uid: u32,
}

impl Peer {
    /// Of a unix socket.
    pub fn of(socket: impl AsFd) -> std::io::Result<Peer> {
        Ok(Peer {
            uid: socket_peercred(socket)?.uid.as_raw(),
        })
    }
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
    pub fn allows(self, peer: Peer) -> bool {
        self.group.is_some() || peer.uid == 0 || peer.uid == rustix::process::geteuid().as_raw()
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
        assert!(alone.allows(Peer { uid: 0 }) && alone.allows(Peer { uid: me }));
        assert!(!alone.allows(Peer { uid: me + 1 }));
        let group = Access::for_group("12").unwrap();
        assert_eq!((group.group, group.mode()), (Some(12), 0o660));
        assert!(group.allows(Peer { uid: me + 1 }));
        assert!(Access::for_group("no such group").is_err());
        assert_eq!(number_of("kvm", "root:x:0:\nkvm:x:36:a,b\n"), Some(36));
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Peer::of(&one).unwrap(), Peer { uid: me });
    }
}
