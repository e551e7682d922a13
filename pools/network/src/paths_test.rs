//! Behaviour that is the same whether packets are redirected past a slot's namespace or pass through it. A slot that leaves its fast path
//! keeps the connections that it may keep, and no others.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use super::*;
use crate::testbed::*;
use thaw_sys::conntrack;
use thaw_sys::netlink::Socket;

fn udp(address: Ipv4Addr, port: u16) -> UdpSocket {
    let socket = UdpSocket::bind((address, port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn set<T>(socket: &UdpSocket, level: i32, option: i32, value: T) {
    // SAFETY: `value` has the option's type and outlives the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(&value).cast(),
            size_of::<T>() as u32,
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// One datagram, and its remaining hops.
fn hops(socket: &UdpSocket) -> (Vec<u8>, i32) {
    let mut bytes = vec![0u8; 9000];
    let mut space = [0u64; 8];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&space) as _;
    // SAFETY: every pointer in `message` is to memory of the stated size that outlives the call.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, 0) };
    assert!(length >= 0, "{}", std::io::Error::last_os_error());
    bytes.truncate(length as usize);
    // struct cmsghdr, of 16 bytes, and an int.
    (bytes, space[2] as i32)
}

#[test]
fn slot_has_a_fast_path_if_configured() {
    on_a_host(|world| {
        let slot = world.slot();
        let asked = world.setup.fast_path == FastPathSetting::Auto;
        match (asked, try_fast_path()) {
            (true, Err(e)) => thaw_test_skip::skip(e),
            (asked, _) => assert_eq!(slot.uplink.unwrap().is_fast(), asked),
        }
    });
}

#[test]
fn datagrams_of_any_size_lose_two_hops_each_way() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let server = world.outside(|| udp(OUTSIDE, 7));
        let client = guest.run(|| udp(GUEST_ADDRESS, 7));
        for socket in [&server, &client] {
            set(socket, libc::IPPROTO_IP, libc::IP_RECVTTL, 1i32);
        }
        // The last one is fragmented.
        for size in [0, 1, 2, 1000, 1472, 4000] {
            let sent: Vec<u8> = (0..size).map(|n| n as u8).collect();
            client.send_to(&sent, (OUTSIDE, 7)).unwrap();
            assert_eq!(hops(&server), (sent.clone(), 62));
            server.send_to(&sent, (HOST, 7)).unwrap();
            assert_eq!(hops(&client), (sent, 62));
        }
        // Without a checksum, and with options.
        set(&client, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1i32);
        client.send_to(b"unsummed", (OUTSIDE, 7)).unwrap();
        assert_eq!(hops(&server).0, b"unsummed");
        set(&client, libc::IPPROTO_IP, libc::IP_OPTIONS, [1u8, 1, 1, 0]);
        client.send_to(b"optional", (OUTSIDE, 7)).unwrap();
        assert_eq!(hops(&server).0, b"optional");
    });
}

#[test]
fn icmp_errors_reach_the_guest_they_are_about() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_mut().unwrap();
        uplink.publish(&["5353:53/udp".parse().unwrap()]).unwrap();
        let nobody = |socket: UdpSocket, to: SocketAddr| {
            socket.connect(to).unwrap();
            socket.send(b"anyone").unwrap();
            let error = socket.recv(&mut [0; 9]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{to}: {error}");
        };
        nobody(guest.run(|| udp(GUEST_ADDRESS, 0)), (OUTSIDE, 9).into());
        nobody(world.outside(|| udp(OUTSIDE, 0)), (HOST, 5353).into());
        // Too large for the host's next hop: the host reports this from an address to which no guest may send.
        let mut route = Socket::route().unwrap();
        let wan = link::index(&mut route, "wan").unwrap();
        link::set_mtu(&mut route, wan, 1300).unwrap();
        let socket = guest.run(|| udp(GUEST_ADDRESS, 0));
        socket.connect((OUTSIDE, 9)).unwrap();
        set(
            &socket,
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            libc::IP_PMTUDISC_DO,
        );
        socket.send(&[0; 1400]).unwrap();
        let error = socket.recv(&mut [0; 9]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE), "{error}");
        // The router at which a packet's TTL ends answers.
        let socket = guest.run(|| udp(GUEST_ADDRESS, 0));
        set(&socket, libc::IPPROTO_IP, libc::IP_TTL, 2i32);
        set(&socket, libc::IPPROTO_IP, libc::IP_RECVERR, 1i32);
        socket.connect((OUTSIDE, 9)).unwrap();
        socket.send(b"so far").unwrap();
        let error = socket.recv(&mut [0; 9]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::HostUnreachable, "{error}");
    });
}

#[test]
fn stream_of_many_packets_arrives_whole() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let server = world.outside(|| listen(OUTSIDE, 80));
        let mut client = guest.connect((OUTSIDE, 80)).unwrap();
        let (mut served, _) = server.accept().unwrap();
        let sent: Vec<u8> = (0..1u32 << 20).map(|n| (n / 251) as u8).collect();
        let mut received = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                client.write_all(&sent).unwrap();
                client.shutdown(std::net::Shutdown::Write).unwrap();
            });
            served.read_to_end(&mut received).unwrap();
        });
        assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                served.write_all(&sent).unwrap();
                served.shutdown(std::net::Shutdown::Write).unwrap();
            });
            received.clear();
            client.read_to_end(&mut received).unwrap();
        });
        assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
    });
}

#[test]
fn policy_keeps_allowed_connections_whoever_speaks() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_mut().unwrap();
        uplink.publish(&["8080:80".parse().unwrap()]).unwrap();
        let own = uplink.address();
        let outside = world.outside(|| listen(OUTSIDE, 443));
        let inside = guest.run(|| listen(GUEST_ADDRESS, 80));
        let pair = |client: std::net::TcpStream, server: &std::net::TcpListener| {
            let (served, _) = server.accept().unwrap();
            served.set_read_timeout(Some(PATIENCE)).unwrap();
            (client, served)
        };
        // Begun by the guest, by the world, by the host; the guest only answers the last two, to which no policy applies.
        let began = pair(guest.connect((OUTSIDE, 443)).unwrap(), &outside);
        let published = pair(world.outside(|| connect((HOST, 8080).into()).unwrap()), &inside);
        let hosts = pair(connect((own, 80).into()).unwrap(), &inside);
        let looped = pair(connect((Ipv4Addr::LOCALHOST, 8080).into()).unwrap(), &inside);
        uplink
            .set_policy(policy(&["allow=203.0.113.0/24:443/tcp", "default=deny"]))
            .unwrap();
        assert!(!uplink.is_fast());
        let say = |from: &mut std::net::TcpStream, to: &mut std::net::TcpStream| {
            from.write_all(b"still").unwrap();
            let mut said = [0; 5];
            to.read_exact(&mut said).unwrap();
        };
        for (mut client, mut served) in [began, published, hosts, looped] {
            say(&mut served, &mut client);
            say(&mut client, &mut served);
        }
        // Another policy change, which does not affect the connections.
        uplink.set_policy(policy(&["default=deny"])).unwrap();
        talk(connect((own, 80).into()).unwrap(), &inside);
        refused(guest.connect((OUTSIDE, 443)));
    });
}

#[test]
fn policy_ends_denied_connections_whoever_speaks() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_ref().unwrap();
        let server = world.outside(|| udp(OUTSIDE, 7));
        let client = guest.run(|| udp(GUEST_ADDRESS, 7));
        let mut said = [0; 9];
        client.send_to(b"before", (OUTSIDE, 7)).unwrap();
        let (_, peer) = server.recv_from(&mut said).unwrap();
        server.send_to(b"seen", peer).unwrap();
        assert_eq!(client.recv(&mut said).unwrap(), 4);

        uplink.set_policy(policy(&["deny=203.0.113.2:7"])).unwrap();
        // A later packet from there does not begin a connection that the guest may answer.
        server.send_to(b"answer me", peer).unwrap();
        let heard = world.outside(|| udp(OUTSIDE, 8));
        let _ = client.send_to(b"after", (OUTSIDE, 7));
        client
            .send_to(b"else", (OUTSIDE, 8))
            .or_else(|_| client.send_to(b"else", (OUTSIDE, 8)))
            .unwrap();
        assert_eq!(heard.recv(&mut said).unwrap(), 4);
        // An earlier packet would have arrived by now.
        server.set_nonblocking(true).unwrap();
        assert_eq!(server.recv(&mut said).unwrap_err().kind(), ErrorKind::WouldBlock);
    });
}

#[test]
fn assigned_policy_holds_from_the_first_packet() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_mut().unwrap();
        let terms = Terms {
            policy: policy(&["default=deny"]),
            ports: vec!["8080:80".parse().unwrap()],
        };
        uplink.assign(terms).unwrap();
        assert!(!uplink.is_fast());
        refused(guest.connect((OUTSIDE, 80)));
        let server = guest.run(|| listen(GUEST_ADDRESS, 80));
        talk(connect((HOST, 8080).into()).unwrap(), &server);
    });
}

#[test]
fn later_owner_takes_slot_off_its_fast_path() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_ref().unwrap();
        let (was_fast, described) = (uplink.is_fast(), uplink.describe());
        let server = world.outside(|| listen(OUTSIDE, 80));
        let (mut client, mut served) = {
            let client = guest.connect((OUTSIDE, 80)).unwrap();
            (client, server.accept().unwrap().0)
        };
        let (mut vmm, record) = leave_to_vmm(slot);
        let adopted = world.networks.adopt(record, &described).unwrap();
        let uplink = adopted.uplink.as_ref().unwrap();
        assert_eq!(uplink.is_fast(), was_fast);
        // The default policy, which a record without a policy implies.
        uplink.set_policy(policy(&[])).unwrap();
        assert_eq!(uplink.is_fast(), was_fast);
        uplink
            .set_policy(policy(&["allow=203.0.113.0/24:80/tcp", "default=deny"]))
            .unwrap();
        assert!(!uplink.is_fast());
        served.write_all(b"still").unwrap();
        client.read_exact(&mut [0; 5]).unwrap();
        refused(guest.connect((OUTSIDE, 81)));
        world.networks.destroy(adopted);
        vmm.kill().unwrap();
        vmm.wait().unwrap();
    });
}

#[test]
fn new_slot_has_no_connections_of_the_earlier_one() {
    on_a_host(|world| {
        let setup = Setup {
            range: "198.18.0.0/30".parse().unwrap(),
            ..world.setup.clone()
        };
        world.networks = Networks::new(setup);
        let slot = world.slot();
        let own = slot.uplink.as_ref().unwrap().address();
        let guest = Guest::of(&slot);
        let server = world.outside(|| udp(OUTSIDE, 7));
        let client = guest.run(|| udp(GUEST_ADDRESS, 7));
        client.send_to(b"first", (OUTSIDE, 7)).unwrap();
        let (_, peer) = server.recv_from(&mut [0; 9]).unwrap();
        drop((guest, client));
        world.networks.destroy(slot);
        let tracked = || {
            let mut socket = Socket::netfilter().unwrap();
            conntrack::find(&mut socket, |connection| connection.concerns(own)).unwrap()
        };
        assert_eq!(tracked().len(), 1);
        let next = world.slot();
        let uplink = next.uplink.as_ref().unwrap();
        assert_eq!(uplink.address(), own);
        if !uplink.is_fast() {
            // Its namespace admits no connection whose beginning it did not see.
            return;
        }
        assert_eq!(tracked(), []);
        // A listener at that port would receive both, if they arrived.
        let guest = Guest::of(&next);
        let client = guest.run(|| udp(GUEST_ADDRESS, 7));
        server.send_to(b"stale", peer).unwrap();
        client.send_to(b"second", (OUTSIDE, 7)).unwrap();
        let (_, peer) = server.recv_from(&mut [0; 9]).unwrap();
        server.send_to(b"fresh", peer).unwrap();
        let mut said = [0; 9];
        client.recv(&mut said).unwrap();
        assert_eq!(&said[..5], b"fresh");
    });
}
