//! TCP connections of a thawed sandbox: those with the outside end at once, those within it go on, and listening sockets stay. The frozen
//! sandbox keeps all of its own.

#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use thaw_e2e::home::{Home, with_thawd};
use thaw_e2e::outside::{OUTSIDE, World};
use thaw_e2e::page::fetch;
use thaw_e2e::{image, run};

/// Where the server listens.
const PORT: &str = "8000";
/// Where it has a connection to, outside.
const UPSTREAM_PORT: u16 = 7000;
/// Longer than Python takes to start on an emulated machine, seconds.
const READY_S: &str = "240";
/// Limit for a clone's reader to be told.
const LIMIT: Duration = Duration::from_secs(60);
/// Reads from the outside in a thread, and tells on its page how that ended, and whether connections within the sandbox work: one over the
/// loopback, one over the sandbox's own address.
const SERVER: &str = r#"
import socket, sys, threading
def pair(address):
    server = socket.create_server((address, 0))
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]
pairs = [pair("127.0.0.1"), pair("10.219.0.2")]
outside = socket.create_connection((sys.argv[1], int(sys.argv[2])))
ended = []
def read():
    try: ended.append("end" if outside.recv(1) == b"" else "data")
    except OSError as e: ended.append(type(e).__name__)
threading.Thread(target=read, daemon=True).start()
listener = socket.create_server(("", 8000))
def page():
    for client, _ in pairs: client.sendall(b"x")
    words = ended[:1] or ["reading"]
    return " ".join(words + [served.recv(1).decode() for _, served in pairs])
while True:
    try:
        client, _ = listener.accept()
        if client.recv(1024): client.sendall(b"HTTP/1.0 200 OK\r\n\r\n%s\n" % page().encode())
        client.close()
    except OSError as e: print(e)
"#;

fn done(home: &Home, arguments: &[&str]) -> String {
    run(&mut home.thaw(arguments)).ok().trim_end().to_owned()
}

/// What a sandbox's page says.
fn page(home: &Home, sandbox: &str) -> String {
    let published = done(home, &["port", sandbox, PORT]);
    let port: u16 = published.rsplit_once(':').unwrap().1.parse().unwrap();
    let answer = fetch(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    answer.trim_end().rsplit('\n').next().unwrap().to_owned()
}

/// Accepts connections and keeps them, until the test program ends.
fn keep(listener: TcpListener) {
    std::thread::spawn(move || listener.incoming().collect::<Vec<_>>());
}

#[test]
fn thaw_ends_connections_with_the_outside_alone() {
    let world = World::new();
    world.within(|| keep(TcpListener::bind((OUTSIDE, UPSTREAM_PORT)).unwrap()));
    with_thawd(|home| {
        let (image, outside) = (image("python3"), OUTSIDE.to_string());
        let (publish, upstream) = (format!("0:{PORT}"), UPSTREAM_PORT.to_string());
        let mut line = vec!["run", "-d", "--name", "web", "-p", &publish];
        line.extend(["--ready-tcp", PORT, "--ready-timeout", READY_S]);
        line.extend([&*image, "python3", "-c", SERVER, &outside, &upstream]);
        done(home, &line);
        assert_eq!(page(home, "web"), "reading x x");
        done(home, &["freeze", "web", "--name", "reading"]);
        done(
            home,
            &["thaw", "-d", "--name", "clone", "-p", &publish, "reading"],
        );
        let since = Instant::now();
        let told = loop {
            let told = page(home, "clone");
            if told != "reading x x" || since.elapsed() > LIMIT {
                break told;
            }
        };
        assert_eq!(told, "ConnectionAbortedError x x");
        assert_eq!(page(home, "web"), "reading x x");
        done(home, &["rm", "web", "clone"]);
        done(home, &["snapshot", "rm", "reading"]);
    });
}
