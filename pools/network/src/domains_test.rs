//! Policies with domains, as guests see them.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use super::*;
use crate::testbed::*;

const MINUTE: Duration = Duration::from_secs(60);

/// A connection of a guest, and its other end.
struct Connection(TcpStream, TcpStream);

impl Connection {
    fn open(guest: &Guest, server: &TcpListener) -> Connection {
        let client = guest.connect((OUTSIDE, 80)).unwrap();
        Connection(client, server.accept().unwrap().0)
    }

    fn goes_on(&mut self) {
        self.0.write_all(b"still").unwrap();
        let mut said = [0; 5];
        self.1.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"still");
    }

    fn ended(mut self) {
        self.0.write_all(b"x").unwrap();
        let ended = self.0.read(&mut [0; 1]).unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::ConnectionReset);
    }
}

fn uplink(slot: &NetworkSlot) -> &Uplink {
    slot.uplink.as_ref().unwrap()
}

#[test]
fn guest_reaches_the_resolved_addresses_alone() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let server = world.outside(|| listen(OUTSIDE, 80));
        let before = Connection::open(&guest, &server);
        uplink(&slot)
            .set_policy(policy(&["allow=a.example", "default=allow"]))
            .unwrap();
        before.ended();
        refused(guest.connect((OUTSIDE, 80)));
        let _relay = BlindRelay::of(&slot);
        let names = uplink(&slot).names();
        assert!(names.allows("a.example") && !names.allows("b.example"));
        let inside = Ipv4Addr::new(10, 0, 0, 1);
        let told = names.admit("a.example", &[OUTSIDE, inside], MINUTE).unwrap();
        assert_eq!(told, [OUTSIDE]);
        talk(guest.connect((OUTSIDE, 80)).unwrap(), &server);
        // Again, while the kernel has it.
        names.admit("a.example", &[OUTSIDE], 5 * MINUTE).unwrap();
        talk(guest.connect((OUTSIDE, 80)).unwrap(), &server);
        assert!(names.admit("b.example", &[OUTSIDE], MINUTE).unwrap().is_empty());
        let counts = uplink(&slot).name_statistics().unwrap();
        assert_eq!((counts.resolved, counts.refused, counts.withheld), (2, 1, 1));

        // The name is allowed still, then not any more.
        uplink(&slot)
            .set_policy(policy(&["allow=*.b.example", "allow=a.example"]))
            .unwrap();
        let mut kept = Connection::open(&guest, &server);
        uplink(&slot).set_policy(policy(&["allow=*.example"])).unwrap();
        kept.goes_on();
        uplink(&slot).set_policy(policy(&["allow=b.example"])).unwrap();
        kept.ended();
        refused(guest.connect((OUTSIDE, 80)));
        uplink(&slot).set_policy(policy(&["default=allow"])).unwrap();
        talk(guest.connect((OUTSIDE, 80)).unwrap(), &server);
    });
}

#[test]
fn failed_change_leaves_the_policy_before() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let server = world.outside(|| listen(OUTSIDE, 80));
        let own = uplink(&slot).address();
        let fails = |texts: &[&str]| {
            let mut in_force = uplink(&slot).in_force();
            let before = in_force.policy.clone();
            let lost = |_: &mut in_force::InForce| Err::<(), _>(Error::ForwardingOff);
            in_force.change(&policy(texts), own, &[], lost).unwrap_err();
            assert_eq!(in_force.policy, before);
        };
        for wanted in [&["default=deny"], &["allow=a.example"]] {
            fails(wanted);
            talk(guest.connect((OUTSIDE, 80)).unwrap(), &server);
        }
        uplink(&slot).set_policy(policy(&["allow=a.example"])).unwrap();
        let _relay = BlindRelay::of(&slot);
        let names = uplink(&slot).names();
        names.admit("a.example", &[OUTSIDE], MINUTE).unwrap();
        let mut kept = Connection::open(&guest, &server);
        for wanted in [&["default=allow"], &["allow=b.example"], &["deny=10.0.0.0/8"]] {
            fails(wanted);
            kept.goes_on();
            talk(guest.connect((OUTSIDE, 80)).unwrap(), &server);
            assert!(names.allows("a.example") && !names.allows("b.example"));
        }
        names.admit("a.example", &[OUTSIDE], 5 * MINUTE).unwrap();
        // The same change again succeeds.
        uplink(&slot).set_policy(policy(&["allow=b.example"])).unwrap();
        kept.ended();
        refused(guest.connect((OUTSIDE, 80)));
    });
}

#[test]
fn dns_of_a_guest_goes_to_the_gateway_alone() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        uplink(&slot).set_policy(policy(&["allow=a.example"])).unwrap();
        let names = uplink(&slot).names();
        names.admit("a.example", &[OUTSIDE], MINUTE).unwrap();
        let gateway = slot.name_socket().unwrap();
        gateway.set_nonblocking(false).unwrap();
        let asking = guest.run(|| UdpSocket::bind((GUEST_ADDRESS, 0)).unwrap());
        for socket in [&gateway, &asking] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        for server in [OUTSIDE, Ipv4Addr::new(8, 8, 8, 8), HOST_ADDRESS] {
            asking.send_to(b"who", (server, 53)).unwrap();
            let mut said = [0; 8];
            let (length, peer) = gateway.recv_from(&mut said).unwrap();
            assert_eq!(
                (&said[..length], peer.ip()),
                (&b"who"[..], IpAddr::V4(GUEST_ADDRESS))
            );
            gateway.send_to(b"me", peer).unwrap();
            let (_, from) = asking.recv_from(&mut said).unwrap();
            assert_eq!(from, (server, 53).into(), "as if that server had answered");
        }
        let _server = world.outside(|| listen(OUTSIDE, 53));
        refused(guest.connect((OUTSIDE, 53)));
    });
}

#[test]
fn later_owner_keeps_the_resolved_addresses() {
    on_a_host(|world| {
        let mut slot = world.slot();
        let guest = Guest::of(&slot);
        let server = world.outside(|| listen(OUTSIDE, 80));
        let wanted = policy(&["allow=a.example"]);
        uplink(&slot).set_policy(wanted.clone()).unwrap();
        let _relay = BlindRelay::of(&slot);
        let names = uplink(&slot).names();
        names.admit("a.example", &[OUTSIDE], MINUTE).unwrap();
        drop(names);
        let mut kept = Connection::open(&guest, &server);
        slot.uplink.as_mut().unwrap().keep();
        let described = uplink(&slot).describe();
        let (mut vmm, record) = leave_to_vmm(slot);
        let adopted = world.networks.adopt(record, &described).unwrap();
        uplink(&adopted).set_policy(wanted).unwrap();
        kept.goes_on();
        talk(guest.connect((OUTSIDE, 80)).unwrap(), &server);
        // The new owner knows no time of it, so it gives it a new one.
        let names = uplink(&adopted).names();
        names.admit("a.example", &[OUTSIDE], MINUTE).unwrap();
        talk(guest.connect((OUTSIDE, 80)).unwrap(), &server);
        world.networks.destroy(adopted);
        vmm.kill().unwrap();
        vmm.wait().unwrap();
    });
}

#[test]
fn connections_that_a_name_allows_go_through_the_relay() {
    on_a_host(|world| {
        let slot = world.slot();
        let guest = Guest::of(&slot);
        let [by_rule, by_name] = [80, 443].map(|port| world.outside(|| listen(OUTSIDE, port)));
        uplink(&slot)
            .set_policy(policy(&["allow=203.0.113.0/24:80", "allow=a.example"]))
            .unwrap();
        uplink(&slot)
            .names()
            .admit("a.example", &[OUTSIDE], MINUTE)
            .unwrap();
        // Nothing listens.
        refused(guest.connect((OUTSIDE, 443)));
        talk(guest.connect((OUTSIDE, 80)).unwrap(), &by_rule);

        let (relay, connector) = (slot.relay_socket().unwrap(), slot.connector().unwrap());
        relay.set_nonblocking(false).unwrap();
        let mut asking = guest.connect((OUTSIDE, 443)).unwrap();
        let (mut handed, peer) = relay.accept().unwrap();
        assert_eq!(peer.ip(), IpAddr::V4(GUEST_ADDRESS));
        let to = rustix::net::sockopt::ip_original_dst(&handed).unwrap();
        assert_eq!((*to.ip(), to.port()), (OUTSIDE, 443));
        asking.write_all(b"first").unwrap();
        let mut said = [0; 5];
        handed.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"first");
        // What the relay opens has the slot's address, and no rule of the policy decides it.
        let on = connector.socket().unwrap();
        on.set_nonblocking(false).unwrap();
        rustix::net::connect(&on, &to).unwrap();
        on.set_read_timeout(Some(PATIENCE)).unwrap();
        talk(on, &by_name);

        // Not past the name: the relay itself, and HTTP/3.
        let straight = guest.run(|| {
            let to = (HOST_ADDRESS, 10_080).into();
            TcpStream::connect_timeout(&to, Duration::from_millis(500))
        });
        straight.unwrap_err();
        let server = world.outside(|| UdpSocket::bind((OUTSIDE, 443)).unwrap());
        server.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let asking = guest.run(|| UdpSocket::bind((GUEST_ADDRESS, 0)).unwrap());
        asking.send_to(b"initial", (OUTSIDE, 443)).unwrap();
        server.recv_from(&mut [0; 8]).unwrap_err();
    });
}
