use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use rustix::thread::UnshareFlags;
use thaw_sys::survey::{Address, Route};
use thaw_test_skip::{beside, skip};

use super::*;
use crate::network;

/// This guest.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// Nothing answers there.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Gives the loopback of this thread's namespace an address, and a route on which packets are lost.
fn set_up() {
    network::loopback_up().unwrap();
    let mut net = network::open().unwrap();
    // The first interface of a namespace.
    let link = 1;
    let address = Address {
        link,
        ip: OWN.into(),
        prefix: 32,
        peer: None,
        flags: 0,
    };
    network::add_address(&mut net, &address).unwrap();
    let route = Route {
        to: Some((OUTSIDE.into(), 32)),
        by: Some(link),
        scope: libc::RT_SCOPE_LINK,
        ..Route::default()
    };
    network::add_route(&mut net, &route).unwrap();
}

#[test]
fn connections_that_lead_out_end_and_others_go_on() {
    beside(|| {
        if thaw_sys::jail::unshare(UnshareFlags::NEWNET).is_err() {
            return skip("no network namespace can be made here");
        }
        set_up();
        let listener = TcpListener::bind((OWN, 0)).unwrap();
        let mut inside = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut served, _) = listener.accept().unwrap();
        // A thread has the namespace of the one that starts it.
        let outside = std::thread::spawn(|| TcpStream::connect((OUTSIDE, 443)));
        let mut socket = Socket::diagnostics().unwrap();
        let since = Instant::now();
        while connections::list(&mut socket, MOST).unwrap().len() < 3 {
            assert!(since.elapsed() < Duration::from_secs(20), "nothing connects");
            std::thread::yield_now();
        }
        let namespace = File::open("/proc/thread-self/ns/net").unwrap();
        let namespaces = [namespace];
        end_in(&namespaces, Instant::now()).unwrap_err();
        match end_in(&namespaces, Instant::now() + Duration::from_secs(60)) {
            Err(e) if e.errno() == Some(libc::EOPNOTSUPP) => {
                return skip("this kernel ends no connections (CONFIG_INET_DIAG_DESTROY)");
            }
            ended => assert_eq!(ended.unwrap(), 1),
        }
        let failed = outside.join().unwrap().unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::ConnectionAborted);
        inside.write_all(b"x").unwrap();
        served.read_exact(&mut [0]).unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    });
}

#[test]
fn connection_with_both_ends_in_the_guest_does_not_lead_out() {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let client = (at("10.219.0.2:40000"), at("10.219.0.2:80"));
    let ends = BTreeSet::from([client, (client.1, client.0)]);
    assert!(!leads_out(client.0, client.1, &ends));
    assert!(!leads_out(at("127.0.0.1:1"), at("127.0.0.1:2"), &ends));
    assert!(!leads_out(at("[::1]:1"), at("[::1]:2"), &ends));
    assert!(leads_out(at("10.219.0.2:80"), at("192.0.2.1:40000"), &ends));
}
