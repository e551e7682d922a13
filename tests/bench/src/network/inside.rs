//! A guest with a kernel's TCP: a network namespace with a tap of its own, whose frames a thread carries to a slot's tap and back.
//!
//! The thread does what a VMM does: it reads a frame, header included, from one side and writes it to the other. Frames are as large as
//! TCP segmentation offload makes them, on both taps.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use thaw_network::{GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, NetworkSlot};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_val};

use super::namespace::Namespace;
use super::place::{OUTSIDE, ip};

const INTERFACE: &str = "eth0";
/// Bytes of `virtio_net_hdr_v1`, as a slot's tap has it.
const HEADER: libc::c_int = 12;
/// What a slot's tap leaves to the guest.
const OFFLOADS: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
/// More than the largest frame with its header.
const LARGEST: usize = 128 << 10;
/// Most frames of one side before the other has its turn.
const BURST: usize = 64;

/// The guest.
pub struct Inside {
    namespace: Namespace,
    carrier: Option<JoinHandle<()>>,
    /// Closed to end the carrier.
    stop: Option<OwnedFd>,
}

impl Inside {
    /// The guest of a slot.
    pub fn behind(slot: &NetworkSlot) -> Result<Inside, String> {
        let failed = |e: io::Error| format!("a guest's tap: {e}");
        let namespace = Namespace::make()?;
        let tap = namespace.within(open_tap)?.map_err(failed)?;
        namespace.within(configure)??;
        let outer = slot.tap.try_clone().map_err(failed)?;
        let (stopped, stop) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let carrier = std::thread::Builder::new()
            .name("carrier".into())
            .spawn(move || carry(&tap, &outer, &stopped))
            .map_err(failed)?;
        Ok(Inside {
            namespace,
            carrier: Some(carrier),
            stop: Some(stop),
        })
    }

    /// A connection of the guest to a server outside.
    pub fn connect(&self, port: u16) -> Result<TcpStream, String> {
        let connected = self.namespace.within(|| TcpStream::connect((OUTSIDE, port)))?;
        connected.map_err(|e| format!("the guest connects to a server outside: {e}"))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(carrier) = self.carrier.take() {
            let _ = carrier.join();
        }
    }
}

fn open_tap() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let tap = rustix::fs::open("/dev/net/tun", flags, Mode::empty())?;
    // SAFETY: ifreq consists of integers, arrays of them and a union of such, so all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(INTERFACE.as_bytes()) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    let mut header = HEADER;
    let done = |result: libc::c_int| match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    };
    // SAFETY: TUNSETIFF takes an ifreq, which outlives the call.
    done(unsafe { ioctl_with_mut_ref(&tap, libc::TUNSETIFF as _, &mut request) })?;
    // SAFETY: TUNSETVNETHDRSZ takes an int, which outlives the call.
    done(unsafe { ioctl_with_mut_ref(&tap, libc::TUNSETVNETHDRSZ as _, &mut header) })?;
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    done(unsafe { ioctl_with_val(&tap, libc::TUNSETOFFLOAD as _, OFFLOADS.into()) })?;
    Ok(tap)
}

/// Gives the guest its addresses, as its agent does.
fn configure() -> Result<(), String> {
    let mac = GUEST_MAC.map(|byte| format!("{byte:02x}")).join(":");
    ip(&["link", "set", INTERFACE, "address", &mac])?;
    ip(&["address", "add", &format!("{GUEST_ADDRESS}/30"), "dev", INTERFACE])?;
    ip(&["link", "set", INTERFACE, "up"])?;
    ip(&["route", "add", "default", "via", &HOST_ADDRESS.to_string()])
}

/// Carries frames both ways until the other end of `stopped` is closed.
fn carry(inner: &OwnedFd, outer: &OwnedFd, stopped: &OwnedFd) {
    let mut buffer = vec![0; LARGEST];
    loop {
        let mut waited = [inner, outer, stopped].map(|fd| PollFd::new(fd, PollFlags::IN));
        let polled = poll(&mut waited, None);
        if !waited[2].revents().is_empty() || polled.is_err_and(|e| e != rustix::io::Errno::INTR) {
            return;
        }
        carry_burst(inner, outer, &mut buffer);
        carry_burst(outer, inner, &mut buffer);
    }
}

fn carry_burst(from: &OwnedFd, to: &OwnedFd, buffer: &mut [u8]) {
    for _ in 0..BURST {
        let Ok(length) = rustix::io::read(from, &mut *buffer) else {
            return;
        };
        // A frame that is refused is lost, as on a wire.
        let _ = rustix::io::write(to, &buffer[..length]);
    }
}
