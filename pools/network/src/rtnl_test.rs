//! The operations for which a sandbox waits do not take RTNL: another thread holds it meanwhile.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::mpsc;

use super::*;
use crate::testbed::*;
use thaw_pools::plan::{Plan, Watermarks};
use thaw_pools::pool::Pool;
use thaw_sys::netlink::Socket;

// include/uapi/linux/userfaultfd.h
const UFFD_API: u64 = 0xaa;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
const MODE_MISSING: u64 = 1;
const PAGE: usize = 4096;
// include/uapi/linux/{sockios,ethtool}.h
const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;

fn ioctl<T>(fd: &OwnedFd, code: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: each caller passes the argument that its request expects, which outlives the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), code as _, std::ptr::from_mut(argument)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Holds RTNL until it is dropped: one of our threads makes a request whose data the kernel copies under that lock from a missing page,
/// which this test does not provide before.
struct Held {
    faults: OwnedFd,
    page: usize,
    holder: Option<std::thread::JoinHandle<()>>,
}

impl Held {
    /// `None` if this host has no userfaultfd(2) for faults of the kernel.
    fn now() -> Option<Held> {
        // A blocking descriptor cannot be polled. SAFETY: userfaultfd(2) takes only flags.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if fd == -1 {
            return None;
        }
        // SAFETY: the kernel has just created this descriptor for us.
        let faults = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        ioctl(&faults, UFFDIO_API, &mut [UFFD_API, 0, 0]).ok()?;
        // SAFETY: new memory that nothing else uses; it stays until the process ends.
        let pages = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                2 * PAGE,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        };
        let first = NonNull::new(pages.ok()?)?.as_ptr() as usize;
        // struct ethtool_gstrings: the command is there, the rest is not.
        let request = first + PAGE - 4;
        // SAFETY: within the first page, which is ours.
        unsafe { (request as *mut u32).write(ETHTOOL_GSTRINGS) };
        let page = first + PAGE;
        ioctl(
            &faults,
            UFFDIO_REGISTER,
            &mut [page as u64, PAGE as u64, MODE_MISSING, 0],
        )
        .ok()?;
        let holder = std::thread::spawn(move || {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
            // SAFETY: all zeroes is a valid value.
            let mut asked: libc::ifreq = unsafe { std::mem::zeroed() };
            (asked.ifr_name[0], asked.ifr_name[1]) = (b'l' as _, b'o' as _);
            asked.ifr_ifru.ifru_data = request as *mut libc::c_char;
            let socket = OwnedFd::from(socket);
            // Whatever it answers.
            let _ = ioctl(&socket, SIOCETHTOOL, &mut asked);
        });
        let held = Held {
            faults,
            page,
            holder: Some(holder),
        };
        // The fault is reported, so the lock is held.
        let patience = Timespec::try_from(PATIENCE).unwrap();
        let mut faults = [PollFd::new(&held.faults, PollFlags::IN)];
        assert_eq!(poll(&mut faults, Some(&patience)).unwrap(), 1, "no fault");
        Some(held)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = ioctl(
            &self.faults,
            UFFDIO_ZEROPAGE,
            &mut [self.page as u64, PAGE as u64, 0, 0],
        );
        if let Some(holder) = self.holder.take() {
            let _ = holder.join();
        }
    }
}

#[test]
fn claim_and_assign_take_no_rtnl() {
    on_a_host(|world| {
        let plan = Plan::new((), Watermarks::new(1, 4).unwrap());
        let pool = Pool::filled(Networks::new(world.setup.clone()), plan).unwrap();
        while pool.statistics().ready < 4 {
            std::thread::yield_now();
        }
        let terms = |rules: &[&str], ports: &[&str]| Terms {
            policy: policy(rules),
            ports: ports.iter().map(|text| text.parse().unwrap()).collect(),
        };
        let wanted = [
            terms(&[], &[]),
            terms(&["allow=203.0.113.0/24:443", "default=deny"], &[]),
            terms(&["deny=198.51.100.0/24"], &["8080:80", "0:53/udp"]),
        ];
        let mut route = Socket::route().unwrap();
        let wan = link::index(&mut route, "wan").unwrap();
        let Some(held) = Held::now() else {
            return thaw_test_skip::skip("this host has no userfaultfd");
        };
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            // An operation that takes the lock waits until it is released.
            let waits = scope.spawn(|| link::set_up(&mut route, wan).unwrap());
            let pool = &pool;
            scope.spawn(move || {
                for terms in wanted {
                    let mut claimed = pool.ready(&()).unwrap();
                    let uplink = claimed.resource.uplink.as_mut().unwrap();
                    uplink.assign(terms).unwrap();
                    done.send(claimed.resource).unwrap();
                }
            });
            let claimed: Vec<_> = (0..3)
                .map_while(|_| is_done.recv_timeout(PATIENCE).ok())
                .collect();
            let waited = !waits.is_finished();
            drop(held);
            assert_eq!(claimed.len(), 3, "something on the way of a start takes RTNL");
            assert!(waited, "RTNL was not held");
            claimed.into_iter().for_each(|slot| pool.release(slot));
        });
    });
}
