//! The host's side of the handshake.

use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use thaw_protocol::handshake::*;

pub fn connect(path: &Path) -> UnixStream {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return stream,
            Err(e) if Instant::now() > end => panic!("{}: {e}", path.display()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

pub fn shake_hands(dir: &Path, identity: Identity) -> Acknowledgement {
    let mut stream = connect(&dir.join("1023"));
    write_frame(&mut stream, &Greeting::Become(Box::new(identity))).unwrap();
    loop {
        match read_frame(&mut stream).unwrap() {
            FromAgent::Acknowledged(acknowledgement) => return *acknowledgement,
            // Read as late as possible, because the agent sets this machine's clock to it.
            FromAgent::WhatTime => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                let time = Time {
                    wall_clock_ns: now.as_nanos() as u64,
                };
                write_frame(&mut stream, &time).unwrap();
            }
        }
    }
}

/// An identity derived from a number.
pub fn identity(n: u8) -> Identity {
    let ip = |text: String| -> IpAddr { text.parse().unwrap() };
    let address = |text: String, prefix| Address {
        ip: ip(text),
        prefix,
        on_link: true,
    };
    let default = |to: &str, gateway: String| Route {
        to: ip(to.into()),
        prefix: 0,
        gateway: Some(ip(gateway)),
        source: None,
        scope: 0,
        gateway_on_link: false,
    };
    Identity {
        version: HANDSHAKE_VERSION,
        nonce: [5; 16],
        entropy: (0..64).collect(),
        hostname: format!("guest-{n}"),
        machine_id: [n; 16],
        network: Some(Network {
            name: format!("pod{n}"),
            mac: [2, 0, 0, 0, 0, n],
            mtu: 1400,
            arp: true,
            addresses: vec![
                address(format!("10.{n}.0.2"), 24),
                address(format!("fd{n:02}::2"), 64),
            ],
            routes: vec![
                default("0.0.0.0", format!("10.{n}.0.1")),
                default("::", format!("fd{n:02}::1")),
            ],
            neighbours: vec![Neighbour {
                ip: ip(format!("10.{n}.0.9")),
                mac: [2, 0, 0, 0, 9, n],
            }],
            nameservers: vec![ip(format!("10.{n}.0.1"))],
        }),
        // Sizes that this machine has, because the agent would write to its sysfs.
        cpus: 1,
        memory_mib: 1,
        rehearsal: false,
    }
}
