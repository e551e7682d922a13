use super::*;
use crate::relay::test_hello::client_hello;

/// The same handshake message in records of this many bytes.
fn in_records(hello: &[u8], size: usize) -> Vec<u8> {
    let records = hello[5..].chunks(size).flat_map(|part| {
        let length = (part.len() as u16).to_be_bytes();
        [&hello[..3], &length, part].concat()
    });
    records.collect()
}

fn name(bytes: &[u8], is_web: bool) -> Option<String> {
    let opening = read(bytes, is_web).unwrap().unwrap();
    opening.name
}

#[test]
fn server_name_is_read_of_any_records_and_pieces() {
    let hello = client_hello("Allowed.org", true);
    for whole in [hello.clone(), in_records(&hello, 7), in_records(&hello, 100)] {
        for is_web in [true, false] {
            assert_eq!(name(&whole, is_web).as_deref(), Some("allowed.org"));
            for end in 0..whole.len() {
                assert_eq!(read(&whole[..end], is_web), Ok(None), "{end}");
            }
            let more = [&whole[..], b"early data"].concat();
            assert_eq!(read(&more, is_web).unwrap().unwrap().bytes, more);
        }
    }
}

#[test]
fn hello_without_server_name_and_other_messages_are_refused() {
    for is_web in [true, false] {
        let nameless = client_hello("allowed.org", false);
        assert_eq!(read(&nameless, is_web), Err(Refusal::NoName));
        let mut other = client_hello("allowed.org", true);
        // A ServerHello.
        other[5] = 2;
        assert_eq!(read(&other, is_web), Err(Refusal::Malformed));
        let endless = [&[22, 3, 1, 0x3f, 0xff, 1, 0, 0x3f, 0xfb][..], &[0; MOST]].concat();
        assert!(read(&endless[..MOST], is_web).is_err());
    }
}

#[test]
fn tls_that_begins_with_no_handshake_is_refused() {
    let hello = client_hello("allowed.org", true);
    let warning = [&[21, 3, 1, 0, 2, 1, 90][..], &hello].concat();
    let change = [&[20, 3, 3, 0, 1, 1][..], &hello].concat();
    let of_ssl_2 = [&[0x80, 0x2e, 1, 3, 1, 0, 21][..], &[0; 39]].concat();
    for (bytes, told_by) in [(warning, 2), (change, 2), (of_ssl_2, 4)] {
        for end in 1..told_by {
            assert_eq!(read(&bytes[..end], false), Ok(None), "{end}");
        }
        for is_web in [true, false] {
            assert_eq!(read(&bytes, is_web), Err(Refusal::Malformed), "{bytes:?}");
        }
        assert_eq!(read(&bytes[..told_by], false), Err(Refusal::Malformed));
    }
}

#[test]
fn http_request_is_written_anew_for_one_request() {
    let request =
        b"\r\nPOST /a?b HTTP/1.1\nHOST: Allowed.org.:8080\r\nX-Y:  z \r\nConnection: keep-alive, Upgrade\r\n\
        Upgrade: h2c\r\nContent-Length: 4\r\n\r\nbodyGET / HTTP/1.1\r\nHost: evil.org\r\n\r\n";
    for is_web in [true, false] {
        let opening = read(request, is_web).unwrap().unwrap();
        assert_eq!(opening.name.as_deref(), Some("allowed.org"));
        let expected = b"POST /a?b HTTP/1.1\r\nHOST: Allowed.org.:8080\r\nX-Y: z\r\nContent-Length: 4\r\nConnection: close\r\n\r\n\
            bodyGET / HTTP/1.1\r\nHost: evil.org\r\n\r\n";
        assert_eq!(
            String::from_utf8_lossy(&opening.bytes),
            String::from_utf8_lossy(expected)
        );
        let head = request.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
        for end in 0..head {
            assert_eq!(read(&request[..end], is_web), Ok(None), "{end}");
        }
    }
}

#[test]
fn http_request_with_no_one_host_is_refused() {
    for request in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.0\r\nAccept: */*\r\n\r\n",
        "GET / HTTP/1.1\r\nHost:\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.org\r\nhost: b.org\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.org b.org\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.org/\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a.org\r\n\r\n",
        "GET / HTTP/1.1\r\nX: y\r\n Host: a.org\r\n\r\n",
        "GET http://evil.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
        "CONNECT evil.org:443 HTTP/1.1\r\nHost: a.org\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET / http/1.1\r\nHost: a.org\r\n\r\n",
    ] {
        for is_web in [true, false] {
            assert!(read(request.as_bytes(), is_web).is_err(), "{request:?}");
        }
    }
    let long = format!("GET /{} HTTP/1.1\r\nHost: a.org\r\n\r\n", "a".repeat(MOST));
    assert_eq!(read(&long.as_bytes()[..MOST], true), Err(Refusal::TooLong));
    assert_eq!(read(&[b'a'; MOST], false), Err(Refusal::TooLong));
}

#[test]
fn other_protocols_pass_on_ports_that_are_not_of_the_web() {
    for bytes in [
        &b"SSH-2.0-client\r\n"[..],
        b"\x10\x25\0\x04MQTT",
        b"*1\r\n$4\r\nPING\r\n",
        b"\x15\x04\x01\0",
        b"\xff\xfd\x03\xff\xfb\x01",
    ] {
        let opening = Opening {
            name: None,
            bytes: bytes.to_vec(),
        };
        assert_eq!(read(bytes, false), Ok(Some(opening)));
        assert!(!matches!(read(bytes, true), Ok(Some(_))), "{bytes:?}");
    }
    assert_eq!(read(b"\r\n\r\n", false), Ok(None));
    assert_eq!(read(b"SSH-2.0", false), Ok(None));
}

proptest::proptest! {
    #[test]
    fn reading_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..256), is_web: bool) {
        if let Ok(Some(opening)) = read(&bytes, is_web) {
            proptest::prop_assert!(opening.name.is_some() || !is_web);
        }
    }
}
