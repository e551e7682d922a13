//! ttrpc and protobuf by hand, as a client of Kata's agent sends them, without code of this project.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A message, field by field.
#[derive(Clone, Default)]
pub struct Message(Vec<u8>);

pub fn message() -> Message {
    Message::default()
}

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub fn number(mut self, field: u64, value: u64) -> Message {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    pub fn bytes(mut self, field: u64, value: &[u8]) -> Message {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    pub fn text(self, field: u64, value: &str) -> Message {
        self.bytes(field, value.as_bytes())
    }

    pub fn texts(self, field: u64, values: &[&str]) -> Message {
        values
            .iter()
            .fold(self, |message, value| message.text(field, value))
    }

    pub fn message(self, field: u64, value: Message) -> Message {
        self.bytes(field, &value.0)
    }
}

/// A received message by field number. Of a repeated field, one value is kept.
#[derive(Debug, Default)]
pub struct Came {
    numbers: BTreeMap<u64, u64>,
    bytes: BTreeMap<u64, Vec<u8>>,
}

impl Came {
    fn of(mut wire: &[u8]) -> Came {
        let mut came = Came::default();
        while !wire.is_empty() {
            let key = varint(&mut wire);
            match key & 7 {
                0 => drop(came.numbers.insert(key >> 3, varint(&mut wire))),
                2 => {
                    let length = varint(&mut wire) as usize;
                    let (value, rest) = wire.split_at(length);
                    came.bytes.insert(key >> 3, value.to_vec());
                    wire = rest;
                }
                kind => panic!("wire type {kind}"),
            }
        }
        came
    }

    /// Zeros are not sent.
    pub fn number(&self, field: u64) -> u64 {
        self.numbers.get(&field).copied().unwrap_or(0)
    }

    pub fn text(&self, field: u64) -> String {
        String::from_utf8(self.bytes.get(&field).cloned().unwrap_or_default()).unwrap()
    }

    pub fn message(&self, field: u64) -> Came {
        Came::of(self.bytes.get(&field).map_or(&[], Vec::as_slice))
    }

    pub fn has(&self, field: u64) -> bool {
        self.bytes.contains_key(&field) || self.numbers.contains_key(&field)
    }
}

fn varint(wire: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = wire.split_first().unwrap();
        *wire = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return value;
        }
    }
    panic!("a number of more than ten bytes");
}

/// An answer: a message, or a code and its text.
pub type Answer = Result<Came, (u64, String)>;

/// A connection to the agent, for any number of concurrent calls.
pub struct Connection {
    stream: UnixStream,
    next: u32,
    came: BTreeMap<u32, Answer>,
}

impl Connection {
    pub fn to(socket: &Path) -> Connection {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Connection {
            stream,
            next: 1,
            came: BTreeMap::new(),
        }
    }

    /// Sends a call without waiting. Returns its stream id.
    pub fn begin(&mut self, service: &str, method: &str, payload: Message) -> u32 {
        let request = message()
            .text(1, service)
            .text(2, method)
            .bytes(3, &payload.0)
            .number(4, 60_000_000_000);
        let id = self.next;
        self.next += 2;
        let mut frame = Vec::new();
        frame.extend_from_slice(&(request.0.len() as u32).to_be_bytes());
        frame.extend_from_slice(&id.to_be_bytes());
        frame.extend_from_slice(&[1, 0]);
        frame.extend_from_slice(&request.0);
        self.stream.write_all(&frame).unwrap();
        id
    }

    /// Waits for its answer.
    pub fn finish(&mut self, id: u32) -> Answer {
        loop {
            if let Some(answer) = self.came.remove(&id) {
                return answer;
            }
            let mut head = [0; 10];
            self.stream.read_exact(&mut head).unwrap();
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
            assert_eq!(head[8], 2, "a response");
            let mut body = vec![0; number(0) as usize];
            self.stream.read_exact(&mut body).unwrap();
            let response = Came::of(&body);
            let status = response.message(1);
            let answer = match status.number(1) {
                0 => Ok(response.message(2)),
                code => Err((code, status.text(2))),
            };
            self.came.insert(number(4), answer);
        }
    }

    pub fn call(&mut self, method: &str, payload: Message) -> Answer {
        let id = self.begin("grpc.AgentService", method, payload);
        self.finish(id)
    }
}
