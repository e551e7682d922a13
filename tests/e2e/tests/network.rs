//! A sandbox's network on a real host: out by NAT, in by published ports, and nowhere it must not go. What stands for the
//! world outside is a network namespace beside the host's, with a server in it.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use thaw_e2e::home::Home;
use thaw_e2e::outside::{HOST, METADATA, OUTSIDE, World};
use thaw_e2e::page::fetch;
use thaw_e2e::{image, run};

/// `thaw`'s exit code for a port that cannot be published (docs/exit-codes.md).
const PORT_UNAVAILABLE: i32 = 106;

/// A node, and the world outside with a server in it.
struct Outside {
    home: Home,
    world: World,
}

impl Outside {
    fn new() -> Outside {
        let world = World::new();
        world.within(|| serve(TcpListener::bind((OUTSIDE, 8000)).unwrap()));
        Outside {
            home: Home::new(),
            world,
        }
    }

    /// `thaw run` of a shell script in busybox.
    fn shell(&self, flags: &[&str], script: &str) -> Command {
        let busybox = image("busybox");
        let arguments = [&["run"], flags, &[&busybox, "sh", "-c", script]].concat();
        self.home.thaw(&arguments)
    }

    /// A sandbox that stays, with a web server that says its name on port 80.
    fn web(&self, name: &str, flags: &[&str]) -> String {
        let script = format!("mkdir /tmp/w; echo {name} >/tmp/w/index.html; httpd -f -p 80 -h /tmp/w");
        let flags = [&["-d", "--name", name], flags].concat();
        let id = run(&mut self.shell(&flags, &script)).ok();
        id.trim().to_owned()
    }

    fn remove(&self, name: &str) {
        run(&mut self.home.thaw(&["rm", name])).ok();
    }

    /// What a shell command in a sandbox prints.
    fn exec(&self, name: &str, script: &str) -> String {
        run(&mut self.home.thaw(&["exec", name, "sh", "-c", script])).stdout
    }

    /// Where the host reaches a sandbox.
    fn address(&self, id: &str) -> Ipv4Addr {
        let record = self.home.run().join("sandboxes").join(id).join("record.json");
        let record: serde_json::Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
        let address = record["network"]["address"].as_str();
        address.unwrap_or_else(|| panic!("{record}")).parse().unwrap()
    }
}

/// How long it takes to have a file of a sandbox's web server, which has so many bytes.
fn download(address: Ipv4Addr, file: &str, bytes: usize) -> Duration {
    let since = Instant::now();
    let mut stream = TcpStream::connect((address, 80)).unwrap();
    write!(stream, "GET /{file} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.len() > bytes, "{} of {bytes}", answer.len());
    since.elapsed()
}

/// Has a guest fetch a page and print its last line, patiently enough for an emulated machine; nothing of a failure. Not by
/// wget: of a busybox that is static it asks the C library for more than that has.
fn asking(address: Ipv4Addr, port: u16) -> String {
    format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 20 {address} {port} 2>/dev/null | tail -n 1")
}

/// Answers every request by whom it came from, until the test program ends.
fn serve(listener: TcpListener) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let peer = stream.peer_addr().map(|peer| peer.ip());
            let mut request = [0; 1024];
            let _ = stream.read(&mut request);
            if let Ok(peer) = peer {
                let _ = stream.write_all(format!("HTTP/1.0 200 OK\r\n\r\nyou are {peer}\n").as_bytes());
            }
        }
    });
}

#[test]
fn a_guest_reaches_outside_as_its_host_and_nothing_it_must_not() {
    let outside = Outside::new();
    for forbidden in [HOST, METADATA] {
        serve(TcpListener::bind((forbidden, 9000)).unwrap());
    }
    let asked =
        [(OUTSIDE, 8000), (METADATA, 9000), (HOST, 9000)].map(|(address, port)| asking(address, port));
    let said = run(&mut outside.shell(&[], &asked.join("; "))).ok();
    assert_eq!(said, format!("you are {HOST}\n"));
    let said = run(&mut outside.shell(&["--network", "none"], &asking(OUTSIDE, 8000))).stdout;
    assert_eq!(said, "");
}

#[test]
fn published_ports_lead_in_and_are_one_sandboxs() {
    let outside = Outside::new();
    outside.web("web", &["-p", "18080:80", "-p", "127.0.0.1:18081:80"]);
    for address in [Ipv4Addr::LOCALHOST, HOST] {
        assert!(fetch((address, 18080)).ends_with("web\n"));
    }
    assert!(fetch((Ipv4Addr::LOCALHOST, 18081)).ends_with("web\n"));
    outside.world.within(|| {
        assert!(fetch((HOST, 18080)).ends_with("web\n"));
        TcpStream::connect_timeout(&(HOST, 18081).into(), Duration::from_secs(5)).unwrap_err();
    });
    let second = run(&mut outside.shell(&["-p", "18080:80"], "true"));
    assert_eq!(second.code(), PORT_UNAVAILABLE, "{second:?}");
    assert!(second.stderr.contains("18080"), "{second:?}");
    outside.remove("web");
    TcpStream::connect((Ipv4Addr::LOCALHOST, 18080)).unwrap_err();
}

#[test]
fn guests_do_not_reach_one_another() {
    let outside = Outside::new();
    let id = outside.web("one", &["-p", "18082:80"]);
    outside.web("two", &[]);
    let address = outside.address(&id);
    assert!(fetch((address, 80)).ends_with("one\n"), "the host reaches it");
    for (address, port) in [(address, 80), (HOST, 18082)] {
        assert_eq!(outside.exec("two", &asking(address, port)), "");
    }
    outside.remove("one");
    outside.remove("two");
}

#[test]
fn a_policy_holds_from_the_start_and_another_at_once() {
    let outside = Outside::new();
    let ask = asking(OUTSIDE, 8000);
    let answer = format!("you are {HOST}\n");
    outside.web("kept", &["--egress", "deny=203.0.113.0/24:8000/tcp"]);
    assert_eq!(outside.exec("kept", &ask), "");
    let change = |rules: &[&str]| {
        run(&mut outside.home.thaw(&[&["network", "kept"], rules].concat())).ok();
    };
    change(&["allow=203.0.113.2:8000", "default=deny"]);
    assert_eq!(outside.exec("kept", &ask), answer);
    change(&["default=deny"]);
    assert_eq!(outside.exec("kept", &ask), "");
    change(&["default=allow"]);
    assert_eq!(outside.exec("kept", &ask), answer);
    outside.remove("kept");
    let wrong = run(&mut outside.shell(&["--egress", "allow=everywhere"], "true"));
    assert_eq!(wrong.code(), 125, "{wrong:?}");
}

#[test]
fn network_limit_slows_its_sandbox_and_no_neighbour() {
    let outside = Outside::new();
    // A mebibyte at 128 KiB a second, of which 64 KiB come at once: 7.5 s.
    const BYTES: usize = 1 << 20;
    let least = Duration::from_millis(6500);
    let slow = outside.web("slow", &["--net-out-bps", "128k:64k"]);
    let fast = outside.web("fast", &[]);
    let (slow, fast) = (outside.address(&slow), outside.address(&fast));
    for (name, address) in [("slow", slow), ("fast", fast)] {
        // It serves, so its directory is made.
        assert!(fetch((address, 80)).contains(name));
        outside.exec(name, "head -c 1048576 /dev/zero >/tmp/w/big");
    }
    let (limited, neighbours) = std::thread::scope(|scope| {
        let limited = scope.spawn(|| download(slow, "big", BYTES));
        let neighbours: Vec<Duration> = (0..5).map(|_| download(fast, "big", BYTES)).collect();
        (limited.join().unwrap(), neighbours)
    });
    assert!(limited > least, "{limited:?}");
    // The quickest of several: the emulated processor may stop any of them for seconds.
    let quickest = neighbours.iter().min().unwrap();
    assert!(*quickest * 2 < limited, "{neighbours:?} beside {limited:?}");
    run(&mut outside.home.thaw(&["limit", "slow", "--net-out-bps", "none"])).ok();
    let lifted: Vec<Duration> = (0..3).map(|_| download(slow, "big", BYTES)).collect();
    let quickest = lifted.iter().min().unwrap();
    assert!(
        *quickest * 2 < limited,
        "{lifted:?} without a limit, {limited:?} with it"
    );
    outside.remove("slow");
    outside.remove("fast");
}

/// Has a server outside answer that every name is at this address. Returns the configuration of a node that asks it.
fn name_server(outside: &Outside, address: Ipv4Addr) -> PathBuf {
    outside.world.within(|| {
        let socket = UdpSocket::bind((OUTSIDE, 53)).unwrap();
        std::thread::spawn(move || answer_names(&socket, address));
    });
    let config = outside.home.scratch("config").join("thawd.toml");
    std::fs::write(&config, format!("[network]\nnameservers = [\"{OUTSIDE}\"]\n")).unwrap();
    config
}

#[test]
fn names_are_asked_of_the_servers_the_host_says() {
    let outside = Outside::new();
    let config = name_server(&outside, Ipv4Addr::new(198, 51, 100, 77));
    let script = "cat /etc/resolv.conf; nslookup served.test";
    let said = run(outside.shell(&[], script).env("THAW_CONFIG", &config)).stdout;
    assert!(said.starts_with(&format!("nameserver {OUTSIDE}\n")), "{said}");
    assert!(said.contains("198.51.100.77"), "{said}");
}

#[test]
fn allowed_name_does_not_lead_to_others_on_its_address() {
    let outside = Outside::new();
    let config = name_server(&outside, OUTSIDE);
    let ask = |host: &str| {
        format!(
            "printf 'GET / HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n' | nc -w 20 {OUTSIDE} 8000 2>/dev/null | tail -n 1"
        )
    };
    let lines = [
        ask("served.test"),
        "nslookup served.test >/dev/null".into(),
        ask("served.test:8000"),
        ask("other.test"),
        asking(OUTSIDE, 8000),
    ];
    let flags = ["--egress", "allow=served.test"];
    let said = run(outside
        .shell(&flags, &lines.join("; "))
        .env("THAW_CONFIG", &config));
    assert_eq!(said.stdout, format!("you are {HOST}\n"));
}

/// Every name is at one address, by IPv4 alone (RFC 1035).
fn answer_names(socket: &UdpSocket, address: Ipv4Addr) {
    let mut query = [0; 512];
    while let Ok((length, peer)) = socket.recv_from(&mut query) {
        let question = &query[12..length];
        let end = question.iter().position(|b| *b == 0).unwrap() + 5;
        let asks_address = question[end - 4..end - 2] == [0, 1];
        let mut answer = query[..2].to_vec();
        answer.extend([0x81, 0x80, 0, 1, 0, u8::from(asks_address), 0, 0, 0, 0]);
        answer.extend(&question[..end]);
        if asks_address {
            answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
            answer.extend(address.octets());
        }
        let _ = socket.send_to(&answer, peer);
    }
}
