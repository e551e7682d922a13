//! Against a small server of bytes.

use super::*;

/// Answers ranges of a known blob; one request after the other on a connection.
fn server(blob: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, blob) = (stream.unwrap(), blob.clone());
            thread::spawn(move || {
                let mut reader = io::BufReader::new(&stream);
                while let Ok(Some(head)) = Head::read(&mut reader) {
                    let range = head.header("range").map(|r| {
                        let (from, to) = r.trim_start_matches("bytes=").split_once('-').unwrap();
                        from.parse::<usize>().unwrap()..to.parse::<usize>().unwrap() + 1
                    });
                    let (status, body) = match range {
                        Some(range) => (206, &blob[range]),
                        None => (200, &blob[..]),
                    };
                    let answer = http::Answer::new(status, &[], body);
                    if (&stream).write_all(&answer.bytes).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

fn get(connection: &TcpStream, headers: &str) -> io::Result<(u16, Vec<u8>)> {
    let mut connection = connection;
    connection
        .write_all(format!("GET /v2/x/blobs/sha256:0 HTTP/1.1\r\nHost: h\r\n{headers}\r\n").as_bytes())?;
    let mut reader = io::BufReader::with_capacity(1, connection);
    let head = Head::read(&mut reader)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut body = Vec::new();
    head.response_body("GET")?.copy(&mut reader, &mut body)?;
    Ok((head.status()?, body))
}

fn blob() -> Vec<u8> {
    (0..300_000u32).map(|i| (i % 251) as u8).collect()
}

const RANGE: &str = "Range: bytes=1000-2999\r\n";

#[test]
fn what_passes_is_right_counted_and_no_faster_than_the_link() {
    let link = Link {
        bits_per_second: Some(8_000_000),
        round_trip: Duration::from_millis(20),
    };
    let proxy = Proxy::start(&server(blob()), link).unwrap();
    let connection = TcpStream::connect(proxy.host()).unwrap();
    let start = Instant::now();
    assert_eq!(
        get(&connection, RANGE).unwrap(),
        (206, blob()[1000..3000].to_vec())
    );
    assert_eq!(get(&connection, "").unwrap(), (200, blob()));
    let took = start.elapsed();
    // 302,000 bytes at 1 MB/s, a connection and two round trips.
    assert!(took >= Duration::from_millis(302 + 60), "{took:?}");
    let (counts, log) = proxy.reset();
    assert_eq!(counts.requests, 2);
    assert!((302_000..302_400).contains(&counts.down), "{counts:?}");
    assert_eq!(log[0].range.as_deref(), Some("bytes=1000-2999"));
    assert_eq!((log[1].status, log.len()), (200, 2));
    assert_eq!(proxy.counts(), Counts::default());
}

#[test]
fn connections_share_the_link() {
    let link = Link {
        bits_per_second: Some(24_000_000),
        round_trip: Duration::ZERO,
    };
    let proxy = Proxy::start(&server(blob()), link).unwrap();
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| get(&TcpStream::connect(proxy.host()).unwrap(), "").unwrap());
        }
    });
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(290), "{took:?}");
}

#[test]
fn it_does_wrong_as_planned_and_no_more() {
    let proxy = Proxy::start(&server(blob()), Link::default()).unwrap();
    let ask = |headers| get(&TcpStream::connect(proxy.host()).unwrap(), headers);
    let fault = |fault| proxy.faults(vec![Rule::times(On::ranges(), 1, fault)]);

    fault(Fault::Flip(7));
    let mut wrong = blob()[1000..3000].to_vec();
    wrong[7] ^= 0x40;
    assert_eq!(ask("").unwrap().1, blob(), "not a range");
    assert_eq!(ask(RANGE).unwrap().1, wrong);
    assert_eq!(ask(RANGE).unwrap().1, blob()[1000..3000]);
    assert_eq!(proxy.applied(), [1]);

    fault(Fault::WholeForRange);
    assert_eq!(ask(RANGE).unwrap(), (200, blob()));
    fault(Fault::CutAfter(100));
    assert!(ask(RANGE).is_err());
    fault(Fault::Answer {
        status: 503,
        headers: vec![("Retry-After".into(), "0".into())],
    });
    assert_eq!(ask(RANGE).unwrap(), (503, Vec::new()));
    fault(Fault::Trickle {
        after: 1990,
        every: Duration::from_millis(10),
    });
    let start = Instant::now();
    assert_eq!(ask(RANGE).unwrap().1, blob()[1000..3000]);
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert_eq!(ask(RANGE).unwrap().0, 206);
}

#[test]
fn a_token_is_good_for_some_requests() {
    let proxy = Proxy::start(&server(blob()), Link::default()).unwrap();
    proxy.require_tokens(2);
    let connection = TcpStream::connect(proxy.host()).unwrap();
    assert_eq!(get(&connection, RANGE).unwrap().0, 401);
    let mut asking = &connection;
    asking
        .write_all(b"GET /token?service=x HTTP/1.1\r\nHost: h\r\n\r\n")
        .unwrap();
    let mut reader = io::BufReader::new(&connection);
    let head = Head::read(&mut reader).unwrap().unwrap();
    let mut body = Vec::new();
    head.response_body("GET")
        .unwrap()
        .copy(&mut reader, &mut body)
        .unwrap();
    assert!(String::from_utf8(body).unwrap().contains(r#""token":"token-1""#));
    let with = format!("{RANGE}Authorization: Bearer token-1\r\n");
    let answers: Vec<u16> = (0..3).map(|_| get(&connection, &with).unwrap().0).collect();
    assert_eq!(answers, [206, 206, 401]);
    assert_eq!(proxy.tokens_given(), 1);
}

#[test]
fn it_goes_away_and_comes_back() {
    let proxy = Proxy::start(&server(blob()), Link::default()).unwrap();
    let connection = TcpStream::connect(proxy.host()).unwrap();
    assert!(get(&connection, RANGE).is_ok());
    proxy.go_away();
    assert!(get(&connection, RANGE).is_err());
    // The listener may take one more before it closes; nobody answers it.
    let after = || get(&TcpStream::connect(proxy.host())?, RANGE);
    assert!(after().is_err());
    proxy.come_back().unwrap();
    assert_eq!(after().unwrap().0, 206);
}
