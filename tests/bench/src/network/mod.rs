//! What `make bench-network` measures: packets through a slot, with its fast path and without, in turn; and TCP of a guest beside TCP
//! over a pair of interfaces.
//!
//! The guest is this program: it writes frames to the tap and reads them, as a VMM does. Outside is another network
//! namespace, behind a host that is one too, which masquerades; so nothing of the machine's own network is part of it.
//!
//! | module | holds |
//! |---|---|
//! | [`place`] | the host and what is outside |
//! | [`namespace`] | a network namespace |
//! | [`frames`] | the guest's end of a tap |
//! | [`inside`] | a guest with a TCP of its own |
//! | [`streams`] | connections whose throughput is measured |

pub mod frames;
pub mod inside;
pub mod namespace;
pub mod place;
pub mod streams;

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use frames::Guest;
use place::{HOST, OUTSIDE};

/// Packets that are on their way at once, so few that most bursts are not interrupted: the tap holds 1000.
const BURST: usize = 50;
/// Nothing here takes that long but a packet that is lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// One way through a host: a guest, and a server outside that knows it.
pub struct Path {
    guest: Guest,
    server: UdpSocket,
    port: u16,
    peer: SocketAddr,
}

impl Path {
    /// Has the guest speak to the server, at its port, so that the server knows where it is.
    pub fn open(guest: Guest, server: UdpSocket, port: u16) -> Result<Path, String> {
        let failed = |e: io::Error| format!("the first packet: {e}");
        server.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        guest.send(&guest.datagram(OUTSIDE, port, 8)).map_err(failed)?;
        let (_, peer) = server.recv_from(&mut [0; 2048]).map_err(failed)?;
        match peer {
            SocketAddr::V4(peer) if *peer.ip() == HOST => {}
            other => return Err(format!("the guest is {other} outside")),
        }
        server.set_nonblocking(true).map_err(failed)?;
        Ok(Path {
            guest,
            server,
            port,
            peer,
        })
    }

    /// Packets a second out of the guest, of so many bytes of payload, in one burst. Those that do not arrive do not count.
    pub fn outward(&mut self, bytes: usize) -> Result<f64, String> {
        let frame = self.guest.datagram(OUTSIDE, self.port, bytes);
        let began = Instant::now();
        for _ in 0..BURST {
            self.guest
                .send(&frame)
                .map_err(|e| format!("write a frame: {e}"))?;
        }
        let took = began.elapsed();
        let mut buffer = [0; 2048];
        let arrived = drained(|| match self.server.recv(&mut buffer) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(format!("receive outside: {e}")),
        })?;
        Ok(arrived as f64 / took.as_secs_f64())
    }

    /// The same to the guest.
    pub fn inward(&mut self, bytes: usize) -> Result<f64, String> {
        let payload = vec![1; bytes];
        let began = Instant::now();
        for _ in 0..BURST {
            let sent = self.server.send_to(&payload, self.peer);
            sent.map_err(|e| format!("send from outside: {e}"))?;
        }
        let took = began.elapsed();
        let arrived = drained(|| self.guest.receive())?;
        Ok(arrived as f64 / took.as_secs_f64())
    }

    /// How long a packet takes there and its answer back, one after the other: nobody sleeps meanwhile.
    pub fn round_trips(&mut self, count: usize) -> Result<Vec<Duration>, String> {
        let frame = self.guest.datagram(OUTSIDE, self.port, 8);
        let mut buffer = [0; 2048];
        let mut trips = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            self.guest
                .send(&frame)
                .map_err(|e| format!("write a frame: {e}"))?;
            let lost = || match began.elapsed() > PATIENCE {
                true => Err("a packet was lost".to_owned()),
                false => Ok(()),
            };
            while let Err(e) = self.server.recv(&mut buffer) {
                match e.kind() {
                    io::ErrorKind::WouldBlock => lost()?,
                    _ => return Err(format!("receive outside: {e}")),
                }
            }
            let sent = self.server.send_to(&[2; 8], self.peer);
            sent.map_err(|e| format!("send from outside: {e}"))?;
            while !self.guest.receive()? {
                lost()?;
            }
            trips.push(began.elapsed());
        }
        Ok(trips)
    }
}

/// Takes a burst's packets: how many came.
fn drained(mut take: impl FnMut() -> Result<bool, String>) -> Result<usize, String> {
    let until = Instant::now() + PATIENCE;
    let mut received = 0;
    while received < BURST && Instant::now() < until {
        match take()? {
            true => received += 1,
            false => std::thread::yield_now(),
        }
    }
    Ok(received)
}
