//! Writable host directories: between who starts thaw-share, thaw-share, and the VMM whose guest uses them.
//!
//! **Starting it.** thaw-share finds, as descriptor [`SETUP_FD`], a SEQPACKET unix socket, over which it receives one
//! [`Serve`], with these descriptors beside it: the *relay*, one end of a STREAM socketpair; then for each of
//! [`Serve::shares`] the directory or file to show (`O_PATH` will do), of the mount namespace thaw-share was started in.
//! Behind those there may be the *ledger*, a file for reading and writing in which thaw-share writes down which file each node id of the guest
//! means; and behind that the mount namespace of a thaw-share that ended, which is used as it is, whatever [`Serve::shares`] says.
//! It answers one `Result<(), String>`, after which both let go of the setup socket: [`Ok`] means that it is jailed and
//! serves. It ends when the other end of the relay is closed, and for no other reason of its own; that end goes to the VMM as
//! [`crate::control::Backend::Share`] and must be kept by nobody else: so a share never outlives its guest.
//!
//! **What the guest sees.** One virtio-fs device, tag [`TAG`]. Its root is read-only and holds an entry [`Share::name`] for
//! each share, a mount of its own in the guest (`st_dev` differs, a rename from one to another is EXDEV). Mounts below a shared
//! directory are there, as they were when it was started. What the host changes is seen within [`FRESH_MS`].
//!
//! **While it runs** whoever has the rights over its mount namespace may mount more there: on an entry of the root it makes for that,
//! of which there may be [`Serve::slots`]. thaw-share has no part in it, and no right to it.
//!
//! **The relay.** FUSE messages (the guest's kernel and thaw-share negotiate them; neither side of the relay reads more than
//! their length), each behind a header of little-endian `u32`s, in streams: a message may have 1 MiB and more, which a packet cannot
//! hold; and shared memory would give a VMM that was taken over a window into a process that may write anybody's files.
//!
//! | direction | header | then |
//! |---|---|---|
//! | to thaw-share | [`RequestHeader`]: id, length, room | `length` bytes: the message |
//! | to the VMM | [`ReplyHeader`]: id, length | `length` bytes: its reply |
//!
//! Each request with room gets exactly one reply, in any order; one without (FORGET, BATCH_FORGET, INTERRUPT) gets none. Ids are
//! the VMM's to choose, distinct among those not answered. Either side that receives what cannot be closes the relay.
//!
//! **When it dies.** What the guest has waiting is answered EIO, but for names it looks up ([`LOOKUP`]), which change nothing. Those and all later
//! requests wait for [`PATIENCE_MS`]. Within it whoever owns the sandbox may start another thaw-share, with the same ledger, and attach its
//! relay as [`crate::control::Backend::Share`] again: the VMM sends it the guest's own INIT first, then what waits. Node ids are as they were;
//! files that were opened before can be read, and answer EIO otherwise. A relay may come later, too; until it does every request is answered EIO.
//! VMMs of releases before this refuse a second relay: for their guests it is EIO for good.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// The descriptor number at which thaw-share finds its setup socket.
pub const SETUP_FD: i32 = 3;
/// Tag the guest mounts the device by.
pub const TAG: &str = "shared";
/// How long a guest may believe what it has looked up, in milliseconds.
pub const FRESH_MS: u64 = 1000;

/// How long a guest waits for another thaw-share when its own has died, in milliseconds.
pub const PATIENCE_MS: u64 = 10_000;
/// The operation by which a guest looks a name up (`FUSE_LOOKUP`).
pub const LOOKUP: u32 = 1;
/// The operation by which a guest begins, once in the life of its mount (`FUSE_INIT`).
pub const INIT: u32 = 26;

/// Bytes of a message: a FUSE header, and at most 1 MiB of data behind at most 4 KiB of headers.
pub const MESSAGE: RangeInclusive<u32> = 40..=(1 << 20) + 4096;
/// Bytes of a reply.
pub const REPLY: RangeInclusive<u32> = 16..=(1 << 20) + 4096;
/// Most requests that are not answered. A VMM sends no more.
pub const OUTSTANDING: usize = 256;
/// Most shares of one thaw-share.
pub const SHARES: usize = 128;
/// Most shares that are mounted while it runs.
pub const SLOTS: u32 = 1024;
/// Bytes of a [`Share::name`].
pub const NAME: RangeInclusive<usize> = 1..=64;

/// A directory, or a file, to show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Its entry under the device's root: letters, digits, `-`, `_` and `.`, but no dot first; unlike any other's.
    pub name: String,
    /// Nothing of it can be changed: the host's kernel sees to it.
    pub read_only: bool,
}

impl Share {
    /// Whether the name can be one.
    pub fn has_good_name(&self) -> bool {
        is_good_name(&self.name)
    }
}

/// Whether a share can have this name.
pub fn is_good_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    NAME.contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain)
}

/// What thaw-share is to serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serve {
    pub shares: Vec<Share>,
    /// For how many more there is to be room, at most [`SLOTS`]. With room there may be none at first.
    pub slots: u32,
    /// Whether the guest may make device nodes (CAP_MKNOD). They are nodes to others: thaw-share opens none.
    pub devices: bool,
}

/// Before a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    pub id: u32,
    /// Bytes of the message, [`MESSAGE`].
    pub length: u32,
    /// Bytes its reply may have, [`REPLY`]; 0: no reply is due.
    pub room: u32,
}

/// Before a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    /// Whose it is.
    pub id: u32,
    /// Bytes of the reply, [`REPLY`], no more than there was room.
    pub length: u32,
}

/// Why a header is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("a message of {0} bytes")]
    Length(u32),
    #[error("room for {0} bytes")]
    Room(u32),
}

fn word<const AT: usize, const N: usize>(bytes: &[u8; N]) -> u32 {
    u32::from_le_bytes([bytes[AT], bytes[AT + 1], bytes[AT + 2], bytes[AT + 3]])
}

impl RequestHeader {
    pub const BYTES: usize = 12;

    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.id.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..].copy_from_slice(&self.room.to_le_bytes());
        bytes
    }

    /// Reads what [`Self::encode`] wrote, if it is in its bounds.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, HeaderError> {
        let header = RequestHeader {
            id: word::<0, _>(bytes),
            length: word::<4, _>(bytes),
            room: word::<8, _>(bytes),
        };
        match header {
            RequestHeader { length, .. } if !MESSAGE.contains(&length) => Err(HeaderError::Length(length)),
            RequestHeader { room, .. } if room != 0 && !REPLY.contains(&room) => Err(HeaderError::Room(room)),
            header => Ok(header),
        }
    }
}

impl ReplyHeader {
    pub const BYTES: usize = 8;

    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.id.to_le_bytes());
        bytes[4..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads what [`Self::encode`] wrote, if it is in its bounds.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, HeaderError> {
        let header = ReplyHeader {
            id: word::<0, _>(bytes),
            length: word::<4, _>(bytes),
        };
        match REPLY.contains(&header.length) {
            true => Ok(header),
            false => Err(HeaderError::Length(header.length)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_lead_nowhere_else() {
        let is_good = |name: &str| {
            Share {
                name: name.into(),
                read_only: false,
            }
            .has_good_name()
        };
        assert!(is_good("0") && is_good("rootfs-abc_1.d") && is_good(&"x".repeat(64)));
        for bad in [
            "",
            ".",
            "..",
            ".hidden",
            "a/b",
            "a b",
            "a\0",
            "\u{e4}",
            &"x".repeat(65),
        ] {
            assert!(!is_good(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_request_is_refused_at_each_bound_whose_other_side_is_taken() {
        let taken = |length, room| RequestHeader::decode(&RequestHeader { id: 1, length, room }.encode());
        let (least, most) = (*MESSAGE.start(), *MESSAGE.end());
        for (length, is_taken) in [
            (0, false),
            (least - 1, false),
            (least, true),
            (most, true),
            (most + 1, false),
        ] {
            assert_eq!(taken(length, 0).is_ok(), is_taken, "a message of {length} bytes");
        }
        let (least, most) = (*REPLY.start(), *REPLY.end());
        // A reply has room for its header (fuse_out_header, 16 bytes), or there is to be none.
        assert_eq!(least, 16);
        for (room, is_taken) in [
            (0, true),
            (1, false),
            (least - 1, false),
            (least, true),
            (most, true),
            (most + 1, false),
        ] {
            assert_eq!(
                taken(*MESSAGE.start(), room).is_ok(),
                is_taken,
                "room for {room} bytes"
            );
        }
    }

    proptest! {
        #[test]
        fn a_header_in_bounds_comes_back_and_no_other_is_taken(bytes in any::<[u8; 12]>()) {
            if let Ok(header) = RequestHeader::decode(&bytes) {
                prop_assert!(MESSAGE.contains(&header.length));
                prop_assert!(header.room == 0 || REPLY.contains(&header.room));
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn headers_survive_the_wire(id in any::<u32>(), length in MESSAGE, room in REPLY, none in any::<bool>()) {
            let request = RequestHeader { id, length, room: if none { 0 } else { room } };
            prop_assert_eq!(RequestHeader::decode(&request.encode()), Ok(request));
            let reply = ReplyHeader { id, length: room };
            prop_assert_eq!(ReplyHeader::decode(&reply.encode()), Ok(reply));
        }

        #[test]
        fn a_reply_out_of_bounds_is_refused(id in any::<u32>(), length in any::<u32>()) {
            let header = ReplyHeader { id, length };
            prop_assert_eq!(ReplyHeader::decode(&header.encode()).is_ok(), REPLY.contains(&length));
        }
    }
}
