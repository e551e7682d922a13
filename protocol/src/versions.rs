//! The current and the oldest supported version of each protocol.
//!
//! A protocol's version increases with every change that an older peer would misread or refuse, such as a new
//! variant of an enum. Each side reads the other's version first, and sends only what that version has.
//! `docs/compatibility.md` states the guarantees; a test compares its table with [`ALL`].

use std::fmt;

/// A protocol between Thaw processes that may be of different releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Name for errors and documents.
    pub name: &'static str,
    /// The newest version this release speaks.
    pub current: u32,
    /// The oldest version this release supports.
    pub oldest: u32,
    /// How each side learns the other's version.
    pub read: &'static str,
}

/// VMM control ([`crate::control`]). Version 4 is the oldest supported; version 5 added
/// [`crate::control::Command::Hello`] and [`crate::control::Command::Limit`], version 6
/// [`crate::control::Command::PrepareFreeze`] and the commands that follow it, version 7
/// [`crate::control::FreezeKind::DeltaOver`] and [`crate::control::Backend::LayeredDisk`].
pub const CONTROL: Protocol = Protocol {
    name: "control",
    current: 7,
    oldest: 4,
    read: "`Create`, of a new VMM; `Hello`, of one that runs, or version 4 where the sandbox's record says so",
};

/// Chunk misses ([`crate::miss`]).
pub const MISS: Protocol = Protocol {
    name: "miss",
    current: 1,
    oldest: 1,
    read: WITH_CONTROL,
};

/// The access log ([`crate::access`]).
pub const ACCESS: Protocol = Protocol {
    name: "access",
    current: 1,
    oldest: 1,
    read: WITH_CONTROL,
};

/// The relay between a VMM and its thaw-share ([`crate::share`]).
pub const RELAY: Protocol = Protocol {
    name: "share relay",
    current: 1,
    oldest: 1,
    read: WITH_CONTROL,
};

/// For protocols over sockets that a control connection hands over after its version is agreed.
const WITH_CONTROL: &str =
    "that of the control connection which hands over the socket: 1 with `control` 4 to 7";

/// The handshake with a guest's agent ([`crate::handshake`]).
pub const HANDSHAKE: Protocol = Protocol {
    name: "handshake",
    current: 3,
    oldest: 3,
    read: "the first field of an identity and of its answer, read before the rest",
};

/// The service that thawd offers to containerd's shim (`protocol/proto/pods.proto`).
pub const PODS: Protocol = Protocol {
    name: "pods",
    current: 2,
    oldest: 1,
    read: "`Pods.Version`, before a pod is made; a thawd without that method has version 1",
};

/// Every protocol.
pub const ALL: [Protocol; 6] = [CONTROL, MISS, ACCESS, RELAY, HANDSHAKE, PODS];

/// The peer's version is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionError {
    protocol: Protocol,
    theirs: u32,
}

impl Protocol {
    /// Returns the newest version both sides support, given that the peer's newest is `theirs`. A peer of a
    /// later release decides itself whether it supports this one.
    ///
    /// # Errors
    /// The peer is too old.
    pub fn agree(self, theirs: u32) -> Result<u32, VersionError> {
        match theirs < self.oldest {
            true => Err(VersionError {
                protocol: self,
                theirs,
            }),
            false => Ok(theirs.min(self.current)),
        }
    }

    /// Checks that data of version `theirs` can be read.
    ///
    /// # Errors
    /// It is too old, or of a later release.
    pub fn check(self, theirs: u32) -> Result<(), VersionError> {
        match (self.oldest..=self.current).contains(&theirs) {
            true => Ok(()),
            false => Err(VersionError {
                protocol: self,
                theirs,
            }),
        }
    }
}

impl fmt::Display for VersionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Protocol {
            name,
            current,
            oldest,
            ..
        } = self.protocol;
        write!(
            f,
            "{name} version {} is not understood: this release speaks version {current}",
            self.theirs
        )?;
        match oldest == current {
            true => Ok(()),
            false => write!(f, " and understands {oldest} and later"),
        }
    }
}

impl std::error::Error for VersionError {}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Protocol = Protocol {
        name: "test",
        current: 5,
        oldest: 3,
        read: "",
    };

    #[test]
    fn the_newest_version_of_both_is_agreed() {
        assert!(OURS.agree(2).is_err());
        assert_eq!(OURS.agree(3), Ok(3));
        assert_eq!(OURS.agree(5), Ok(5));
        assert_eq!(OURS.agree(9), Ok(5));
        for (theirs, is_understood) in [(2, false), (3, true), (5, true), (6, false)] {
            assert_eq!(OURS.check(theirs).is_ok(), is_understood, "{theirs}");
        }
        let error = OURS.check(6).unwrap_err().to_string();
        assert_eq!(
            error,
            "test version 6 is not understood: this release speaks version 5 and understands 3 and later"
        );
    }

    #[test]
    fn the_document_has_every_protocol() {
        let document = include_str!("../../docs/compatibility.md");
        for protocol in ALL {
            let Protocol {
                name,
                current,
                oldest,
                read,
            } = protocol;
            assert!(oldest <= current);
            let row = format!("| {name} | {current} | {oldest} | {read} |");
            assert!(document.contains(&row), "docs/compatibility.md lacks: {row}");
        }
    }
}
