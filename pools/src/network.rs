//! A private network for one sandbox: a network namespace with a tap in it.
//!
//! The namespace has no name and the tap no owner but descriptors: when the last is closed both are gone, so nothing
//! can leak. It is made on a thread of its own (or, without privilege, in a short-lived child in a user namespace), so
//! the caller's namespace is never touched. Every guest sees the same MAC and the same addresses.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::thread::UnshareFlags;
use thaw_protocol::handshake::{Address, Network};

use crate::Error;
use crate::failpoint::{Failpoint, reach};
use crate::resource::{Kind, Unfit};

/// The guest's MAC address, the same in every guest: locally administered, "thaw".
pub const GUEST_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x02];
/// The guest's address.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 219, 0, 2);
/// The host end's address, the guest's gateway.
pub const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 219, 0, 1);
const PREFIX: u8 = 30;
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
const MTU: u16 = 1500;
/// The host end's name; one per namespace, so it is always free.
const TAP_NAME: &[u8] = b"thaw0";
/// Bytes of the header before each frame: `virtio_net_hdr_v1`.
const VNET_HEADER: libc::c_int = 12;

/// One sandbox's network.
#[derive(Debug)]
pub struct NetworkSlot {
    /// The tap: `IFF_NO_PI | IFF_VNET_HDR`, 12-byte header.
    pub tap: OwnedFd,
    /// The namespace the tap lives in; keeps it alive and lets rules be added to it.
    pub namespace: OwnedFd,
    /// What the guest is told.
    pub config: Network,
}

/// The kind: all are alike.
#[derive(Clone, Copy, Debug, Default)]
pub struct Networks;

impl Kind for Networks {
    const NAME: &'static str = "network";
    type Want = ();
    type Resource = NetworkSlot;
    type Error = Error;

    fn make(&self, (): &()) -> Result<NetworkSlot, Error> {
        make()
    }

    /// A tap whose device is gone says so to poll(2), which takes no RTNL; asking it anything by ioctl(2) would.
    fn check(&self, slot: &NetworkSlot) -> Result<(), Unfit> {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut tap = [PollFd::new(&slot.tap, PollFlags::OUT)];
        let polled = rustix::io::retry_on_intr(|| poll(&mut tap, Some(&now)));
        polled.map_err(|e| Unfit(format!("cannot look at the tap: {e}")))?;
        let said = tap[0].revents();
        match said.contains(PollFlags::OUT) && !said.intersects(PollFlags::ERR | PollFlags::HUP) {
            true => Ok(()),
            false => Err(Unfit("the tap is gone or down".into())),
        }
    }

    fn destroy(&self, slot: NetworkSlot) {
        // Its descriptors are all there is of it.
        drop(slot);
    }
}

/// Makes one.
pub fn make() -> Result<NetworkSlot, Error> {
    let (tap, namespace) = match in_thread() {
        Err(Failure {
            step: Step::Unshare,
            error,
        }) if error == rustix::io::Errno::PERM => in_user_namespace(),
        result => result,
    }
    .map_err(|f| Error::System {
        what: f.step.name(),
        source: f.error.into(),
    })?;
    Ok(NetworkSlot {
        tap,
        namespace,
        config: config(),
    })
}

/// What every guest is told.
fn config() -> Network {
    Network {
        mac: GUEST_MAC,
        mtu: MTU,
        addresses: vec![Address {
            ip: IpAddr::V4(GUEST_ADDRESS),
            prefix: PREFIX,
        }],
        gateways: vec![IpAddr::V4(HOST_ADDRESS)],
        nameservers: Vec::new(),
    }
}

/// Steps of the making, numbered so that a child can report one in a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    Unshare = 1,
    OpenNamespace,
    OpenTun,
    MakeTap,
    Configure,
    Child,
}

impl Step {
    const ALL: [Step; 6] = [
        Step::Unshare,
        Step::OpenNamespace,
        Step::OpenTun,
        Step::MakeTap,
        Step::Configure,
        Step::Child,
    ];

    fn name(self) -> &'static str {
        match self {
            Step::Unshare => "make a network namespace",
            Step::OpenNamespace => "open the new network namespace",
            Step::OpenTun => "open /dev/net/tun (load the tun module, or use --network none)",
            Step::MakeTap => "make a tap",
            Step::Configure => "configure the tap",
            Step::Child => "run the network helper",
        }
    }
}

#[derive(Debug)]
struct Failure {
    step: Step,
    error: rustix::io::Errno,
}

fn at(step: Step) -> impl FnOnce(rustix::io::Errno) -> Failure {
    move |error| Failure { step, error }
}

/// A namespace belongs to a thread: this one enters a new one and ends.
fn in_thread() -> Result<(OwnedFd, OwnedFd), Failure> {
    std::thread::Builder::new()
        .name("network".into())
        .spawn(|| populate(UnshareFlags::NEWNET))
        .map_err(|_| Failure {
            step: Step::Child,
            error: rustix::io::Errno::AGAIN,
        })?
        .join()
        .unwrap_or(Err(Failure {
            step: Step::Child,
            error: rustix::io::Errno::IO,
        }))
}

/// Without privilege: a user namespace first, which only a process of one thread may enter.
fn in_user_namespace() -> Result<(OwnedFd, OwnedFd), Failure> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(at(Step::Child))?;
    // SAFETY: the child has one thread, and until it exits it only makes system calls on its own stack: `populate` and
    // `send_result` neither allocate nor lock.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(Failure {
            step: Step::Child,
            error: rustix::io::Errno::from_io_error(&io::Error::last_os_error())
                .unwrap_or(rustix::io::Errno::AGAIN),
        }),
        0 => {
            send_result(
                theirs.as_fd(),
                &populate(UnshareFlags::NEWUSER | UnshareFlags::NEWNET),
            );
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
        pid => {
            drop(theirs);
            let result = receive_result(ours.as_fd());
            let mut status = 0;
            // SAFETY: `status` is a valid place for the status of a child nobody else waits for.
            while unsafe { libc::waitpid(pid, &mut status, 0) } == -1
                && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
            {}
            result
        }
    }
}

fn send_result(socket: BorrowedFd<'_>, result: &Result<(OwnedFd, OwnedFd), Failure>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let (message, fds) = match result {
        Ok((tap, namespace)) => ([0u8; 5], Some([tap.as_fd(), namespace.as_fd()])),
        Err(f) => {
            let e = f.error.raw_os_error().to_le_bytes();
            ([f.step as u8, e[0], e[1], e[2], e[3]], None)
        }
    };
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let _ = rustix::net::sendmsg(
        socket,
        &[IoSlice::new(&message)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    );
}

fn receive_result(socket: BorrowedFd<'_>) -> Result<(OwnedFd, OwnedFd), Failure> {
    let mut message = [0u8; 5];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut message)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )
    })
    .map_err(at(Step::Child))?;
    let mut fds = ancillary.drain().filter_map(|m| match m {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut fds = fds.next().into_iter().flatten();
    if let (Some(tap), Some(namespace)) = (fds.next(), fds.next()) {
        return Ok((tap, namespace));
    }
    if received.bytes != message.len() {
        return Err(Failure {
            step: Step::Child,
            error: rustix::io::Errno::PIPE,
        });
    }
    let step = Step::ALL
        .into_iter()
        .find(|s| *s as u8 == message[0])
        .unwrap_or(Step::Child);
    let errno = i32::from_le_bytes([message[1], message[2], message[3], message[4]]);
    Err(Failure {
        step,
        error: rustix::io::Errno::from_raw_os_error(errno),
    })
}

/// Enters new namespaces and makes the tap in them. Returns the tap and the network namespace.
fn populate(flags: UnshareFlags) -> Result<(OwnedFd, OwnedFd), Failure> {
    // SAFETY: neither flag unshares the file descriptor table, the one thing that breaks other code's assumptions.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(at(Step::Unshare))?;
    reach(Failpoint::NetworkNamespaceMade);
    let open = OFlags::RDONLY | OFlags::CLOEXEC;
    let namespace = rustix::fs::open(c"/proc/thread-self/ns/net", open, Mode::empty())
        .map_err(at(Step::OpenNamespace))?;
    let tap = rustix::fs::open(
        c"/dev/net/tun",
        OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .map_err(at(Step::OpenTun))?;

    let mut request = interface(TAP_NAME);
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    ioctl(&tap, libc::TUNSETIFF as _, &mut request).map_err(at(Step::MakeTap))?;
    let mut header = VNET_HEADER;
    ioctl(&tap, libc::TUNSETVNETHDRSZ as _, &mut header).map_err(at(Step::MakeTap))?;

    reach(Failpoint::NetworkTapMade);
    configure().map_err(at(Step::Configure))?;
    Ok((tap, namespace))
}

/// Gives the tap its address and brings it and the loopback up (netdevice(7)).
fn configure() -> Result<(), rustix::io::Errno> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    for (code, address) in [(libc::SIOCSIFADDR, HOST_ADDRESS), (libc::SIOCSIFNETMASK, NETMASK)] {
        let mut request = interface(TAP_NAME);
        let address = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: 0,
            sin_addr: libc::in_addr {
                s_addr: u32::from_ne_bytes(address.octets()),
            },
            sin_zero: [0; 8],
        };
        // SAFETY: sockaddr_in is a form of sockaddr and of its size; sockaddr has no padding or invalid values.
        request.ifr_ifru.ifru_addr =
            unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(address) };
        ioctl(&socket, code as _, &mut request)?;
    }
    for name in [TAP_NAME, b"lo"] {
        let mut request = interface(name);
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        ioctl(&socket, libc::SIOCSIFFLAGS as _, &mut request)?;
    }
    Ok(())
}

fn interface(name: &[u8]) -> libc::ifreq {
    // SAFETY: ifreq is integers, arrays of them and a union of such: all zeroes is a value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    request
}

fn ioctl<T>(fd: &OwnedFd, code: libc::c_ulong, argument: &mut T) -> Result<(), rustix::io::Errno> {
    // SAFETY: each caller passes the type its request takes (ifreq for interface requests, int for TUN?ETVNETHDRSZ),
    // which outlives the call; the kernel reads and writes at most that type's size.
    if unsafe { libc::ioctl(fd.as_raw_fd(), code as _, argument as *mut T) } == -1 {
        let error = io::Error::last_os_error();
        return Err(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_namespace() -> String {
        std::fs::read_link("/proc/self/ns/net")
            .unwrap()
            .display()
            .to_string()
    }

    /// What every namespace this host allows must be: another than ours, with a tap that carries what the host sends.
    fn check(made: Result<(OwnedFd, OwnedFd), Failure>) {
        let (tap, namespace) = match made {
            Ok(made) => made,
            Err(Failure { step, error }) if matches!(step, Step::Unshare | Step::OpenTun) => {
                eprintln!("skipped: this host cannot {}: {error}", step.name());
                return;
            }
            Err(f) => panic!("{f:?}"),
        };
        let slot = NetworkSlot {
            tap,
            namespace,
            config: config(),
        };
        Networks.check(&slot).unwrap();
        let (tap, namespace) = (slot.tap, slot.namespace);
        let name = std::fs::read_link(format!("/proc/self/fd/{}", namespace.as_raw_fd())).unwrap();
        assert_ne!(name.display().to_string(), own_namespace());
        // A listener whose link is up is sent multicast reports by the kernel; an ARP probe is surer: ask for the guest.
        let sender = namespace.try_clone().unwrap();
        std::thread::spawn(move || {
            if rustix::thread::move_into_link_name_space(sender.as_fd(), None).is_ok() {
                let socket = std::net::UdpSocket::bind((HOST_ADDRESS, 0)).unwrap();
                socket.send_to(b"hello", (GUEST_ADDRESS, 9)).unwrap();
            } else {
                eprintln!("skipped: cannot enter the namespace");
            }
        })
        .join()
        .unwrap();
        let mut frame = [0u8; 2048];
        let mut arp_seen = false;
        while let Ok(n) = rustix::io::read(&tap, &mut frame) {
            assert!(n > VNET_HEADER as usize + 14);
            let ethernet = &frame[VNET_HEADER as usize..n];
            arp_seen |= ethernet[12..14] == [0x08, 0x06] && ethernet[38..42] == GUEST_ADDRESS.octets();
        }
        assert!(arp_seen, "the tap did not carry the host's ARP request");
    }

    #[test]
    fn a_privileged_slot_works_and_leaves_our_namespace_alone() {
        let before = own_namespace();
        check(in_thread());
        assert_eq!(own_namespace(), before);
    }

    #[test]
    fn a_tap_without_its_device_is_unfit() {
        // Never given one by TUNSETIFF, as one whose namespace was taken away.
        let Ok(tap) = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
        else {
            return eprintln!("skipped: cannot open /dev/net/tun");
        };
        let slot = NetworkSlot {
            tap: tap.into(),
            namespace: std::fs::File::open("/dev/null").unwrap().into(),
            config: config(),
        };
        Networks.check(&slot).unwrap_err();
    }

    #[test]
    fn a_slot_in_a_user_namespace_works() {
        check(in_user_namespace());
    }

    #[test]
    fn a_failure_crosses_from_the_child() {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        send_result(
            a.as_fd(),
            &Err(Failure {
                step: Step::MakeTap,
                error: rustix::io::Errno::BUSY,
            }),
        );
        let failure = receive_result(b.as_fd()).unwrap_err();
        assert_eq!(
            (failure.step, failure.error),
            (Step::MakeTap, rustix::io::Errno::BUSY)
        );
        drop(a);
        assert_eq!(receive_result(b.as_fd()).unwrap_err().step, Step::Child);
    }
}
