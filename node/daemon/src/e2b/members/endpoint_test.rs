use std::net::Ipv4Addr;

use super::*;

fn trust() -> Trust {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates/ca.pem");
    Trust::read(&file).unwrap()
}

#[test]
fn url_of_a_node_is_a_scheme_a_host_and_a_port() {
    let trust = trust();
    for (url, port, authority) in [
        ("https://a.example", 443, "a.example"),
        ("https://a.example:3000/", 3000, "a.example:3000"),
        ("https://192.0.2.1:1", 1, "192.0.2.1:1"),
        ("https://[2001:db8::1]:2", 2, "[2001:db8::1]:2"),
        ("http://127.0.0.1:3000", 3000, "127.0.0.1:3000"),
        ("http://[::1]", 80, "[::1]"),
    ] {
        let endpoint = Endpoint::parse(url, Some(&trust)).unwrap();
        assert_eq!(
            (endpoint.port, endpoint.authority().to_str().unwrap()),
            (port, authority)
        );
    }
    for wrong in [
        "",
        "a.example",
        "a.example:3000",
        "ftp://a.example",
        "https://",
        "https://a.example/x",
        "https://a.example?x",
        "https://user@a.example",
        "http://a.example",
        "http://192.0.2.1:3000",
    ] {
        assert!(Endpoint::parse(wrong, Some(&trust)).is_err(), "{wrong}");
    }
    let without = Endpoint::parse("https://a.example", None).unwrap_err();
    assert!(without.contains("ca"), "{without}");
}

#[test]
fn file_without_authorities_is_an_error() {
    let empty = tempfile::NamedTempFile::new().unwrap();
    for file in [empty.path(), Path::new("/nowhere.pem")] {
        let why = Trust::read(file).unwrap_err();
        assert!(why.contains(&file.display().to_string()), "{why}");
    }
}

#[tokio::test]
async fn server_that_does_not_listen_is_an_error() {
    // The port stays bound, so that no other test listens at it.
    let bound = tokio::net::TcpSocket::new_v4().unwrap();
    bound.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let url = format!("http://{}", bound.local_addr().unwrap());
    assert!(Endpoint::parse(&url, None).unwrap().connect().await.is_err());
}
