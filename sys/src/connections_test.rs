use std::io::{ErrorKind, Read};
use std::net::{TcpListener, TcpStream};

use rustix::thread::UnshareFlags;
use thaw_test_skip::{beside, skip};

use super::*;
use crate::link::{self, Change};

/// An answer of the kernel: ports, addresses, and the rest zero.
fn answer(family: u8, state: u8, ports: [u16; 2], addresses: [[u8; 16]; 2], inode: u32) -> Vec<u8> {
    let mut bytes = vec![family, state, 0, 0];
    ports
        .iter()
        .for_each(|port| bytes.extend_from_slice(&port.to_be_bytes()));
    addresses
        .iter()
        .for_each(|address| bytes.extend_from_slice(address));
    bytes.resize(INODE, 0);
    bytes.extend_from_slice(&inode.to_ne_bytes());
    bytes
}

fn v4(octets: [u8; 4]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&octets);
    bytes
}

#[test]
fn ends_of_both_families_are_read() {
    let addresses = [v4([10, 219, 0, 2]), v4([192, 0, 2, 1])];
    let found = read(&answer(IPV4, ESTABLISHED, [40_000, 443], addresses, 7)).unwrap();
    assert_eq!(found.local, "10.219.0.2:40000".parse().unwrap());
    assert_eq!(found.remote, "192.0.2.1:443".parse().unwrap());
    let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
    let addresses = [mapped, Ipv6Addr::LOCALHOST.octets()];
    let found = read(&answer(IPV6, SYN_SENT, [1, 2], addresses, 7)).unwrap();
    assert_eq!(found.local, "127.0.0.1:1".parse().unwrap());
    assert_eq!(found.remote, "[::1]:2".parse().unwrap());
    let closed = answer(IPV4, FIN_WAIT_2, [1, 2], [[0; 16]; 2], 0);
    assert_eq!(read(&closed), None);
    assert!(read(&answer(IPV4, FIN_WAIT_2, [1, 2], [[0; 16]; 2], 7)).is_some());
}

#[test]
fn request_to_end_names_the_socket_as_it_was_listed() {
    let addresses = [v4([10, 219, 0, 2]), v4([192, 0, 2, 1])];
    let listed = answer(IPV4, ESTABLISHED, [40_000, 443], addresses, 7);
    let Connection { family, identity, .. } = read(&listed).unwrap();
    let request = request(family, LISTED, &identity);
    assert_eq!(request[..4], [IPV4, 6, 0, 0]);
    assert_eq!(request[4..8], 0xb3eu32.to_ne_bytes());
    assert_eq!(request[8..], listed[4..4 + IDENTITY]);
}

#[test]
fn ended_connection_fails_its_reader_alone() {
    beside(|| {
        if crate::jail::unshare(UnshareFlags::NEWNET).is_err() {
            return skip("no network namespace can be made here");
        }
        let up = Change {
            up: Some(true),
            ..Change::default()
        };
        // The loopback is the first interface of a namespace.
        link::change(&mut Socket::route().unwrap(), 1, &up).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(server).unwrap();
        let own = client.local_addr().unwrap();
        let mut socket = Socket::diagnostics().unwrap();
        assert_eq!(list(&mut socket, 1).unwrap().len(), 1);
        let found = list(&mut socket, 10).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        let end_of_client = found.iter().find(|end| end.local == own).unwrap();
        assert_eq!(end_of_client.remote, server);
        match end(&mut socket, end_of_client) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                return skip("this kernel ends no connections (CONFIG_INET_DIAG_DESTROY)");
            }
            outcome => outcome.unwrap(),
        }
        assert_eq!(
            client.read(&mut [0]).unwrap_err().kind(),
            ErrorKind::ConnectionAborted
        );
        end(&mut socket, end_of_client).unwrap();
        TcpStream::connect(server).unwrap();
    });
}

proptest::proptest! {
    #[test]
    fn reading_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..128)) {
        read(&bytes);
    }
}
