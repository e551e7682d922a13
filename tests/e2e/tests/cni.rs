//! Pods whose network CNI makes: on Debian's bridge plugin by CRI, and in a namespace of the test's own by `ctr`.
//!
//! Minutes in a lab, so not in every run: `tests/e2e/run --all yes --only cni`.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use thaw_e2e::Outcome;
use thaw_e2e::containerd::Networks;
use thaw_e2e::cri;
use thaw_e2e::node::{Node, PATIENCE, Pod, until};

/// Where Debian's plugins are.
const PLUGINS: &str = "/usr/lib/cni";
const BRIDGE: &str = "thaw-e2e-br";
const HOST4: &str = "10.91.0.1";
const HOST6: &str = "fd91::1";
/// The host's, which leads to a pod's.
const HOST_PORT: u16 = 18080;
/// What a pod answers to whoever connects: its name, in a file of its server's.
const SERVER: &str =
    "mkdir /tmp/s; cd /tmp/s; hostname > who; exec python3 -m http.server --bind :: 8080 >/dev/null 2>&1";

/// A node whose pods have this network, of Debian's plugins.
fn node(network: impl Fn(&Path) -> String) -> Node {
    Node::with_network(|home| Networks {
        plugins: PLUGINS.into(),
        network: network(&home.scratch("ipam")),
    })
}

/// A command of iproute2: what it printed.
fn ip(line: &str) -> String {
    let (program, arguments) = line.split_once(' ').unwrap();
    let done = Command::new(program).args(arguments.split(' ')).output().unwrap();
    assert!(done.status.success(), "{line}: {done:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// A pod whose container serves.
struct Serving<'a> {
    node: &'a Node,
    pod: Pod<'a>,
    container: cri::Container,
    addresses: Vec<IpAddr>,
}

impl Serving<'_> {
    fn new<'a>(node: &'a Node, name: &str) -> Serving<'a> {
        Serving::with(node, name, |_| ())
    }

    fn with<'a>(node: &'a Node, name: &str, change: impl FnOnce(&mut cri::PodSandboxConfig)) -> Serving<'a> {
        let pod = node.pod_with(name, change).unwrap();
        let container = pod.container("server", SERVER);
        let status: cri::PodSandboxStatusResponse = node.call(
            "PodSandboxStatus",
            cri::PodSandboxStatusRequest {
                pod_sandbox_id: pod.id.clone(),
            },
        );
        let network = status.status.unwrap().network.unwrap();
        let more = network.additional_ips.into_iter().map(|one| one.ip);
        let addresses = std::iter::once(network.ip).chain(more);
        Serving {
            node,
            pod,
            container,
            addresses: addresses.map(|ip| ip.parse().unwrap()).collect(),
        }
    }

    /// What a program in Python printed in it, which has no double quotes.
    fn python(&self, program: &str) -> String {
        self.node
            .said(&self.container, &format!("python3 -c \"{program}\""))
    }

    /// What is served at an address, as it sees it.
    fn fetch(&self, address: SocketAddr) -> String {
        self.python(&format!(
            "import urllib.request as r; print(r.urlopen('http://{address}/who', timeout=60).read().decode(), end='')"
        ))
    }
}

/// What is served at an address, as this host sees it, once it is.
fn fetch(address: SocketAddr) -> String {
    let mut answer = String::new();
    until(&format!("{address} answers"), || {
        TcpStream::connect(address).is_ok()
    });
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET /who HTTP/1.0\r\n\r\n").unwrap();
    stream.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    body.to_owned()
}

#[test]
#[ignore = "long"]
fn cni_bridge_pods_reach_bridge_host_and_each_other() {
    let node = node(|state| {
        format!(
            r#"{{"cniVersion":"0.4.0","name":"e2e","plugins":[{{"type":"bridge","bridge":"{BRIDGE}","isGateway":true,"mtu":1400,
            "ipam":{{"type":"host-local","dataDir":{state:?},"ranges":[[{{"subnet":"10.91.0.0/24"}}],[{{"subnet":"fd91::/64"}}]],
            "routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"::/0"}}]}}}},{{"type":"portmap","capabilities":{{"portMappings":true}}}}]}}"#
        )
    });
    let one = Serving::with(&node, "one", |config| {
        config.port_mappings = vec![cri::PortMapping {
            protocol: 0,
            container_port: 8080,
            host_port: HOST_PORT.into(),
        }];
        config.dns_config = Some(cri::DnsConfig {
            servers: vec!["10.91.0.53".into()],
            searches: vec!["a.example".into(), "b.example".into()],
            options: vec!["ndots:3".into()],
        });
    });
    let other = Serving::new(&node, "other");
    assert_eq!(one.addresses.len(), 2, "{:?}", one.addresses);
    for address in &one.addresses {
        let address = SocketAddr::new(*address, 8080);
        // From the host, and from the other pod.
        assert_eq!(fetch(address), "one\n");
        assert_eq!(other.fetch(address), "one\n", "{address}");
    }
    // A port of the host's is the pod's: by any address of the host, from there and from the other pod.
    for host in ["127.0.0.1", HOST4] {
        assert_eq!(fetch(SocketAddr::new(host.parse().unwrap(), HOST_PORT)), "one\n");
    }
    let through = SocketAddr::new(HOST4.parse().unwrap(), HOST_PORT);
    assert_eq!(other.fetch(through), "one\n");
    assert_eq!(
        node.said(&one.container, "cat /etc/resolv.conf"),
        "search a.example b.example\nnameserver 10.91.0.53\noptions ndots:3\n"
    );
    // The host's end is the gateway: what connects there is the pod itself, translated by nobody.
    for (host, own) in [HOST4, HOST6].into_iter().zip(&one.addresses) {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = std::thread::spawn(move || {
            let (mut stream, peer) = listener.accept().unwrap();
            // More than one frame, and more than one segment of it.
            let mut sent = vec![0; 1 << 20];
            stream.read_exact(&mut sent).unwrap();
            stream.write_all(b"all").unwrap();
            peer.ip()
        });
        let script = format!(
            "import socket; s = socket.create_connection(('{host}', {port}), 60); s.sendall(bytes(1 << 20)); \
             print(s.recv(3).decode())"
        );
        assert_eq!(one.python(&script), "all\n");
        assert_eq!(served.join().unwrap(), *own);
    }
    let script = "cat /sys/class/net/eth0/mtu; ls /sys/class/net | grep -c eth";
    assert_eq!(node.said(&one.container, script), "1400\n1\n");
    one.pod.remove();
    // The other is not disturbed.
    assert_eq!(fetch(SocketAddr::new(other.addresses[0], 8080)), "other\n");
    other.pod.remove();
    node.is_empty_soon();
    let ports = ip(&format!("ip -o link show master {BRIDGE}"));
    assert_eq!(ports, "", "no pod is left on the bridge");
    ip(&format!("ip link delete {BRIDGE}"));
}

/// A namespace of the test's own, with one end of a pair; gone when dropped.
struct Namespace(&'static str);

impl Namespace {
    fn new(name: &'static str) -> Namespace {
        let namespace = Namespace(name);
        for line in [
            "ip netns add NAME",
            "ip link add NAME-h mtu 1300 type veth peer name eth0 mtu 1300 netns NAME",
            "ip address add 10.92.0.1/24 dev NAME-h",
            "ip link set NAME-h up",
            "ip -n NAME link set lo up",
            "ip -n NAME address add 10.92.0.2/24 dev eth0",
            "ip -n NAME link set eth0 up",
            "ip -n NAME route add default via 10.92.0.1",
        ] {
            ip(&line.replace("NAME", name));
        }
        namespace
    }

    /// Its interfaces, and what directs their frames.
    fn has(&self) -> String {
        let name = self.0;
        let links = ip(&format!("ip -n {name} -o -br link show"));
        links + &ip(&format!("tc -n {name} qdisc show"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", self.0]).status();
    }
}

/// Starts a container that serves in the namespace `e2e`.
fn start(node: &Node, id: &str) -> Outcome {
    let with = ["-d", "--with-ns", "network:/run/netns/e2e"];
    node.containerd
        .run_ctr(&node.run(&with, id, &["sh", "-c", SERVER]))
}

/// Where it serves.
fn in_namespace() -> SocketAddr {
    "10.92.0.2:8080".parse().unwrap()
}

/// Ends the only container there is.
fn end(node: &Node, id: &str) {
    let ctr = &node.containerd;
    ctr.ctr(&["task", "kill", "--signal", "SIGKILL", id]);
    until("the task has ended", || {
        ctr.ctr(&["task", "ls"]).contains("STOPPED")
    });
    // Some versions of it end with the task's code.
    let deleted = ctr.run_ctr(&["task", "delete", id]);
    assert!([0, 137].contains(&deleted.code()), "{deleted:?}");
    ctr.ctr(&["container", "delete", id]);
    node.is_empty_soon();
}

#[test]
#[ignore = "long"]
fn cni_namespace_is_restored_when_its_pod_ends() {
    let mut node = Node::new();
    let namespace = Namespace::new("e2e");
    let before = namespace.has();
    let server = in_namespace();

    start(&node, "first").ok();
    fetch(server);
    assert_ne!(namespace.has(), before);
    // As containerd does for port-forward: what is localhost in there is the guest's.
    let script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/who', timeout=60).read().decode())";
    let inside = Command::new("ip")
        .args(["netns", "exec", "e2e", "python3", "-c", script])
        .output()
        .unwrap();
    assert!(inside.status.success(), "{inside:?}");
    // Who has it has it alone.
    let refused = start(&node, "second");
    assert!(refused.stderr.contains("thaw-t0"), "{refused:?}");
    node.containerd.ctr(&["container", "delete", "second"]);
    end(&node, "first");
    assert_eq!(namespace.has(), before);

    // Its thawd is killed, and another takes it over: it is reached all the time, and ends as others do.
    start(&node, "third").ok();
    fetch(server);
    node.kill_thawd();
    fetch(server);
    node.start_thawd();
    fetch(server);
    end(&node, "third");
    assert_eq!(namespace.has(), before);

    // More than a guest can have is refused by name.
    ip("ip -n e2e link add net1 type dummy");
    ip("ip -n e2e link set net1 up");
    let before = namespace.has();
    let refused = start(&node, "fourth");
    assert!(
        refused.stderr.contains("eth0") && refused.stderr.contains("net1"),
        "{refused:?}"
    );
    assert_eq!(namespace.has(), before);
}

#[test]
#[ignore = "long"]
fn checkpoint_is_restored_into_its_network_namespace() {
    let node = Node::new();
    let ctr = &node.containerd;
    let namespace = Namespace::new("e2e");
    start(&node, "old").ok();
    fetch(in_namespace());
    let image = "checkpoint/of:old";
    ctr.ctr(&["container", "checkpoint", "--image", "--task", "old", image]);
    end(&node, "old");
    drop(namespace);
    until("the pair is gone", || !Path::new("/sys/class/net/e2e-h").exists());

    // Another of the same name, whose interface has another MAC address.
    let namespace = Namespace::new("e2e");
    let before = namespace.has();
    let restored = ctr.run_ctr(&["container", "restore", "--live", "new", image]);
    assert_eq!(restored.code(), 0, "{restored:?}");
    // The server that was frozen answers.
    assert_eq!(fetch(in_namespace()), "old\n");
    end(&node, "new");
    assert_eq!(namespace.has(), before);
}
