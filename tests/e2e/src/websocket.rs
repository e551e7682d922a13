//! The client's side of a WebSocket (RFC 6455), as far as CRI's streaming needs it: one unfragmented binary message a frame, of
//! which the first byte says which channel it is of.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
/// Longest answer to the request for a WebSocket.
const MOST_HEAD: usize = 16 * 1024;
/// Longest message that is believed.
const MOST: u64 = 16 << 20;

/// A connection.
pub struct WebSocket(TcpStream);

impl WebSocket {
    /// Connects to `http://HOST:PORT/PATH` with a protocol of Kubernetes'.
    pub fn connect(url: &str, protocol: &str) -> WebSocket {
        let (host, path) = url
            .strip_prefix("http://")
            .and_then(|rest| rest.split_once('/'))
            .unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // The key only guards against proxies.
        let request = format!(
            "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Origin: http://{host}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
             Sec-WebSocket-Protocol: {protocol}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert!(head.len() < MOST_HEAD, "{}", String::from_utf8_lossy(&head));
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.extend(byte);
        }
        let head = String::from_utf8_lossy(&head);
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        WebSocket(stream)
    }

    /// Sends to a channel.
    pub fn send(&mut self, channel: u8, data: &[u8]) {
        let length = data.len() + 1;
        // A mask of zeros, which masks nothing.
        let mut frame = vec![0x80 | BINARY];
        match u16::try_from(length) {
            Ok(short) if short < 126 => frame.push(0x80 | short as u8),
            Ok(medium) => {
                frame.push(0x80 | 126);
                frame.extend(medium.to_be_bytes());
            }
            Err(_) => {
                frame.push(0x80 | 127);
                frame.extend((length as u64).to_be_bytes());
            }
        }
        frame.extend([0; 4]);
        frame.push(channel);
        frame.extend(data);
        self.0.write_all(&frame).unwrap();
    }

    /// The next message and its channel; none at the end.
    pub fn receive(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            let mut head = [0; 2];
            self.0.read_exact(&mut head).ok()?;
            let length = match head[1] & 0x7f {
                126 => {
                    let mut length = [0; 2];
                    self.0.read_exact(&mut length).ok()?;
                    u64::from(u16::from_be_bytes(length))
                }
                127 => {
                    let mut length = [0; 8];
                    self.0.read_exact(&mut length).ok()?;
                    u64::from_be_bytes(length)
                }
                short => u64::from(short),
            };
            assert!(length <= MOST, "a message of {length} bytes");
            let mut data = vec![0; length as usize];
            self.0.read_exact(&mut data).ok()?;
            match head[0] & 0x0f {
                CLOSE => return None,
                PING => {}
                _ if data.is_empty() => {}
                _ => return Some((data.remove(0), data)),
            }
        }
    }

    /// Everything to the end, by channel.
    pub fn rest(&mut self) -> [String; 4] {
        let mut all: [Vec<u8>; 4] = Default::default();
        while let Some((channel, data)) = self.receive() {
            all[usize::from(channel)].extend(data);
        }
        all.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Reads a channel until it has said something.
    pub fn until(&mut self, channel: u8, text: &str) -> String {
        let mut said = String::new();
        while !said.contains(text) {
            let (from, data) = self
                .receive()
                .unwrap_or_else(|| panic!("it ended after {said:?}"));
            if from == channel {
                said.push_str(&String::from_utf8_lossy(&data));
            }
        }
        said
    }
}
