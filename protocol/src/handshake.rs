//! The handshake: what makes this guest this sandbox, before anything else may run in it (DESIGN §4.5).
//!
//! The agent listens on [`HANDSHAKE_PORT`], then dials the same port of the host once: the VMM reports that as a
//! doorbell and resets the connection. The host connects, sends one [`Greeting`], gets its answer, and the connection
//! closes. [`Greeting::Become`]: the agent takes the entropy, asks the time ([`FromAgent::WhatTime`], answered by one
//! [`Time`]: a clock sent along would be wrong by however long the way and the entropy took), applies the rest, opens
//! [`AGENT_PORT`] and answers [`FromAgent::Acknowledged`]. Until then the agent starts no process, and a host that gets no valid acknowledgement destroys
//! the machine.
//!
//! A guest with workloads is frozen and thawed by the same port, which stays open: [`Greeting::Quiesce`] stops every
//! workload (cgroup freezer) before the snapshot; in the original [`Greeting::Continue`] lets them go on, in a clone
//! [`Greeting::Become`] does, after its entropy, clock and identity are in force.
//!
//! A frame is a little-endian u32 length, then that many bytes of postcard; at most [`MAX_FRAME`].
//!
//! What has a version is refused by it before the rest is read ([`read_greeting`], [`read_answer`], [`read_quiesced`]), whose form
//! another version may change. An agent answers an identity of a version it does not understand with its own version.

use std::io::{self, Read, Write};
use std::net::IpAddr;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::encoding::{decode, encode, take};
use crate::packet::PacketError;
use crate::{tags, versions};

/// vsock port of the handshake, in the guest; dialled by the guest at the host, it is the doorbell.
pub const HANDSHAKE_PORT: u32 = 1023;
/// vsock port of the agent's ttrpc API, as Kata's agent has it.
pub const AGENT_PORT: u32 = 1024;
/// vsock port of the guest's loopback: a host that connects says a port of TCP (two bytes, the higher first), and is connected to
/// what listens there. Where nothing does, the connection is closed.
pub const FORWARD_PORT: u32 = 1025;
/// The guest's vsock CID: the same in every guest.
pub const GUEST_CID: u32 = 3;
/// Largest frame, in bytes.
pub const MAX_FRAME: usize = 64 * 1024;
/// Version of this protocol.
pub const HANDSHAKE_VERSION: u32 = versions::HANDSHAKE.current;
/// Least fresh entropy, in bytes.
pub const MIN_ENTROPY: usize = 32;
/// Word of the guest kernel's command line, for guests that become templates: before it rings, the agent pays for what a first
/// container costs, so that no clone does.
pub const WARM: &str = "thaw.warm";
/// Word of the guest kernel's command line, for the test that clones are alike without it: no entropy is credited and nothing
/// reseeded. The kernel's own answer to a new VM generation ID must be switched off beside it
/// (`initcall_blacklist=vmgenid_driver_init`).
pub const KEEP_ENTROPY: &str = "thaw.test=keep-entropy";
/// Word of the guest kernel's command line, for the same test: after the entropy is credited, or is not, the agent tells its
/// console the generator's next bytes.
pub const SHOW_ENTROPY: &str = "thaw.test=show-entropy";

/// One network address of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub ip: IpAddr,
    pub prefix: u8,
    /// Whether all of its prefix is on the link. Without, what is there is reached by [`Network::routes`] alone.
    pub on_link: bool,
}

/// One route of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Where to. A prefix of 0 is everything of the address' family.
    pub to: IpAddr,
    pub prefix: u8,
    /// None: it is on the link.
    pub gateway: Option<IpAddr>,
    /// The address connections are made from.
    pub source: Option<IpAddr>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// The gateway is on the link, though no route says so.
    pub gateway_on_link: bool,
}

/// Who is where on the guest's link, for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    pub ip: IpAddr,
    pub mac: [u8; 6],
}

/// What the guest's one network interface is told to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The interface's, in the guest.
    pub name: String,
    pub mac: [u8; 6],
    pub mtu: u16,
    /// Whether it asks who is where (ARP, neighbour discovery).
    pub arp: bool,
    pub addresses: Vec<Address>,
    /// To one place, one.
    pub routes: Vec<Route>,
    pub neighbours: Vec<Neighbour>,
    /// Name servers, for /etc/resolv.conf.
    pub nameservers: Vec<IpAddr>,
}

/// What the host says on a connection to [`HANDSHAKE_PORT`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Greeting {
    /// Answered by [`FromAgent`]s, the last an acknowledgement.
    Become(Box<Identity>),
    /// Stops every workload. Answered by [`Quiesced`].
    Quiesce,
    /// Lets the workloads that [`Greeting::Quiesce`] stopped go on. Answered by [`Quiesced`].
    Continue,
}

tags!(Greeting {
    Become = 0,
    Quiesce = 1,
    Continue = 2,
});

/// From the agent: workloads are stopped, or run again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiesced {
    pub version: u32,
    /// Absent on success.
    pub failure: Option<String>,
}

/// From the host: who this guest is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub version: u32,
    /// Echoed in the acknowledgement.
    pub nonce: [u8; 16],
    /// Fresh random bytes, at least [`MIN_ENTROPY`]: credited to the kernel's pool, which is then reseeded.
    pub entropy: Vec<u8>,
    pub hostname: String,
    pub machine_id: [u8; 16],
    /// Absent: the interface stays down.
    pub network: Option<Network>,
    /// CPUs to be online; the machine has at least as many.
    pub cpus: u8,
    /// Memory to have in all, MiB. What is above boot memory comes by virtio-mem, and is online before the
    /// acknowledgement.
    pub memory_mib: u32,
    /// Before the acknowledgement a container is made, run and removed: this guest is thawed only to record which pages a
    /// sandbox touches.
    pub rehearsal: bool,
}

/// What the agent says once it was told to become somebody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum FromAgent {
    /// Asks for a [`Time`], at once. At most once.
    WhatTime,
    /// The end: the identity is in force, or is not.
    Acknowledged(Box<Acknowledgement>),
}

tags!(FromAgent {
    WhatTime = 0,
    Acknowledged = 1,
});

/// From the host: the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    /// Nanoseconds since the Unix epoch, read as late as possible.
    pub wall_clock_ns: u64,
}

/// From the agent: the identity is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledgement {
    pub version: u32,
    pub nonce: [u8; 16],
    /// Absent on success; otherwise what could not be applied, and the machine is destroyed.
    pub failure: Option<String>,
    /// Guest CLOCK_BOOTTIME nanoseconds when the agent's `main` began.
    pub agent_started: u64,
    /// Guest CLOCK_BOOTTIME nanoseconds when the agent rang the doorbell.
    pub agent_ready: u64,
    /// Guest CLOCK_BOOTTIME nanoseconds: the identity was read, and was in force.
    pub received: u64,
    pub applied: u64,
    /// Guest nanoseconds between its asking the time and its knowing it: the clock is off by at most half of them.
    pub time_round_trip_ns: u64,
    /// Guest CLOCK_REALTIME nanoseconds just before this was sent.
    pub wall_clock_ns: u64,
    /// A `thaw.test=` word of the kernel's command line weakened what was applied: refuse it outside tests.
    pub test_hooks: bool,
}

/// Writes one frame.
pub fn write_frame<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), PacketError> {
    let body = encode(message)?;
    if body.len() > MAX_FRAME {
        return Err(PacketError::TooLarge {
            bytes: body.len(),
            fds: 0,
        });
    }
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&body);
    to.write_all(&frame)?;
    to.flush()?;
    Ok(())
}

/// Reads one frame.
pub fn read_frame<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, PacketError> {
    Ok(decode(&read_body(from)?)?)
}

/// Reads what a host says.
///
/// # Errors
/// [`PacketError::Version`] of an identity of another version.
pub fn read_greeting(from: &mut impl Read) -> Result<Greeting, PacketError> {
    const BECOME: u32 = 0;
    read_understood(from, Some(BECOME))
}

/// Reads what an agent says that was told to become somebody.
///
/// # Errors
/// [`PacketError::Version`] of an acknowledgement of another version.
pub fn read_answer(from: &mut impl Read) -> Result<FromAgent, PacketError> {
    const ACKNOWLEDGED: u32 = 1;
    read_understood(from, Some(ACKNOWLEDGED))
}

/// Reads what an agent says of its workloads.
///
/// # Errors
/// [`PacketError::Version`] of an answer of another version.
pub fn read_quiesced(from: &mut impl Read) -> Result<Quiesced, PacketError> {
    read_understood(from, None)
}

/// Reads one frame. Its version must be understood: it is behind this tag, or comes first where there is none.
fn read_understood<T: DeserializeOwned>(from: &mut impl Read, tag: Option<u32>) -> Result<T, PacketError> {
    let body = read_body(from)?;
    let versioned = match tag {
        None => Some(body.as_slice()),
        Some(tag) => {
            // Not its bytes: a number has more than one form.
            let (found, rest) = take::<u32>(&body)?;
            (found == tag).then_some(rest)
        }
    };
    if let Some(versioned) = versioned {
        let (version, _) = take::<u32>(versioned)?;
        versions::HANDSHAKE.check(version)?;
    }
    Ok(decode(&body)?)
}

fn read_body(from: &mut impl Read) -> Result<Vec<u8>, PacketError> {
    let mut length = [0u8; 4];
    from.read_exact(&mut length).map_err(closed)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_FRAME {
        return Err(PacketError::TooLarge {
            bytes: length,
            fds: 0,
        });
    }
    let mut body = vec![0u8; length];
    from.read_exact(&mut body).map_err(closed)?;
    Ok(body)
}

fn closed(e: io::Error) -> PacketError {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => PacketError::Closed,
        _ => PacketError::Io(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            version: HANDSHAKE_VERSION,
            nonce: [7; 16],
            entropy: vec![9; 48],
            hostname: "h".into(),
            machine_id: [1; 16],
            network: Some(Network {
                name: "eth0".into(),
                mac: [2; 6],
                mtu: 1500,
                arp: true,
                addresses: vec![Address {
                    ip: "10.0.0.2".parse().unwrap(),
                    prefix: 30,
                    on_link: true,
                }],
                routes: vec![Route {
                    to: "0.0.0.0".parse().unwrap(),
                    prefix: 0,
                    gateway: Some("10.0.0.1".parse().unwrap()),
                    source: None,
                    scope: 0,
                    gateway_on_link: false,
                }],
                neighbours: vec![Neighbour {
                    ip: "10.0.0.1".parse().unwrap(),
                    mac: [4; 6],
                }],
                nameservers: vec![],
            }),
            cpus: 2,
            memory_mib: 512,
            rehearsal: false,
        }
    }

    #[test]
    fn a_frame_survives_the_wire() {
        let mut wire = Vec::new();
        write_frame(&mut wire, &identity()).unwrap();
        assert_eq!(read_frame::<Identity>(&mut wire.as_slice()).unwrap(), identity());
    }

    #[test]
    fn another_version_is_refused_before_its_form() {
        let wrong = |e: &PacketError| matches!(e, PacketError::Version(_));
        for version in [HANDSHAKE_VERSION - 1, HANDSHAKE_VERSION + 1, u32::MAX] {
            let version = encode(&version).unwrap();
            // A tag, the version, and what no release has sent yet.
            for (frame, read) in [
                (vec![0], 0),
                (vec![0x80, 0], 0),
                (vec![1], 1),
                (vec![0x81, 0], 1),
                (vec![], 2),
            ] {
                let body = [frame, version.clone(), vec![0xff; 20]].concat();
                let wire = [&(body.len() as u32).to_le_bytes()[..], &body].concat();
                let error = match read {
                    0 => read_greeting(&mut wire.as_slice()).unwrap_err(),
                    1 => read_answer(&mut wire.as_slice()).unwrap_err(),
                    _ => read_quiesced(&mut wire.as_slice()).unwrap_err(),
                };
                assert!(wrong(&error), "{error}");
            }
        }
        let mut wire = Vec::new();
        for greeting in [Greeting::Quiesce, Greeting::Become(Box::new(identity()))] {
            wire.clear();
            write_frame(&mut wire, &greeting).unwrap();
            assert_eq!(read_greeting(&mut wire.as_slice()).unwrap(), greeting);
        }
        wire.clear();
        write_frame(&mut wire, &FromAgent::WhatTime).unwrap();
        assert_eq!(read_answer(&mut wire.as_slice()).unwrap(), FromAgent::WhatTime);
    }

    #[test]
    fn a_cut_frame_is_closed_and_a_huge_one_is_refused_before_it_is_read() {
        let mut wire = Vec::new();
        write_frame(&mut wire, &identity()).unwrap();
        wire.pop();
        assert!(matches!(
            read_frame::<Identity>(&mut wire.as_slice()),
            Err(PacketError::Closed)
        ));
        let huge = u32::MAX.to_le_bytes();
        assert!(matches!(
            read_frame::<Identity>(&mut huge.as_slice()),
            Err(PacketError::TooLarge { .. })
        ));
    }

    proptest::proptest! {
        #[test]
        fn decoding_any_bytes_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..256)) {
            let _ = decode::<Greeting>(&bytes);
            let _ = decode::<Quiesced>(&bytes);
            let _ = decode::<FromAgent>(&bytes);
            let _ = decode::<Time>(&bytes);
            let wire = [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat();
            let _ = read_greeting(&mut wire.as_slice());
            let _ = read_answer(&mut wire.as_slice());
            let _ = read_quiesced(&mut wire.as_slice());
        }
    }
}
