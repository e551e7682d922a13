//! A testbed for networks: a network namespace that plays the host, and another for the world outside. Nothing of the real host is changed,
//! and nothing remains when a test's thread ends.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::thread::UnshareFlags;
use thaw_protocol::api::NetworkPolicy;

use super::*;
use crate::policy::{Policy, parse_into};
use crate::tap::{enter, make_tap, move_into, on_a_thread};
use thaw_sys::netlink::Socket;
use thaw_sys::nft;

/// The host's outside address, and the address of a server outside.
pub(super) const HOST: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
/// Only a lost packet takes that long.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// A host, in whose namespace the calling thread is.
pub(super) struct World {
    pub outside: OwnedFd,
    pub setup: Setup,
    pub networks: Networks,
}

/// Runs a test on two separate hosts, if the real host allows it: slots of the first have a fast path, those of the second do not.
pub(super) fn on_a_host(test: impl Fn(&mut World) + Sync) {
    for fast_path in [FastPathSetting::Auto, FastPathSetting::Off] {
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            thaw_test_skip::beside(|| match enter(UnshareFlags::NEWNET) {
                Ok(_) => test(&mut World::with(fast_path)),
                Err(e) => thaw_test_skip::skip(format!("this host cannot {}: {}", e.step.name(), e.error)),
            })
        }));
        if let Err(panic) = ran {
            eprintln!("with fast_path = {fast_path:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

impl World {
    /// Makes the calling thread's namespace the host's.
    pub(super) fn with(fast_path: FastPathSetting) -> World {
        let mut outside = tap::in_thread().unwrap();
        let mut route = Socket::route().unwrap();
        let namespace = outside.tapped.namespace.as_fd();
        link::make_pair(&mut route, "wan", "lan", namespace).unwrap();
        let wan = link::index(&mut route, "wan").unwrap();
        link::add_address(&mut route, wan, HOST, 24).unwrap();
        let lan = link::index(&mut outside.route, "lan").unwrap();
        link::set_up(&mut outside.route, lan).unwrap();
        link::add_address(&mut outside.route, lan, OUTSIDE, 24).unwrap();
        for name in ["lo", "wan"] {
            let index = link::index(&mut route, name).unwrap();
            link::set_up(&mut route, index).unwrap();
        }
        let setup = Setup {
            nameservers: vec![OUTSIDE],
            fast_path,
            ..Setup::default()
        };
        World {
            outside: outside.tapped.namespace,
            networks: Networks::new(setup.clone()),
            setup,
        }
    }

    pub(super) fn slot(&self) -> NetworkSlot {
        self.networks.make(&()).unwrap()
    }

    /// Starts a server outside, which reports the addresses that it saw.
    pub(super) fn outside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        within(&self.outside, work)
    }

    pub(super) fn published(&self) -> usize {
        let mut socket = Socket::netfilter().unwrap();
        let mut count = |map| {
            nft::elements(&mut socket, &self.networks.host.table, map)
                .unwrap()
                .len()
        };
        count(host::AT) + count(host::ANYWHERE)
    }
}

pub(super) fn within<T: Send>(namespace: &OwnedFd, work: impl FnOnce() -> T + Send) -> T {
    on_a_thread(|| move_into(namespace.as_fd()).map(|()| work())).unwrap()
}

/// Frames carried between two taps, until it is dropped.
pub(super) struct Wire {
    stop: std::sync::Arc<AtomicBool>,
    carrier: Option<std::thread::JoinHandle<()>>,
}

impl Wire {
    pub(super) fn between(ours: OwnedFd, theirs: &OwnedFd) -> Wire {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let (theirs, stopped) = (theirs.try_clone().unwrap(), stop.clone());
        Wire {
            stop,
            carrier: Some(std::thread::spawn(move || carry(&ours, &theirs, &stopped))),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(carrier) = self.carrier.take() {
            carrier.join().unwrap();
        }
    }
}

/// A namespace that plays the guest behind a slot's tap: it has the guest's configuration, and frames are carried between both.
pub(super) struct Guest {
    pub namespace: OwnedFd,
    _wire: Wire,
}

impl Guest {
    pub(super) fn of(slot: &NetworkSlot) -> Guest {
        let (tap, namespace) = on_a_thread::<_, Failure>(|| {
            let namespace = enter(UnshareFlags::NEWNET)?;
            let tap = make_tap(GUEST_ADDRESS, GUEST_MAC)?;
            let mut route = Socket::route().unwrap();
            link::add_default_route(&mut route, TAP_INDEX, HOST_ADDRESS).unwrap();
            Ok((tap, namespace))
        })
        .unwrap();
        Guest {
            namespace,
            _wire: Wire::between(tap, &slot.tap),
        }
    }

    pub(super) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        within(&self.namespace, work)
    }

    pub(super) fn connect(&self, to: impl Into<SocketAddr>) -> std::io::Result<TcpStream> {
        let to = to.into();
        self.run(move || connect(to))
    }
}

/// Plays the relay of a slot, until it is dropped: carries every connection that the slot hands over, unread.
pub(super) struct BlindRelay(TcpListener);

impl BlindRelay {
    pub(super) fn of(slot: &NetworkSlot) -> BlindRelay {
        let (listener, connector) = (slot.relay_socket().unwrap(), slot.connector().unwrap());
        listener.set_nonblocking(false).unwrap();
        let relay = BlindRelay(listener.try_clone().unwrap());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let to = rustix::net::sockopt::ip_original_dst(&client).unwrap();
                let server = connector.socket().unwrap();
                server.set_nonblocking(false).unwrap();
                if rustix::net::connect(&server, &to).is_ok() {
                    pass(client.try_clone().unwrap(), server.try_clone().unwrap());
                    pass(server, client);
                }
            }
        });
        relay
    }
}

impl Drop for BlindRelay {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

/// Carries what one end sends to the other, in a thread, until it is silent for long.
fn pass(mut from: TcpStream, mut to: TcpStream) {
    from.set_read_timeout(Some(PATIENCE)).unwrap();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}

fn carry(a: &OwnedFd, b: &OwnedFd, stop: &AtomicBool) {
    let mut frame = vec![0; 80 << 10];
    let tick = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    while !stop.load(Ordering::Relaxed) {
        let mut both = [PollFd::new(a, PollFlags::IN), PollFd::new(b, PollFlags::IN)];
        poll(&mut both, Some(&tick)).unwrap();
        for (from, to) in [(a, b), (b, a)] {
            while let Ok(length) = rustix::io::read(from, &mut frame) {
                // A tap whose namespace is gone fails.
                let _ = rustix::io::write(to, &frame[..length]);
            }
        }
    }
}

pub(super) fn connect(to: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

pub(super) fn listen(address: Ipv4Addr, port: u16) -> TcpListener {
    TcpListener::bind((address, port)).unwrap()
}

/// Sends a word there and back, and returns the address that the server saw.
pub(super) fn talk(mut client: TcpStream, server: &TcpListener) -> SocketAddr {
    let (mut served, peer) = server.accept().unwrap();
    client.write_all(b"ping").unwrap();
    let mut said = [0; 4];
    served.read_exact(&mut said).unwrap();
    served.write_all(b"pong").unwrap();
    client.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"pong");
    peer
}

/// Leaves a slot's tap to a process that plays its VMM, and closes everything else of the slot.
pub(super) fn leave_to_vmm(slot: NetworkSlot) -> (std::process::Child, ProcessRecord) {
    let vmm = std::process::Command::new("sleep")
        .arg("600")
        .stdin(slot.tap.try_clone().unwrap())
        .spawn()
        .unwrap();
    let record = ProcessRecord::of(vmm.id() as i32).unwrap();
    (vmm, record)
}

/// Checks that a denied connection is refused rather than ignored.
pub(super) fn refused(connected: std::io::Result<TcpStream>) {
    assert_eq!(connected.unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

pub(super) fn policy(texts: &[&str]) -> Policy {
    let mut policy = NetworkPolicy::default();
    texts
        .iter()
        .for_each(|text| parse_into(&mut policy, text).unwrap());
    Policy::new(policy).unwrap()
}
