use super::*;
use std::io::Write;
use std::os::unix::net::UnixStream;

#[derive(Default)]
struct Record {
    calls: Vec<&'static str>,
    fail_at: Option<&'static str>,
    weakened: bool,
}

impl Record {
    fn call(&mut self, name: &'static str) -> Result<()> {
        self.calls.push(name);
        if self.fail_at == Some(name) {
            Err(Error::State(format!("{name} broke")))
        } else {
            Ok(())
        }
    }
}

impl Apply for Record {
    fn entropy(&mut self, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes, [9; 48]);
        self.call("entropy")
    }
    fn wall_clock(&mut self, ns: u64) -> Result<()> {
        assert!((NOW..NOW + 1_000_000_000_000).contains(&ns), "{ns}");
        self.call("clock")
    }
    fn hostname(&mut self, _: &str, _: Option<&Network>) -> Result<()> {
        self.call("hostname")
    }
    fn machine_id(&mut self, _: [u8; 16]) -> Result<()> {
        self.call("machine-id")
    }
    fn network(&mut self, network: Option<&Network>) -> Result<()> {
        self.call(if network.is_some() {
            "network"
        } else {
            "no network"
        })
    }
    fn cpus(&mut self, count: u8) -> Result<()> {
        assert_eq!(count, 2);
        self.call("cpus")
    }
    fn memory(&mut self, mib: u32) -> Result<()> {
        assert_eq!(mib, 512);
        self.call("memory")
    }
    fn generation(&mut self) -> Result<()> {
        self.call("generation")
    }
    fn quiesce(&mut self) -> Result<()> {
        self.call("quiesce")
    }
    fn release(&mut self) -> Result<()> {
        self.call("release")
    }
    fn test_hooks(&self) -> bool {
        self.weakened
    }
}

fn identity() -> Identity {
    Identity {
        version: HANDSHAKE_VERSION,
        nonce: [7; 16],
        entropy: vec![9; 48],
        hostname: "h".into(),
        machine_id: [1; 16],
        network: Some(Network {
            name: "eth0".into(),
            mac: [2; 6],
            mtu: 1500,
            arp: true,
            addresses: vec![],
            routes: vec![],
            neighbours: vec![],
            nameservers: vec![],
        }),
        cpus: 2,
        memory_mib: 512,
        rehearsal: false,
    }
}

/// The time that the host sends.
const NOW: u64 = 1_700_000_000_000_000_000;

const ORDER: [&str; 9] = [
    "entropy",
    "clock",
    "hostname",
    "machine-id",
    "network",
    "cpus",
    "memory",
    "generation",
    "release",
];

const TIMES: Handshake = Handshake {
    started: 11,
    ready: 22,
};

fn exchange(identity: &Identity, guest: &mut Record) -> (Result<Option<bool>>, Acknowledgement) {
    exchange_and(identity, guest, |_| Ok(true))
}

fn exchange_and<T>(
    identity: &Identity,
    guest: &mut Record,
    open: impl FnOnce(&Identity) -> Result<T>,
) -> (Result<Option<T>>, Acknowledgement) {
    let (mut host, agent) = UnixStream::pair().unwrap();
    write_frame(&mut host, &Greeting::Become(Box::new(identity.clone()))).unwrap();
    // The answer may arrive before the question.
    write_frame(&mut host, &Time { wall_clock_ns: NOW }).unwrap();
    let outcome = answer(agent, &TIMES, guest, open);
    loop {
        if let FromAgent::Acknowledged(acknowledgement) = read_frame(&mut host).unwrap() {
            return (outcome, *acknowledgement);
        }
    }
}

#[test]
fn identity_is_applied_in_order_and_acknowledged() {
    let mut guest = Record::default();
    let before = (clock::boottime_ns(), clock::wall_clock_ns());
    let (outcome, ack) = exchange(&identity(), &mut guest);
    assert_eq!(outcome.unwrap(), Some(true));
    assert_eq!(guest.calls, ORDER);
    assert!(before.0 <= ack.received && ack.received <= ack.applied);
    assert!(before.1 <= ack.wall_clock_ns && !ack.test_hooks);
    assert_eq!(
        (ack.nonce, ack.failure, ack.agent_started, ack.agent_ready),
        ([7; 16], None, 11, 22)
    );
}

#[test]
fn identity_step_that_fails_stops_all_later_steps() {
    for (at, step) in ORDER.into_iter().enumerate() {
        let mut guest = Record {
            fail_at: Some(step),
            ..Default::default()
        };
        let (outcome, ack) = exchange(&identity(), &mut guest);
        assert!(outcome.is_err());
        assert_eq!(ack.failure, Some(format!("{step} broke")));
        assert_eq!(guest.calls, ORDER[..=at]);
    }
}

#[test]
fn without_a_network_the_interface_goes_down() {
    let mut guest = Record::default();
    let alone = Identity {
        network: None,
        ..identity()
    };
    exchange(&alone, &mut guest).0.unwrap();
    assert!(guest.calls.contains(&"no network") && !guest.calls.contains(&"network"));
}

#[test]
fn acknowledgement_reports_test_hooks() {
    let mut guest = Record {
        weakened: true,
        ..Default::default()
    };
    assert!(exchange(&identity(), &mut guest).1.test_hooks);
}

#[test]
fn workloads_stop_and_resume_without_an_identity() {
    for (greeting, call) in [(Greeting::Quiesce, "quiesce"), (Greeting::Continue, "release")] {
        for fail_at in [None, Some(call)] {
            let mut guest = Record {
                fail_at,
                ..Default::default()
            };
            let (mut host, agent) = UnixStream::pair().unwrap();
            write_frame(&mut host, &greeting).unwrap();
            let outcome = answer(agent, &TIMES, &mut guest, |_| -> Result<()> {
                panic!("the API must not be opened")
            });
            assert_eq!(outcome.is_err(), fail_at.is_some());
            let said: Quiesced = read_frame(&mut host).unwrap();
            assert_eq!(said.version, HANDSHAKE_VERSION);
            assert_eq!(said.failure, fail_at.map(|call| format!("{call} broke")));
            assert_eq!(guest.calls, [call]);
        }
    }
}

#[test]
fn failed_identity_is_named_and_port_stays_closed() {
    let mut guest = Record {
        fail_at: Some("hostname"),
        ..Default::default()
    };
    let (outcome, ack) = exchange_and(&identity(), &mut guest, |_| -> Result<()> {
        panic!("the API must not be opened")
    });
    assert!(outcome.is_err());
    assert_eq!(ack.failure.as_deref(), Some("hostname broke"));
    assert_eq!(guest.calls, ["entropy", "clock", "hostname"]);
}

#[test]
fn wrong_version_or_little_entropy_changes_nothing() {
    for bad in [
        Identity {
            version: 99,
            ..identity()
        },
        Identity {
            entropy: vec![9; 31],
            ..identity()
        },
    ] {
        let mut guest = Record::default();
        let (outcome, ack) = exchange(&bad, &mut guest);
        assert!(outcome.is_err() && ack.failure.is_some());
        assert_eq!(ack.version, HANDSHAKE_VERSION);
        assert!(guest.calls.is_empty());
    }
}

#[test]
fn host_that_sends_no_time_gets_the_reason() {
    let mut guest = Record::default();
    let (mut host, agent) = UnixStream::pair().unwrap();
    write_frame(&mut host, &Greeting::Become(Box::new(identity()))).unwrap();
    host.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(answer(agent, &TIMES, &mut guest, |_| Ok(())).is_err());
    assert_eq!(read_frame::<FromAgent>(&mut host).unwrap(), FromAgent::WhatTime);
    let FromAgent::Acknowledged(ack) = read_frame(&mut host).unwrap() else {
        panic!("asked twice");
    };
    assert!(ack.failure.unwrap().contains("did not tell the time"));
    assert_eq!(guest.calls, ["entropy"]);
}

#[test]
fn garbage_is_an_error_and_gets_no_acknowledgement() {
    let (mut host, agent) = UnixStream::pair().unwrap();
    host.write_all(&[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).unwrap();
    host.shutdown(std::net::Shutdown::Write).unwrap();
    let mut guest = Record::default();
    assert!(answer(agent, &TIMES, &mut guest, |_| Ok(())).is_err());
    assert!(guest.calls.is_empty());
    assert!(read_frame::<FromAgent>(&mut host).is_err());
}
