//! Slots as guests, servers outside and the host itself see them.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::Duration;

use thaw_protocol::api::PublishedPort;

use super::*;
use crate::publish::Port;
use crate::testbed::*;
use thaw_sys::netlink::Socket;
use thaw_sys::nft;

/// Metadata and platform services: link-local, Azure's, Alibaba's, Oracle's.
const METADATA: [Ipv4Addr; 4] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];

fn port(text: &str) -> Port {
    text.parse().unwrap()
}

#[test]
fn slot_has_no_ipv6_that_a_guest_or_the_host_reaches() {
    if !std::path::Path::new("/proc/sys/net/ipv6").exists() {
        return thaw_test_skip::skip("the kernel has no IPv6");
    }
    on_a_host(|world| {
        let slot = world.slot();
        let off = |link: &str| {
            let file = format!("/proc/sys/net/ipv6/conf/{link}/disable_ipv6");
            std::fs::read_to_string(file).unwrap().trim() == "1"
        };
        let address = slot.uplink.as_ref().unwrap().address();
        let on_host = host::Host::link_name(world.setup.range.number(address).unwrap());
        assert!(off(&on_host), "{on_host}");
        within(&slot.namespace, || assert!(off(TAP_NAME) && off(UPLINK_NAME)));
    });
}

#[test]
fn guest_reaches_outside_and_nothing_forbidden() {
    on_a_host(|world| {
        let (one, two) = (world.slot(), world.slot());
        let (guest, other) = (Guest::of(&one), Guest::of(&two));
        let address = |slot: &NetworkSlot| slot.uplink.as_ref().unwrap().address();
        assert_ne!(address(&one), address(&two));

        let server = world.outside(|| listen(OUTSIDE, 80));
        for guest in [&guest, &other] {
            assert_eq!(talk(guest.connect((OUTSIDE, 80)).unwrap(), &server).ip(), HOST);
        }
        // The host itself, at each of its addresses.
        let _host = (listen(HOST, 9000), listen(Ipv4Addr::UNSPECIFIED, 9001));
        let gateway = Ipv4Addr::from_bits(address(&one).to_bits() - 1);
        guest.connect((HOST, 9000)).unwrap_err();
        refused(guest.connect((gateway, 9001)));
        // Metadata and other link-local addresses, although the host has a route to them.
        for metadata in METADATA {
            refused(guest.connect((metadata, 80)));
        }
        // Another guest, by its slot's address; the host does reach it there.
        let served = other.run(|| listen(GUEST_ADDRESS, 80));
        refused(guest.connect((address(&two), 80)));
        talk(connect((address(&two), 80).into()).unwrap(), &served);
        // A host outside cannot reach it, even with a route to it.
        world.outside(|| {
            let mut route = Socket::route().unwrap();
            let lan = link::index(&mut route, "lan").unwrap();
            link::add_default_route(&mut route, lan, HOST).unwrap();
            let lost = TcpStream::connect_timeout(&(address(&two), 80).into(), Duration::from_millis(300));
            lost.unwrap_err();
        });
        // A guest's packet with another address does not leave; its next correct one does.
        let server = world.outside(|| UdpSocket::bind((OUTSIDE, 7)).unwrap());
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        guest.run(|| {
            let mut route = Socket::route().unwrap();
            let claimed = Ipv4Addr::new(10, 219, 0, 9);
            link::add_address(&mut route, TAP_INDEX, claimed, 32).unwrap();
            for (address, word) in [(claimed, b"lie"), (GUEST_ADDRESS, b"own")] {
                let socket = UdpSocket::bind((address, 0)).unwrap();
                socket.send_to(word, (OUTSIDE, 7)).unwrap();
            }
        });
        let mut said = [0; 3];
        server.recv(&mut said).unwrap();
        assert_eq!(&said, b"own");
    });
}

#[test]
fn udp_leaves_and_answers_return() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let server = world.outside(|| UdpSocket::bind((OUTSIDE, 53)).unwrap());
        let asking = guest.run(|| UdpSocket::bind((GUEST_ADDRESS, 0)).unwrap());
        for socket in [&server, &asking] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        asking.send_to(b"who", (OUTSIDE, 53)).unwrap();
        let mut said = [0; 8];
        let (length, peer) = server.recv_from(&mut said).unwrap();
        assert_eq!((&said[..length], peer.ip()), (&b"who"[..], IpAddr::V4(HOST)));
        server.send_to(b"me", peer).unwrap();
        let (length, _) = asking.recv_from(&mut said).unwrap();
        assert_eq!(&said[..length], b"me");
    });
}

#[test]
fn host_name_server_is_reached_by_its_port_alone() {
    on_a_host(|world| {
        world.networks = Networks::new(Setup {
            nameservers: vec![HOST],
            ..world.setup.clone()
        });
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let (dns, web) = (listen(HOST, 53), listen(HOST, 80));
        talk(guest.connect((HOST, 53)).unwrap(), &dns);
        guest.connect((HOST, 80)).unwrap_err();
        drop(web);
        assert_eq!(world.networks.nameservers(), [IpAddr::V4(HOST)]);
    });
}

#[test]
fn platform_name_server_is_reached_by_its_port_alone() {
    on_a_host(|world| {
        let [_, azure, ..] = METADATA;
        let mut route = Socket::route().unwrap();
        let wan = link::index(&mut route, "wan").unwrap();
        link::add_address(&mut route, wan, Ipv4Addr::new(168, 63, 129, 1), 24).unwrap();
        world.outside(|| {
            let mut route = Socket::route().unwrap();
            let lan = link::index(&mut route, "lan").unwrap();
            link::add_address(&mut route, lan, azure, 24).unwrap();
        });
        world.networks = Networks::new(Setup {
            nameservers: vec![azure],
            ..world.setup.clone()
        });
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let (dns, _web) = world.outside(|| (listen(azure, 53), listen(azure, 80)));
        talk(guest.connect((azure, 53)).unwrap(), &dns);
        refused(guest.connect((azure, 80)));
    });
}

#[test]
fn published_port_leads_to_guest_from_everywhere() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_mut().unwrap();
        let ports = ["8080:80", "127.0.0.1:8081:80", "0:80"].map(port);
        uplink.publish(&ports).unwrap();
        let any = uplink.describe().published[2].host;
        assert!(any > 0);
        let server = guest.run(|| listen(GUEST_ADDRESS, 80));
        let peer = world.outside(|| talk(connect((HOST, 8080).into()).unwrap(), &server));
        assert_eq!(peer.ip(), OUTSIDE, "the guest sees who it is");
        for (address, port) in [
            (Ipv4Addr::LOCALHOST, 8080),
            (Ipv4Addr::LOCALHOST, 8081),
            (HOST, 8080),
            (Ipv4Addr::LOCALHOST, any),
        ] {
            talk(connect((address, port).into()).unwrap(), &server);
        }
        // Published only on the loopback.
        world.outside(|| connect((HOST, 8081).into()).unwrap_err());
        // Guests cannot reach one another in this way either.
        let two = world.slot();
        Guest::of(&two).connect((HOST, 8080)).unwrap_err();
        drop(guest);
        world.networks.destroy(slot);
        assert_eq!(world.published(), 0);
        connect((Ipv4Addr::LOCALHOST, 8080).into()).unwrap_err();
    });
}

#[test]
fn published_udp_port_leads_to_guest() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_mut().unwrap();
        uplink.publish(&[port("5353:53/udp")]).unwrap();
        let server = guest.run(|| UdpSocket::bind((GUEST_ADDRESS, 53)).unwrap());
        let asking = world.outside(|| UdpSocket::bind((OUTSIDE, 0)).unwrap());
        for socket in [&server, &asking] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        asking.send_to(b"who", (HOST, 5353)).unwrap();
        let mut said = [0; 8];
        let (_, peer) = server.recv_from(&mut said).unwrap();
        server.send_to(b"me", peer).unwrap();
        assert_eq!(asking.recv_from(&mut said).unwrap(), (2, (HOST, 5353).into()));
    });
}

#[test]
fn published_port_in_use_is_refused() {
    on_a_host(|world| {
        let (mut one, mut two) = (world.slot(), world.slot());
        let taken = |published: Result<(), Error>| {
            let error = published.unwrap_err();
            assert!(matches!(error, Error::PortInUse { .. }), "{error}");
        };
        let publish =
            |slot: &mut NetworkSlot, text: &str| slot.uplink.as_mut().unwrap().publish(&[port(text)]);
        publish(&mut one, "8080:80").unwrap();
        taken(publish(&mut two, "8080:80"));
        taken(publish(&mut two, "127.0.0.1:8080:80"));
        let server = listen(Ipv4Addr::LOCALHOST, 9090);
        taken(publish(&mut two, "9090:80"));
        drop(server);
        // A process that another test is starting may hold a copy of it for a moment.
        while let Err(error) = publish(&mut two, "9090:80") {
            assert!(matches!(error, Error::PortInUse { .. }), "{error}");
        }
        // All or none.
        taken(
            two.uplink
                .as_mut()
                .unwrap()
                .publish(&["9191:80", "8080:80"].map(port)),
        );
        assert_eq!(world.published(), 2);
        let elsewhere = publish(&mut two, "198.51.100.7:80:80").unwrap_err();
        assert!(matches!(elsewhere, Error::NotOurAddress { .. }), "{elsewhere}");
    });
}

#[test]
fn policy_change_applies_to_existing_connections() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_ref().unwrap();
        let (allowed, denied) = world.outside(|| (listen(OUTSIDE, 443), listen(OUTSIDE, 80)));
        let (mut stays, mut goes) = (
            guest.connect((OUTSIDE, 443)).unwrap(),
            guest.connect((OUTSIDE, 80)).unwrap(),
        );
        let (served, _) = allowed.accept().unwrap();
        let _unserved = denied.accept().unwrap();

        uplink
            .set_policy(policy(&["allow=203.0.113.0/24:443/tcp", "default=deny"]))
            .unwrap();
        stays.write_all(b"still").unwrap();
        let mut said = [0; 5];
        (&served).read_exact(&mut said).unwrap();
        goes.write_all(b"x").unwrap();
        let ended = goes.read(&mut said).unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::ConnectionReset);
        refused(guest.connect((OUTSIDE, 80)));
        talk(guest.connect((OUTSIDE, 443)).unwrap(), &allowed);
        assert_eq!(uplink.describe().policy.egress.len(), 1);

        uplink.set_policy(policy(&["deny=203.0.113.0/24:443"])).unwrap();
        refused(guest.connect((OUTSIDE, 443)));
        talk(guest.connect((OUTSIDE, 80)).unwrap(), &denied);
        // No policy opens a barred address.
        uplink.set_policy(policy(&["allow=0.0.0.0/0"])).unwrap();
        for metadata in METADATA {
            refused(guest.connect((metadata, 80)));
        }
        refused(guest.connect((uplink.host_address(), 80)));
    });
}

#[test]
fn largest_policy_is_enforced() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let ports: Vec<String> = (1000..1004).map(|p| p.to_string()).collect();
        let texts: Vec<String> = (0..64)
            .map(|n| format!("deny=10.{n}.0.0/16:{}", ports.join(",")))
            .collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let uplink = slot.uplink.as_ref().unwrap();
        uplink.set_policy(policy(&texts)).unwrap();
        refused(guest.connect(([10, 63, 1, 1], 1003)));
        let server = world.outside(|| listen(OUTSIDE, 1003));
        talk(guest.connect((OUTSIDE, 1003)).unwrap(), &server);
    });
}

#[test]
fn port_of_dead_owner_is_published_again() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let uplink = slot.uplink.as_mut().unwrap();
        uplink.publish(&[port("8080:80")]).unwrap();
        let name = host::Host::link_name(world.networks.host.setup.range.number(uplink.address()).unwrap());
        // As after kill -9: descriptors are closed, and nothing else happens.
        uplink.keep();
        drop(slot);
        let inet = UdpSocket::bind("0.0.0.0:0").unwrap();
        while rustix::net::netdevice::name_to_index(&inet, &name).is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(world.published(), 1);
        let mut next = world.slot();
        next.uplink.as_mut().unwrap().publish(&[port("8080:80")]).unwrap();
        assert_eq!(world.published(), 1);
        next.uplink.as_mut().unwrap().keep();
        world.networks.destroy(next);
        assert_eq!(world.published(), 1);
        world.networks.host.sweep().unwrap();
        assert_eq!(world.published(), 0);
    });
}

#[test]
fn listener_removes_ports_of_a_gone_slot() {
    on_a_host(|world| {
        world.networks.listen().unwrap();
        let (mut dead, mut living) = (world.slot(), world.slot());
        for (slot, published) in [(&mut dead, "8080:80"), (&mut living, "8081:80")] {
            slot.uplink.as_mut().unwrap().publish(&[port(published)]).unwrap();
        }
        assert_eq!(world.published(), 2);
        // As after kill -9 of its owner and its VMM.
        dead.uplink.as_mut().unwrap().keep();
        drop(dead);
        let since = std::time::Instant::now();
        while world.published() > 1 && since.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        assert_eq!(world.published(), 1);
        world.networks.destroy(living);
        assert_eq!(world.published(), 0);
    });
}

#[test]
fn later_owner_adopts_slot_of_a_vmm() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let guest = Guest::of(&slot);
        let uplink = slot.uplink.as_mut().unwrap();
        uplink.publish(&[port("8080:80")]).unwrap();
        uplink.set_policy(policy(&["deny=198.51.100.0/24"])).unwrap();
        uplink.keep();
        let described = uplink.describe();
        let (mut vmm, record) = leave_to_vmm(slot);
        let adopted = world.networks.adopt(record, &described).unwrap();
        let uplink = adopted.uplink.as_ref().unwrap();
        assert_eq!(uplink.describe(), described);
        let server = guest.run(|| listen(GUEST_ADDRESS, 80));
        talk(connect((Ipv4Addr::LOCALHOST, 8080).into()).unwrap(), &server);
        uplink.set_policy(policy(&["default=deny"])).unwrap();
        refused(guest.connect((OUTSIDE, 80)));
        world.networks.check(&adopted).unwrap();
        world.networks.destroy(adopted);
        assert_eq!(world.published(), 0);
        vmm.kill().unwrap();
        vmm.wait().unwrap();
    });
}

#[test]
fn range_in_use_and_forwarding_off_are_refused() {
    on_a_host(|world| {
        // A new namespace inherits the host's setting.
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap();
        let refuse = |setup: Setup| Networks::new(setup).make(&()).unwrap_err();
        let setup = Setup {
            forwarding: false,
            ..world.setup.clone()
        };
        let error = refuse(setup);
        assert!(matches!(error, Error::ForwardingOff), "{error}");
        let mut route = Socket::route().unwrap();
        let wan = link::index(&mut route, "wan").unwrap();
        link::add_address(&mut route, wan, Ipv4Addr::new(100, 64, 7, 1), 24).unwrap();
        let error = refuse(Setup::default());
        let text = error.to_string();
        assert!(text.contains("100.64.7.0/24 by wan"), "{text}");
        let setup = Setup {
            range: "198.18.0.0/30".parse().unwrap(),
            ..world.setup.clone()
        };
        world.networks = Networks::new(setup);
        let slot = world.slot();
        let error = world.networks.make(&()).unwrap_err();
        assert!(matches!(error, Error::RangeFull { slots: 1, .. }), "{error}");
        world.networks.destroy(slot);
        world.slot();
    });
}

#[test]
fn traffic_of_a_guest_is_counted() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let before = slot.traffic().unwrap();
        let server = world.outside(|| listen(OUTSIDE, 1003));
        talk(guest.connect((OUTSIDE, 1003)).unwrap(), &server);
        let after = slot.traffic().unwrap();
        assert!(after.sent_bytes > before.sent_bytes && after.sent_packets > before.sent_packets);
        assert!(after.received_bytes > before.received_bytes);
        assert!(after.received_packets > before.received_packets);
    });
}

#[test]
fn tap_without_its_device_is_unfit() {
    // A tap without an interface, like one whose namespace was removed.
    let Ok(tap) = File::options().read(true).write(true).open("/dev/net/tun") else {
        return thaw_test_skip::skip("cannot open /dev/net/tun");
    };
    let slot = NetworkSlot {
        tap: tap.into(),
        namespace: File::open("/dev/null").unwrap().into(),
        config: config(),
        uplink: None,
    };
    Networks::new(Setup::default()).check(&slot).unwrap_err();
}

#[test]
fn try_out_leaves_no_trace() {
    on_a_host(|_| {
        try_out().unwrap();
        let mut socket = Socket::netfilter().unwrap();
        let table = Host::new(Setup::default()).table;
        assert!(nft::elements(&mut socket, &table, host::AT).unwrap().is_empty());
        let mut route = Socket::route().unwrap();
        link::index(&mut route, "here").unwrap_err();
    });
}

#[test]
fn terms_are_read_or_refused() {
    let ask = |port: &str| PublishedPort {
        address: Some(port.into()),
        host: 1,
        guest: 1,
        protocol: "tcp".into(),
    };
    assert!(Terms::read(None, &[]).unwrap().are_default());
    assert!(!Terms::read(None, &[ask("0.0.0.0")]).unwrap().are_default());
    Terms::read(None, &[ask("x")]).unwrap_err();
    Terms::read(None, &vec![ask("0.0.0.0"); publish::MAX_PORTS + 1]).unwrap_err();
}
