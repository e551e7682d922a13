//! A network namespace with a tap in it, the same for every guest, ready for a VMM.
//!
//! It is made on a thread of its own, or without privilege in a short-lived child in a user namespace, so the caller's namespace does not
//! change. Invariant: the tap is fully configured here, so that no later ioctl(2) on it is needed, which would take RTNL.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::thread::UnshareFlags;

use crate::Error;
use crate::owner;
use crate::{GATEWAY_MAC, HOST_ADDRESS, TAP_INDEX, TAP_NAME};
use thaw_failpoint::{Failpoint, reach};
use thaw_sys::netlink::Socket;
use thaw_sys::sysctl;

const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
/// Bytes of the header before each frame: `virtio_net_hdr_v1`.
const VNET_HEADER: libc::c_int = 12;
/// Work that may be left to the guest: checksums, and segmentation of IPv4 and IPv6, with and without ECN.
const OFFLOADS: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
/// `_IOW('T', 218, unsigned int)`.
const TUNSETIFINDEX: libc::c_ulong = 0x4004_54da;
/// Opens the namespace of the tap behind a descriptor: `linux/sockios.h`.
const SIOCGSKNS: libc::c_ulong = 0x894c;
/// A tap in a namespace.
#[derive(Debug)]
pub(super) struct Tapped {
    pub tap: OwnedFd,
    pub namespace: OwnedFd,
}

/// A tap in a namespace that will be connected to the outside.
#[derive(Debug)]
pub(super) struct Privileged {
    pub tapped: Tapped,
    /// Sockets in the namespace.
    pub route: Socket,
    pub filter: Socket,
}

/// The steps, numbered so that a child can report one in a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Step {
    Unshare = 1,
    OpenNamespace,
    OpenTun,
    MakeTap,
    Configure,
    Child,
    Settings,
    Sockets,
    EnterNamespace,
}

impl Step {
    const ALL: [Step; 9] = [
        Step::Unshare,
        Step::OpenNamespace,
        Step::OpenTun,
        Step::MakeTap,
        Step::Configure,
        Step::Child,
        Step::Settings,
        Step::Sockets,
        Step::EnterNamespace,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Step::Unshare => "make a network namespace",
            Step::OpenNamespace => "open the new network namespace",
            Step::OpenTun => "open /dev/net/tun (load the tun module, or use --network none)",
            Step::MakeTap => "make a tap",
            Step::Configure => "configure the tap",
            Step::Child => "run the network helper",
            Step::Settings => "set up forwarding in a network namespace (is /proc/sys writable?)",
            Step::Sockets => "open netlink sockets (load nfnetlink)",
            Step::EnterNamespace => "enter a network namespace (is it one?)",
        }
    }
}

/// The step that failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub step: Step,
    pub error: rustix::io::Errno,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::system(failure.step.name())(failure.error.into())
    }
}

fn errno(error: &io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(error).unwrap_or(rustix::io::Errno::IO)
}

fn at(step: Step) -> impl FnOnce(rustix::io::Errno) -> Failure {
    move |error| Failure { step, error }
}

/// Runs `work` on a new thread that then ends, because entering a namespace changes the thread.
pub(super) fn on_a_thread<T, E>(work: impl FnOnce() -> Result<T, E> + Send) -> Result<T, E>
where
    T: Send,
    E: Send + From<Failure>,
{
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("network".into())
            .spawn_scoped(scope, work)
            .map_err(|e| at(Step::Child)(errno(&e)))?
            .join()
            .unwrap_or_else(|_| Err(at(Step::Child)(rustix::io::Errno::IO).into()))
    })
}

/// Enters an existing namespace.
pub(super) fn move_into(namespace: BorrowedFd<'_>) -> Result<(), Failure> {
    let kind = Some(rustix::thread::LinkNameSpaceType::Network);
    rustix::thread::move_into_link_name_space(namespace, kind).map_err(at(Step::EnterNamespace))
}

/// With privilege. The namespace forwards, and has IPv6 on its loopback only.
pub(super) fn in_thread() -> Result<Privileged, Failure> {
    on_a_thread(|| {
        let namespace = enter_new()?;
        sysctl::set("ipv4/ip_forward", "1")
            .and_then(|()| sysctl::disable_ipv6(sysctl::LATER))
            .map_err(|e| at(Step::Settings)(errno(&e)))?;
        let socket = |opened: io::Result<Socket>| opened.map_err(|e| at(Step::Sockets)(errno(&e)));
        Ok(Privileged {
            tapped: Tapped {
                tap: make_tap(HOST_ADDRESS, GATEWAY_MAC)?,
                namespace,
            },
            route: socket(Socket::route())?,
            filter: socket(Socket::netfilter())?,
        })
    })
}

/// The namespace of a tap that another process made, and a route and a netfilter socket in it.
pub(super) fn namespace_of(tap: &OwnedFd) -> Result<(OwnedFd, Socket, Socket), Failure> {
    // SAFETY: SIOCGSKNS takes no argument.
    let fd = unsafe { libc::ioctl(tap.as_raw_fd(), SIOCGSKNS as _) };
    if fd == -1 {
        return Err(at(Step::OpenNamespace)(errno(&io::Error::last_os_error())));
    }
    // SAFETY: the kernel has just created this descriptor for us, and nothing else uses it.
    let namespace = unsafe { OwnedFd::from_raw_fd(fd) };
    let sockets = || Ok((Socket::route()?, Socket::netfilter()?));
    let (route, filter) = on_a_thread(|| {
        move_into(namespace.as_fd())?;
        sockets().map_err(|e: io::Error| at(Step::Sockets)(errno(&e)))
    })?;
    Ok((namespace, route, filter))
}

/// Without privilege: makes a user namespace first, which only a process with one thread may enter.
pub(super) fn in_user_namespace() -> Result<Tapped, Failure> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(at(Step::Child))?;
    // SAFETY: the child has one thread, and until it exits it only makes system calls on its own stack: `enter`, `make_tap`
    // and `send_result` neither allocate nor lock.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(Failure {
            step: Step::Child,
            error: rustix::io::Errno::from_io_error(&io::Error::last_os_error())
                .unwrap_or(rustix::io::Errno::AGAIN),
        }),
        0 => {
            let made = enter(UnshareFlags::NEWUSER | UnshareFlags::NEWNET).and_then(|namespace| {
                Ok(Tapped {
                    tap: make_tap(HOST_ADDRESS, GATEWAY_MAC)?,
                    namespace,
                })
            });
            send_result(theirs.as_fd(), &made);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
        pid => {
            drop(theirs);
            let result = receive_result(ours.as_fd());
            let mut status = 0;
            // SAFETY: `status` is a valid place for the status, and nothing else waits for this child.
            while unsafe { libc::waitpid(pid, &mut status, 0) } == -1
                && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
            {}
            result
        }
    }
}

fn send_result(socket: BorrowedFd<'_>, result: &Result<Tapped, Failure>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let (message, fds) = match result {
        Ok(made) => ([0u8; 5], Some([made.tap.as_fd(), made.namespace.as_fd()])),
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

fn receive_result(socket: BorrowedFd<'_>) -> Result<Tapped, Failure> {
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
        return Ok(Tapped { tap, namespace });
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

/// Makes a network namespace for a slot, moves the calling thread into it, and returns it.
fn enter_new() -> Result<OwnedFd, Failure> {
    if let Some(namespace) = owner::get().and_then(|owner| owner.new_network().ok()) {
        reach(Failpoint::NetworkNamespaceMade);
        // Anyone may make a user namespace and what is in it; a thread outside may enter that only with privilege.
        if move_into(namespace.as_fd()).is_ok() {
            return Ok(namespace);
        }
    }
    enter(UnshareFlags::NEWNET)
}

/// Enters new namespaces and returns the network namespace.
pub(super) fn enter(flags: UnshareFlags) -> Result<OwnedFd, Failure> {
    thaw_sys::jail::unshare(flags).map_err(at(Step::Unshare))?;
    reach(Failpoint::NetworkNamespaceMade);
    let open = OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::open(c"/proc/thread-self/ns/net", open, Mode::empty()).map_err(at(Step::OpenNamespace))
}

/// Makes the tap in the thread's namespace, with an address.
pub(super) fn make_tap(address: Ipv4Addr, mac: [u8; 6]) -> Result<OwnedFd, Failure> {
    let tap = open_tap(TAP_NAME, Some(TAP_INDEX))?;
    reach(Failpoint::NetworkTapMade);
    configure(address, mac).map_err(at(Step::Configure))?;
    Ok(tap)
}

/// Makes a tap for a VMM: down, without an address. `index`: one that the kernel does not assign by itself.
pub(super) fn open_tap(name: &str, index: Option<libc::c_uint>) -> Result<OwnedFd, Failure> {
    let tap = rustix::fs::open(
        c"/dev/net/tun",
        OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .map_err(at(Step::OpenTun))?;
    if let Some(mut index) = index {
        ioctl(&tap, TUNSETIFINDEX, &mut index).map_err(at(Step::MakeTap))?;
    }
    let mut request = interface(name);
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    ioctl(&tap, libc::TUNSETIFF as _, &mut request).map_err(at(Step::MakeTap))?;
    let mut header = VNET_HEADER;
    ioctl(&tap, libc::TUNSETVNETHDRSZ as _, &mut header).map_err(at(Step::MakeTap))?;
    // SAFETY: this request takes its argument by value.
    let set = unsafe {
        libc::ioctl(
            tap.as_raw_fd(),
            libc::TUNSETOFFLOAD as _,
            libc::c_ulong::from(OFFLOADS),
        )
    };
    if set == -1 {
        return Err(at(Step::MakeTap)(errno(&io::Error::last_os_error())));
    }
    Ok(tap)
}

/// Gives the tap its addresses and brings it and the loopback up (netdevice(7)).
fn configure(address: Ipv4Addr, mac: [u8; 6]) -> Result<(), rustix::io::Errno> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut request = interface(TAP_NAME);
    // SAFETY: sockaddr consists of integers, so all zeroes is a valid value.
    let mut hardware: libc::sockaddr = unsafe { std::mem::zeroed() };
    hardware.sa_family = libc::ARPHRD_ETHER;
    for (to, from) in hardware.sa_data.iter_mut().zip(mac) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_hwaddr = hardware;
    ioctl(&socket, libc::SIOCSIFHWADDR as _, &mut request)?;
    for (code, address) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, NETMASK)] {
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
    for name in [TAP_NAME, "lo"] {
        let mut request = interface(name);
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        ioctl(&socket, libc::SIOCSIFFLAGS as _, &mut request)?;
    }
    Ok(())
}

fn interface(name: &str) -> libc::ifreq {
    // SAFETY: ifreq consists of integers, arrays of them and a union of such, so all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = *from as libc::c_char;
    }
    request
}

fn ioctl<T>(fd: &OwnedFd, code: libc::c_ulong, argument: &mut T) -> Result<(), rustix::io::Errno> {
    // SAFETY: each caller passes the type its request takes (ifreq for interface requests, int for
    // TUNSETVNETHDRSZ, unsigned int for TUNSETIFINDEX),
    // which outlives the call; the kernel reads and writes at most that type's size.
    if unsafe { libc::ioctl(fd.as_raw_fd(), code as _, argument as *mut T) } == -1 {
        return Err(errno(&io::Error::last_os_error()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_namespace() -> String {
        std::fs::read_link("/proc/thread-self/ns/net")
            .unwrap()
            .display()
            .to_string()
    }

    /// Checks a namespace: it must not be ours, and its tap must carry what the host sends.
    fn check(made: Result<Tapped, Failure>) {
        let made = match made {
            Ok(made) => made,
            Err(Failure { step, error }) if matches!(step, Step::Unshare | Step::OpenTun) => {
                return thaw_test_skip::skip(format!("this host cannot {}: {error}", step.name()));
            }
            Err(f) => panic!("{f:?}"),
        };
        let Tapped { tap, namespace } = made;
        let name = std::fs::read_link(format!("/proc/self/fd/{}", namespace.as_raw_fd())).unwrap();
        assert_ne!(name.display().to_string(), own_namespace());
        // Frames that the kernel sends by itself may not come; a datagram to an unknown neighbour causes an ARP request.
        let sender = namespace.try_clone().unwrap();
        // If this user may not enter it, the tap can only show frames that the kernel sent by itself.
        std::thread::spawn(move || {
            if move_into(sender.as_fd()).is_ok() {
                let socket = std::net::UdpSocket::bind((HOST_ADDRESS, 0)).unwrap();
                socket.send_to(b"hello", (crate::GUEST_ADDRESS, 9)).unwrap();
            }
        })
        .join()
        .unwrap();
        let mut frame = [0u8; 2048];
        let mut arp_seen = false;
        while let Ok(n) = rustix::io::read(&tap, &mut frame) {
            assert!(n > VNET_HEADER as usize + 14);
            let ethernet = &frame[VNET_HEADER as usize..n];
            arp_seen |= ethernet[12..14] == [0x08, 0x06]
                && ethernet[6..12] == GATEWAY_MAC
                && ethernet[38..42] == crate::GUEST_ADDRESS.octets();
        }
        assert!(arp_seen, "the tap did not carry the host's ARP request");
    }

    #[test]
    fn privileged_tap_works_and_leaves_our_namespace() {
        let before = own_namespace();
        check(in_thread().map(|made| made.tapped));
        assert_eq!(own_namespace(), before);
    }

    #[test]
    fn tap_in_a_user_namespace_works() {
        check(in_user_namespace());
    }

    #[test]
    fn failure_of_the_child_reaches_the_parent() {
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
