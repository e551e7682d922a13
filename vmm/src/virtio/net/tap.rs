//! The tap. It comes as a descriptor, which is checked. Another process sets up its interface.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use virtio_bindings::virtio_net as b;
use vmm_sys_util::epoll::EventSet;

use super::HEADER;
use crate::virtio::device::AttachError;

/// ioctls of `linux/if_tun.h`, and their flags.
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNGETIFF: libc::c_ulong = 0x8004_54d2;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUN_F_CSUM: libc::c_uint = 0x01;
const TUN_F_TSO4: libc::c_uint = 0x02;
const TUN_F_TSO6: libc::c_uint = 0x04;
const TUN_F_TSO_ECN: libc::c_uint = 0x08;

const ALL_OFFLOADS: libc::c_uint = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
/// `TUN_MINOR` of `MISC_MAJOR`.
const DEVICE: (u32, u32) = (10, 200);

/// A non-blocking tap.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    /// Offloads that the guest negotiated, once they were set.
    offloads: Option<libc::c_uint>,
    /// The events that the event loop waits for, so that only changes are passed to it.
    watched: EventSet,
}

impl Tap {
    /// Takes a tap without packet information and with vnet headers. Makes it non-blocking and its headers 12 bytes.
    pub fn open(fd: OwnedFd) -> Result<Tap, AttachError> {
        // SAFETY: an all-zero ifreq is valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        ioctl(&fd, TUNGETIFF, &mut request)
            .map_err(|e| AttachError::Invalid(format!("the descriptor is not a tap: {e}")))?;
        // SAFETY: TUNGETIFF fills the flags.
        let flags = i32::from(unsafe { request.ifr_ifru.ifru_flags });
        let wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & wanted != wanted {
            return Err(AttachError::Invalid(format!(
                "the tap has flags {flags:#x}, and needs IFF_TAP | IFF_NO_PI | IFF_VNET_HDR"
            )));
        }
        let mut size = HEADER as libc::c_int;
        ioctl(&fd, TUNSETVNETHDRSZ, &mut size).map_err(AttachError::system("TUNSETVNETHDRSZ"))?;
        Tap::with_frames(fd)
    }

    /// Takes a tap that its maker has prepared ([`thaw_protocol::control::Backend::Tap`]). Checks without an ioctl that it is a tap,
    /// because every ioctl of a tap takes the lock of the host's whole network.
    pub fn prepared(fd: OwnedFd) -> Result<Tap, AttachError> {
        let stat = rustix::fs::fstat(&fd).map_err(AttachError::system("fstat of the tap"))?;
        let character = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_char_device();
        let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        if !character || device != DEVICE {
            return Err(AttachError::Invalid("the descriptor is not a tap".into()));
        }
        let mut tap = Tap::with_frames(fd)?;
        tap.offloads = Some(ALL_OFFLOADS);
        Ok(tap)
    }

    /// Takes a descriptor on which each call transfers one frame, header first.
    pub(super) fn with_frames(fd: OwnedFd) -> Result<Tap, AttachError> {
        let flags = fcntl_getfl(&fd).map_err(AttachError::system("fcntl of the tap"))?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(AttachError::system("fcntl of the tap"))?;
        Ok(Tap {
            fd,
            offloads: None,
            watched: EventSet::empty(),
        })
    }

    /// Lets the host send in the forms that the driver negotiated: unfinished checksums, segments of more than one frame.
    pub fn set_offloads(&mut self, features: u64) -> io::Result<()> {
        let offloads = offloads(features);
        if self.offloads == Some(offloads) {
            return Ok(());
        }
        // The ioctl takes its argument by value.
        // SAFETY: no pointer is passed.
        let done = unsafe { libc::ioctl(self.fd.as_raw_fd(), TUNSETOFFLOAD, libc::c_ulong::from(offloads)) };
        if done == 0 {
            self.offloads = Some(offloads);
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Whether the interface was deleted under the descriptor. Reading then fails for ever.
    pub fn is_gone(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0u8; 0]).is_err_and(|e| e == rustix::io::Errno::BADFD)
    }

    /// Whether the event loop waits for all of `events`.
    #[cfg(test)]
    pub fn watches(&self, events: EventSet) -> bool {
        self.watched.contains(events)
    }

    /// Makes the event loop, through `modify`, wait for `events`.
    pub fn watch(&mut self, events: EventSet, modify: impl FnOnce(RawFd, EventSet) -> io::Result<()>) {
        if events == self.watched {
            return;
        }
        match modify(self.fd.as_raw_fd(), events) {
            Ok(()) => self.watched = events,
            Err(error) => tracing::warn!(%error, "cannot wait for the tap"),
        }
    }
}

fn offloads(features: u64) -> libc::c_uint {
    let has = |bit: u32| features & 1 << bit != 0;
    if !has(b::VIRTIO_NET_F_GUEST_CSUM) {
        // The other offloads are meaningless without it (§5.1.3.1), and the kernel refuses them.
        return 0;
    }
    [
        (b::VIRTIO_NET_F_GUEST_TSO4, TUN_F_TSO4),
        (b::VIRTIO_NET_F_GUEST_TSO6, TUN_F_TSO6),
        (b::VIRTIO_NET_F_GUEST_ECN, TUN_F_TSO_ECN),
    ]
    .iter()
    .filter(|(bit, _)| has(*bit))
    .fold(TUN_F_CSUM, |offloads, (_, flag)| offloads | flag)
}

fn ioctl<T>(fd: &OwnedFd, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: both requests made here read or write exactly the type they are called with, exclusively borrowed.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offloads_need_checksums_and_follow_the_features() {
        let bits = |bits: &[u32]| bits.iter().fold(0u64, |f, bit| f | 1 << bit);
        assert_eq!(offloads(0), 0);
        assert_eq!(offloads(bits(&[b::VIRTIO_NET_F_GUEST_TSO4])), 0);
        assert_eq!(offloads(bits(&[b::VIRTIO_NET_F_GUEST_CSUM])), TUN_F_CSUM);
        assert_eq!(
            offloads(bits(&[
                b::VIRTIO_NET_F_GUEST_CSUM,
                b::VIRTIO_NET_F_GUEST_TSO6,
                b::VIRTIO_NET_F_CSUM
            ])),
            TUN_F_CSUM | TUN_F_TSO6
        );
    }

    #[test]
    fn what_is_not_a_tap_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let other = file.try_clone().unwrap();
        assert!(matches!(Tap::open(file.into()), Err(AttachError::Invalid(_))));
        assert!(matches!(
            Tap::prepared(other.into()),
            Err(AttachError::Invalid(_))
        ));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(Tap::prepared(null.into()), Err(AttachError::Invalid(_))));
    }

    #[test]
    fn a_prepared_tap_is_asked_nothing_it_was_set_to_already() {
        let Ok(tun) = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
        else {
            return thaw_test_skip::skip("cannot open /dev/net/tun");
        };
        // It has no interface, so every ioctl fails.
        let mut tap = Tap::prepared(tun.into()).unwrap();
        let all = [
            b::VIRTIO_NET_F_GUEST_CSUM,
            b::VIRTIO_NET_F_GUEST_TSO4,
            b::VIRTIO_NET_F_GUEST_TSO6,
            b::VIRTIO_NET_F_GUEST_ECN,
        ];
        tap.set_offloads(all.iter().fold(0, |f, bit| f | 1 << bit))
            .unwrap();
        tap.set_offloads(0).unwrap_err();
    }
}
