//! The handshake gives a thawed guest the identity of its sandbox before the agent starts anything in it.
//!
//! The agent listens on [`HANDSHAKE_PORT`], then connects once to the same port of the host. The VMM reports
//! this as a doorbell and resets the connection. The host connects to the agent, sends one [`Greeting`] and
//! gets its answer; then the connection closes. After [`Greeting::Become`] the agent credits the entropy and
//! asks for the time ([`FromAgent::WhatTime`], answered by one [`Time`]). It asks because a time in the
//! greeting would be late by the duration of the transfer and the reseeding. Then it applies the rest,
//! listens on [`AGENT_PORT`] and sends [`FromAgent::Acknowledged`]. Until then it starts no process. A host
//! that gets no valid acknowledgement destroys the machine.
//!
//! The port stays open, because the host also uses it to freeze and thaw a guest with workloads.
//! [`Greeting::Quiesce`] stops every workload (cgroup freezer) before the snapshot. [`Greeting::Continue`]
//! resumes them in the original. In a clone [`Greeting::Become`] resumes them, after the new entropy, clock
//! and identity are in force.
//!
//! A frame is a little-endian u32 length and that many bytes of postcard, at most [`MAX_FRAME`].
//!
//! The readers check a message's version before they decode the rest ([`read_greeting`], [`read_answer`],
//! [`read_quiesced`]), because another version may have other fields. An agent answers an identity of an
//! unsupported version with its own version.

use std::io::{self, Read, Write};
use std::net::IpAddr;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::encoding::{decode, encode, take};
use crate::packet::PacketError;
use crate::{tags, versions};

/// vsock port of the handshake in the guest. On the host it is the doorbell, to which the guest connects.
pub const HANDSHAKE_PORT: u32 = 1023;
/// vsock port of the agent's ttrpc API, as in Kata.
pub const AGENT_PORT: u32 = 1024;
/// vsock port for connections to the guest's loopback. The host sends a TCP port (two bytes, big-endian) and
/// is connected to the listener on it. Without a listener the agent closes the connection.
pub const FORWARD_PORT: u32 = 1025;
/// The vsock CID of every guest.
pub const GUEST_CID: u32 = 3;
/// Largest frame, in bytes.
pub const MAX_FRAME: usize = 64 * 1024;
/// The newest version of this protocol.
pub const HANDSHAKE_VERSION: u32 = versions::HANDSHAKE.current;
/// Minimum of fresh entropy, in bytes.
pub const MIN_ENTROPY: usize = 32;
/// Word on the guest kernel's command line of guests that become templates. Before it rings the doorbell, the
/// agent does the one-time work of a first container, so that clones need not.
pub const WARM: &str = "thaw.warm";
/// Word on the guest kernel's command line, used by the test that shows what entropy prevents: the agent
/// neither credits entropy nor reseeds. The test must also switch off the kernel's own reseeding on a new VM
/// generation ID (`initcall_blacklist=vmgenid_driver_init`).
pub const KEEP_ENTROPY: &str = "thaw.test=keep-entropy";
/// Word on the guest kernel's command line, used by the same test: after the entropy step, the agent prints
/// the next bytes of the random generator on the console.
pub const SHOW_ENTROPY: &str = "thaw.test=show-entropy";

/// One IP address of the guest's interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub ip: IpAddr,
    pub prefix: u8,
    /// Whether the whole prefix is on the link. If not, hosts in it are reached through [`Network::routes`]
    /// only.
    pub on_link: bool,
}

/// One route of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination. With a prefix of 0 it is the default route of the address family.
    pub to: IpAddr,
    pub prefix: u8,
    /// `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The preferred source address.
    pub source: Option<IpAddr>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// The gateway is on the link although no route covers it (`RTNH_F_ONLINK`).
    pub gateway_on_link: bool,
}

/// A permanent neighbour entry (ARP or NDP) of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    pub ip: IpAddr,
    pub mac: [u8; 6],
}

/// The configuration of the guest's network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The interface's name in the guest.
    pub name: String,
    pub mac: [u8; 6],
    pub mtu: u16,
    /// Whether the interface uses ARP and neighbour discovery.
    pub arp: bool,
    pub addresses: Vec<Address>,
    /// At most one route per destination.
    pub routes: Vec<Route>,
    pub neighbours: Vec<Neighbour>,
    /// Name servers for /etc/resolv.conf.
    pub nameservers: Vec<IpAddr>,
}

/// The first message on a connection to [`HANDSHAKE_PORT`], from the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Greeting {
    /// Gives the guest its identity. The agent answers with [`FromAgent`]s; the last is an acknowledgement.
    Become(Box<Identity>),
    /// Stops every workload. The answer is [`Quiesced`].
    Quiesce,
    /// Resumes the workloads that [`Greeting::Quiesce`] stopped. The answer is [`Quiesced`].
    Continue,
}

tags!(Greeting {
    Become = 0,
    Quiesce = 1,
    Continue = 2,
});

/// From the agent: the workloads are stopped, or run again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiesced {
    pub version: u32,
    /// `None` on success.
    pub failure: Option<String>,
}

/// From the host: the guest's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub version: u32,
    /// The acknowledgement repeats it.
    pub nonce: [u8; 16],
    /// Fresh random bytes, at least [`MIN_ENTROPY`]. The agent credits them to the kernel's pool and reseeds
    /// it.
    pub entropy: Vec<u8>,
    pub hostname: String,
    pub machine_id: [u8; 16],
    /// `None` leaves the interface down.
    pub network: Option<Network>,
    /// Number of CPUs to bring online; the machine has at least as many.
    pub cpus: u8,
    /// Total memory in MiB. The part above boot memory comes through virtio-mem and is online before the
    /// acknowledgement.
    pub memory_mib: u32,
    /// Before it acknowledges, the agent makes, runs and removes a container. The template build thaws such a
    /// guest to record which pages a sandbox touches.
    pub rehearsal: bool,
}

/// The agent's answers to [`Greeting::Become`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum FromAgent {
    /// Requests a [`Time`], which the host sends at once. At most one per handshake.
    WhatTime,
    /// The last message: the identity is in force, or failed.
    Acknowledged(Box<Acknowledgement>),
}

tags!(FromAgent {
    WhatTime = 0,
    Acknowledged = 1,
});

/// From the host: the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    /// Nanoseconds since the Unix epoch, read immediately before sending.
    pub wall_clock_ns: u64,
}

/// From the agent: the identity is in force, or the part that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledgement {
    pub version: u32,
    pub nonce: [u8; 16],
    /// `None` on success. Otherwise the part that could not be applied; the host then destroys the machine.
    pub failure: Option<String>,
    /// Guest CLOCK_BOOTTIME nanoseconds when the agent's `main` began.
    pub agent_started: u64,
    /// Guest CLOCK_BOOTTIME nanoseconds when the agent rang the doorbell.
    pub agent_ready: u64,
    /// Guest CLOCK_BOOTTIME nanoseconds when the agent had read the identity, and when it was in force.
    pub received: u64,
    pub applied: u64,
    /// Guest nanoseconds from requesting the time to receiving it. The clock is off by at most half of them.
    pub time_round_trip_ns: u64,
    /// Guest CLOCK_REALTIME nanoseconds just before the agent sent this.
    pub wall_clock_ns: u64,
    /// A `thaw.test=` word on the kernel's command line weakened the handshake. Hosts refuse this outside
    /// tests.
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

/// Reads the host's first message.
///
/// # Errors
/// [`PacketError::Version`] if the identity has an unsupported version.
pub fn read_greeting(from: &mut impl Read) -> Result<Greeting, PacketError> {
    const BECOME: u32 = 0;
    read_understood(from, Some(BECOME))
}

/// Reads an agent's answer to [`Greeting::Become`].
///
/// # Errors
/// [`PacketError::Version`] if the acknowledgement has an unsupported version.
pub fn read_answer(from: &mut impl Read) -> Result<FromAgent, PacketError> {
    const ACKNOWLEDGED: u32 = 1;
    read_understood(from, Some(ACKNOWLEDGED))
}

/// Reads an agent's answer to [`Greeting::Quiesce`] or [`Greeting::Continue`].
///
/// # Errors
/// [`PacketError::Version`] if the answer has an unsupported version.
pub fn read_quiesced(from: &mut impl Read) -> Result<Quiesced, PacketError> {
    read_understood(from, None)
}

/// Reads one frame and checks its version, which follows variant `tag`, or is the first field if `tag` is
/// `None`.
fn read_understood<T: DeserializeOwned>(from: &mut impl Read, tag: Option<u32>) -> Result<T, PacketError> {
    let body = read_body(from)?;
    let versioned = match tag {
        None => Some(body.as_slice()),
        Some(tag) => {
            // Decode the tag: comparing bytes is not enough, as a varint has several encodings.
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
            // A tag, the version, and fields that no release has sent yet.
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
    fn cut_frame_ends_and_huge_frame_is_refused_unread() {
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
