//! Writable host directories: the protocol between thaw-share, the process that starts it, and the VMM whose
//! guest uses them.
//!
//! **Start.** thaw-share inherits a SEQPACKET unix socket as descriptor [`SETUP_FD`] and receives one
//! [`Serve`] over it. The packet carries these descriptors: the *relay*, one end of a STREAM socketpair;
//! then, for each of [`Serve::shares`], the directory or file to share (`O_PATH` suffices) in the mount
//! namespace in which thaw-share was started; then optionally the *ledger*, a read-write file in which
//! thaw-share records the file behind each of the guest's node ids; then optionally the mount namespace of an
//! earlier thaw-share, which is used as it is and overrides [`Serve::shares`]. thaw-share answers with one
//! `Result<(), String>`, and both sides close the setup socket. [`Ok`] means that it is jailed and serves. It
//! exits when the other end of the relay closes, and for no other reason of its own. That end goes to the VMM
//! as [`crate::control::Backend::Share`], and no other process may keep it, so thaw-share never outlives its
//! guest.
//!
//! **The guest's view.** One virtio-fs device with tag [`TAG`]. Its root is read-only and has an entry
//! [`Share::name`] for each share. Each is a mount of its own in the guest: `st_dev` differs, and a rename
//! between shares fails with EXDEV. Mounts below a shared directory are visible as they were at the start.
//! Changes by the host are visible within [`FRESH_MS`].
//!
//! **Later mounts.** A process with rights over thaw-share's mount namespace may mount more shares while it
//! runs. It makes an entry of the root for each, up to [`Serve::slots`]. thaw-share takes no part and has no
//! right to do so.
//!
//! **The relay.** It carries FUSE messages, which the guest's kernel and thaw-share negotiate. The VMM reads
//! their length. For [`FRESH_MS`] it also repeats the answer that a file has no `security.capability`. Each has a header of little-endian `u32`s. The relay is a stream because a message may
//! exceed 1 MiB, which a packet cannot hold. It is not shared memory, because that would give a compromised
//! VMM access to the memory of a process that may write the host's files.
//!
//! | direction | header | then |
//! |---|---|---|
//! | to thaw-share | [`RequestHeader`]: id, length, room | `length` bytes: the message |
//! | to the VMM | [`ReplyHeader`]: id, length | `length` bytes: its reply |
//!
//! **Opened files.** A reply to OPEN or CREATE may carry a descriptor, with its first byte: the file behind the handle in it. The
//! VMM may then read and write the file itself, in place of requests with this handle, until it sends RELEASE of the handle or DESTROY, or
//! the relay closes. It sees no file that the guest has not opened, and may do no more with it than the guest. thaw-share sends no
//! descriptor of a file whose calls may take long: on other than local file systems, or synced by each write. A VMM that ignores
//! the descriptor loses nothing but time.
//!
//! Each request with room gets exactly one reply, in any order. A request without room (FORGET, BATCH_FORGET,
//! INTERRUPT) gets none. The VMM chooses the ids, distinct among unanswered requests. Either side closes the
//! relay when it receives an invalid header.
//!
//! **When thaw-share dies.** The guest's pending requests fail with EIO, except lookups ([`LOOKUP`]), which
//! change nothing. Lookups and all later requests wait for [`PATIENCE_MS`]. Within that time the sandbox's
//! owner may start another thaw-share with the same ledger and attach its relay as
//! [`crate::control::Backend::Share`]. The VMM sends it the guest's own INIT, then the waiting requests. Node
//! ids stay valid. Files that were open can still be read; other operations on them fail with EIO. A relay
//! may also come later; until then every request fails with EIO. VMMs of earlier releases refuse a second
//! relay: their guests get EIO for good.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Descriptor number of thaw-share's setup socket.
pub const SETUP_FD: i32 = 3;
/// The virtio-fs tag by which the guest mounts the device.
pub const TAG: &str = "shared";
/// How long a guest may cache lookups, in milliseconds (FUSE entry and attribute timeout).
pub const FRESH_MS: u64 = 1000;

/// How long a guest's requests wait for a new thaw-share after the old one died, in milliseconds.
pub const PATIENCE_MS: u64 = 10_000;
/// `FUSE_LOOKUP`: looks up a name.
pub const LOOKUP: u32 = 1;
/// `FUSE_OPEN`: opens a file.
pub const OPEN: u32 = 14;
/// `FUSE_READ`: reads from an open file.
pub const READ: u32 = 15;
/// `FUSE_WRITE`: writes to an open file.
pub const WRITE: u32 = 16;
/// `FUSE_RELEASE`: closes an open file.
pub const RELEASE: u32 = 18;
/// `FUSE_GETXATTR`: reads an extended attribute.
pub const GETXATTR: u32 = 22;
/// `FUSE_INIT`: the guest's first request, sent once per mount.
pub const INIT: u32 = 26;
/// `FUSE_CREATE`: makes a file and opens it.
pub const CREATE: u32 = 35;
/// `FUSE_DESTROY`: the mount ends, and with it all open files.
pub const DESTROY: u32 = 38;

/// Size of a FUSE message in bytes: a header (`fuse_in_header`), and at most 1 MiB of data after at most 4
/// KiB of headers.
pub const MESSAGE: RangeInclusive<u32> = 40..=(1 << 20) + 4096;
/// Size of a reply in bytes.
pub const REPLY: RangeInclusive<u32> = 16..=(1 << 20) + 4096;
/// Most unanswered requests. A VMM sends no more.
pub const OUTSTANDING: usize = 256;
/// Most shares of one thaw-share at its start.
pub const SHARES: usize = 128;
/// Most shares that may be mounted while it runs.
pub const SLOTS: u32 = 1024;
/// Length of a [`Share::name`] in bytes.
pub const NAME: RangeInclusive<usize> = 1..=64;

/// A directory or file to share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Its entry in the device's root: letters, digits, `-`, `_` and `.`, not starting with a dot, unique.
    pub name: String,
    /// The host's kernel refuses all changes (a read-only mount).
    pub read_only: bool,
}

impl Share {
    /// Whether the name is valid.
    pub fn has_good_name(&self) -> bool {
        is_good_name(&self.name)
    }
}

/// Whether `name` is valid for a share.
pub fn is_good_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    NAME.contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain)
}

/// The parameters of a thaw-share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serve {
    pub shares: Vec<Share>,
    /// How many more shares may be mounted later, at most [`SLOTS`]. If this is not 0, `shares` may be empty.
    pub slots: u32,
    /// Whether the guest may create device nodes (CAP_MKNOD). thaw-share itself never opens one.
    pub devices: bool,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    pub id: u32,
    /// Bytes of the message, within [`MESSAGE`].
    pub length: u32,
    /// Most bytes of its reply, within [`REPLY`]; 0 means that the message gets no reply.
    pub room: u32,
}

/// The header of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    /// The request's id.
    pub id: u32,
    /// Bytes of the reply, within [`REPLY`] and at most the request's `room`.
    pub length: u32,
}

/// Why a header is invalid.
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

    /// Decodes and checks a header.
    ///
    /// # Errors
    /// A length is out of range.
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

    /// Decodes and checks a header.
    ///
    /// # Errors
    /// The length is out of range.
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
        // A reply has room for its header (fuse_out_header, 16 bytes), or the request expects none.
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
