//! What a thawd may send a VMM, and what a program that is none: packets to a process without a machine. Each request is answered by
//! its number, one that is none ends the connection, and the process with it.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use thaw_protocol::control::{Command, ErrorCode, FromVmm, Request, Response, StartTimes};
use thaw_protocol::encoding::encode;
use thaw_protocol::packet::{self, PacketError};
use thaw_vmm::control::{End, serve};
use thaw_vmm::events::EventSink;
use thaw_vmm::machine::Machine;
use thaw_vmm::multihit::Multihit;

/// Packets of one input: as many as a socket takes without a reader.
const PACKETS: usize = 8;

// Each packet is a byte, its length, and that many bytes.
pub fn run(input: &[u8]) {
    let mut packets = Vec::new();
    let mut rest = input;
    while let [length, bytes @ ..] = rest {
        let (packet, more) = bytes.split_at(usize::from(*length).min(bytes.len()));
        packets.push(packet);
        rest = more;
    }
    packets.retain(|packet| !packet.is_empty());
    packets.truncate(PACKETS);

    let directory = tempfile::tempdir().expect("a directory");
    let address = SocketAddrUnix::new(directory.path().join("socket")).expect("a short path");
    let socket = || -> OwnedFd {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket")
    };
    let (listener, peer) = (socket(), socket());
    rustix::net::bind(&listener, &address).expect("a name");
    rustix::net::listen(&listener, 1).expect("a socket that listens");
    rustix::net::connect(&peer, &address).expect("a listener");
    for packet in &packets {
        rustix::net::send(&peer, packet, SendFlags::NOSIGNAL).expect("room");
    }
    rustix::net::shutdown(&peer, Shutdown::Write).expect("a socket");

    let events = EventSink::new().expect("an eventfd");
    let mut machine = Machine::new(events.clone(), StartTimes::default(), Multihit::NotAffected);
    let end = serve(listener, &mut machine, &events).expect("sockets work");

    for packet in packets {
        let (id, is_last) = match Request::read(packet) {
            Ok(Ok(request)) => {
                let bytes = encode(&request).expect("it was read from bytes");
                assert_eq!(Request::read(&bytes), Ok(Ok(request.clone())));
                (request.id, request.command == Command::Shutdown)
            }
            Ok(Err((id, _))) => (id, false),
            Err(_) => {
                assert_eq!(end, End::Disconnected);
                break;
            }
        };
        let receive = || packet::receive::<FromVmm>(&peer);
        let (reply, fds) = match receive() {
            // It ended before it had read all: that is said first, and once (unix(7)).
            Err(PacketError::Io(e)) if e.kind() == ErrorKind::ConnectionReset => receive(),
            answer => answer,
        }
        .expect("an answer");
        assert!(fds.is_empty());
        match reply {
            FromVmm::Reply { id: answered, result } => {
                assert_eq!(answered, id);
                // Without /dev/kvm there is no machine to do anything with.
                let expected = match result {
                    Ok(response) => matches!(response, Response::Done | Response::Status { .. } | Response::Hello { .. }),
                    Err(e) => matches!(e.code, ErrorCode::WrongState | ErrorCode::Invalid | ErrorCode::Version),
                };
                assert!(expected);
            }
            FromVmm::Event(event) => panic!("{event:?} of a process without a machine"),
        }
        if is_last {
            assert_eq!(end, End::Shutdown);
            break;
        }
    }
}
