use super::*;
use std::io::Write;
use std::os::unix::net::UnixStream;

#[derive(Default)]
struct Record {
    calls: Vec<&'static str>,
    fail_at: Option<&'static str>,
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
    fn wall_clock(&mut self, _: u64) -> Result<()> {
        self.call("clock")
    }
    fn hostname(&mut self, _: &str, _: Option<&Network>) -> Result<()> {
        self.call("hostname")
    }
    fn machine_id(&mut self, _: [u8; 16]) -> Result<()> {
        self.call("machine-id")
    }
    fn network(&mut self, _: &Network) -> Result<()> {
        self.call("network")
    }
}

fn identity() -> Identity {
    Identity {
        version: HANDSHAKE_VERSION,
        nonce: [7; 16],
        entropy: vec![9; 48],
        wall_clock_ns: 1_700_000_000_000_000_000,
        hostname: "h".into(),
        machine_id: [1; 16],
        network: Some(Network {
            mac: [2; 6],
            mtu: 1500,
            addresses: vec![],
            gateways: vec![],
            nameservers: vec![],
        }),
    }
}

const TIMES: Handshake = Handshake {
    started: 11,
    ready: 22,
};

fn exchange(identity: &Identity, guest: &mut Record) -> (Result<bool>, Acknowledgement) {
    let (mut host, agent) = UnixStream::pair().unwrap();
    write_frame(&mut host, identity).unwrap();
    let outcome = answer(agent, &TIMES, guest, || Ok(true));
    (outcome, read_frame(&mut host).unwrap())
}

#[test]
fn an_identity_is_applied_entropy_first_and_acknowledged_with_its_nonce() {
    let mut guest = Record::default();
    let (outcome, ack) = exchange(&identity(), &mut guest);
    assert!(outcome.unwrap());
    assert_eq!(
        guest.calls,
        ["entropy", "clock", "hostname", "machine-id", "network"]
    );
    assert_eq!(
        (ack.nonce, ack.failure, ack.agent_started, ack.agent_ready),
        ([7; 16], None, 11, 22)
    );
}

#[test]
fn what_cannot_be_applied_is_named_and_the_port_stays_closed() {
    let mut guest = Record {
        fail_at: Some("hostname"),
        ..Default::default()
    };
    let (mut host, agent) = UnixStream::pair().unwrap();
    write_frame(&mut host, &identity()).unwrap();
    let outcome = answer(agent, &TIMES, &mut guest, || -> Result<()> {
        panic!("the API must not be opened")
    });
    assert!(outcome.is_err());
    let ack: Acknowledgement = read_frame(&mut host).unwrap();
    assert_eq!(ack.failure.as_deref(), Some("hostname broke"));
    assert_eq!(guest.calls, ["entropy", "clock", "hostname"]);
}

#[test]
fn a_wrong_version_or_too_little_entropy_touches_nothing() {
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
        assert!(guest.calls.is_empty());
    }
}

#[test]
fn garbage_is_an_error_and_gets_no_acknowledgement() {
    let (mut host, agent) = UnixStream::pair().unwrap();
    host.write_all(&[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).unwrap();
    host.shutdown(std::net::Shutdown::Write).unwrap();
    let mut guest = Record::default();
    assert!(answer(agent, &TIMES, &mut guest, || Ok(())).is_err());
    assert!(guest.calls.is_empty());
    assert!(read_frame::<Acknowledgement>(&mut host).is_err());
}
