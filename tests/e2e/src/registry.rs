//! A registry that answers every request the same way, for the errors a real one gives.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

/// Serves on loopback until the test process ends; gives the reference of an image there.
pub fn answering(status: u16, headers: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while lines.next().is_some_and(|l| l.is_ok_and(|l| !l.is_empty())) {}
            let _ = write!(
                stream,
                "HTTP/1.1 {status} Told\r\n{headers}Content-Length: 0\r\nConnection: close\r\n\r\n"
            );
        }
    });
    format!("127.0.0.1:{port}/some/image:tag")
}

/// The reference of an image on a loopback port where nothing listens.
pub fn down() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!(
        "127.0.0.1:{}/some/image:tag",
        listener.local_addr().unwrap().port()
    )
}
