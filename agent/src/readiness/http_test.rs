use proptest::prelude::*;

use super::*;

#[test]
fn interim_answers_are_skipped() {
    let cases: [(&[u8], Parsed); 16] = [
        (b"", Parsed::Unfinished),
        (b"HTT", Parsed::Unfinished),
        (b"HTTP/1.1 200 O", Parsed::Unfinished),
        (b"HTTP/1.1 200 OK\r\n", Parsed::Status(200)),
        (b"HTTP/1.0 404\n", Parsed::Status(404)),
        (b"HTTP/1.1 503 \r\nServer: x", Parsed::Status(503)),
        (b"HTTP/1.1 101 Switching\r\n", Parsed::Status(101)),
        (b"HTTP/1.1 103 Early\r\nLink: x\r\n", Parsed::Unfinished),
        (
            b"HTTP/1.1 100\r\n\r\nHTTP/1.1 103 x\n\nHTTP/1.1 204 y\r\n",
            Parsed::Status(204),
        ),
        (b"HTTP/1.1 100\r\n\r\nSSH-2.0", Parsed::Nonsense),
        (b"HTTP/2 200\r\n", Parsed::Nonsense),
        (b"HTTP/1.1 2000 OK\r\n", Parsed::Nonsense),
        (b"HTTP/1.1 099 OK\r\n", Parsed::Nonsense),
        (b"HTTP/1.1  200 OK\r\n", Parsed::Nonsense),
        (b"HTTP/1.x 200 OK\r\n", Parsed::Nonsense),
        (b"SSH-2.0-x", Parsed::Nonsense),
    ];
    for (bytes, expected) in cases {
        assert_eq!(parse(bytes), expected, "{}", bytes.escape_ascii());
    }
}

#[test]
fn body_follows_the_final_head() {
    let cases: [(&[u8], &[u8]); 6] = [
        (b"", b""),
        (b"HTTP/1.1 500 x\r\nA: b\r\n", b""),
        (b"HTTP/1.1 500 x\r\nA: b\r\n\r\nwhy\n", b"why\n"),
        (b"HTTP/1.1 500\n\n\nwhy", b"\nwhy"),
        (b"HTTP/1.1 100 x\r\n\r\nHTTP/1.1 500 y\r\n\r\nwhy", b"why"),
        (b"HTTP/1.1 100 x\r\n\r\nHTTP/1.1 500 y", b""),
    ];
    for (answer, expected) in cases {
        assert_eq!(body(answer), expected, "{}", answer.escape_ascii());
    }
}

#[test]
fn http_request_is_one_request_or_refused() {
    let request = |path, host| Request::new(path, host).map(|q| q.get(8080));
    let text = String::from_utf8(request("/healthz?a=b", "").unwrap()).unwrap();
    assert!(
        text.starts_with("GET /healthz?a=b HTTP/1.1\r\nHost: localhost:8080\r\n"),
        "{text}"
    );
    let text = String::from_utf8(request("/", "app.example").unwrap()).unwrap();
    assert!(text.contains("\r\nHost: app.example\r\n"), "{text}");
    let (long, longer) = ("/".repeat(MAX_PATH), "/".repeat(MAX_PATH + 1));
    assert!(request(&long, "").is_ok());
    for (path, host) in [
        ("", ""),
        ("healthz", ""),
        ("/a b", ""),
        ("/a\r\nX: y", ""),
        ("/ä", ""),
        ("/", "a\r\nX: y"),
        ("/", "a b"),
        (&longer, ""),
        ("/", &long),
    ] {
        assert!(request(path, host).is_err(), "{path:?} {host:?}");
    }
}

/// Bytes that often resemble answers.
fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just(b"HTTP/1.1 ".to_vec()),
        Just(b"HTTP/1.".to_vec()),
        Just(b"\r\n".to_vec()),
        Just(b"\n".to_vec()),
        Just(b"\r\n\r\n".to_vec()),
        (90u16..1010).prop_map(|n| n.to_string().into_bytes()),
        proptest::collection::vec(any::<u8>(), 0..6),
    ];
    proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any bytes, the result is final from some byte on.
    #[test]
    fn parsing_does_not_depend_on_how_bytes_arrive(bytes in pieces()) {
        let mut before = Parsed::Unfinished;
        for length in 0..=bytes.len() {
            let now = parse(&bytes[..length]);
            prop_assert!(before == Parsed::Unfinished || now == before);
            if let Parsed::Status(status) = now {
                prop_assert!((200..1000).contains(&status) || status == 101);
            }
            before = now;
        }
    }

    /// The status of every valid answer is read, after any number of interim ones.
    #[test]
    fn good_http_answer_is_read(
        interim in proptest::collection::vec(prop_oneof![Just(100u16), 102u16..200], 0..4),
        status in prop_oneof![Just(101u16), 200u16..1000],
        reason in "( [ -~]{0,20})?",
        fields in proptest::collection::vec("[A-Za-z-]{1,10}: [ -~]{0,20}", 0..3),
    ) {
        let head = |status: &u16| {
            let fields: String = fields.iter().map(|f| format!("{f}\r\n")).collect();
            format!("HTTP/1.1 {status}{reason}\r\n{fields}\r\n")
        };
        let text: String = interim.iter().chain([&status]).map(head).collect();
        prop_assert_eq!(parse(text.as_bytes()), Parsed::Status(status));
    }
}
