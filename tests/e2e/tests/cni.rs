//! Pods whose network CNI makes: on Debian's bridge plugin by CRI, and in a namespace of the test's own by `ctr`.
//!
//! Minutes in a lab, so not in every run: `tests/e2e/run --all yes --only cni`.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use thaw_e2e::containerd::{Containerd, Networks, RUNTIME};
use thaw_e2e::cri;
use thaw_e2e::home::Home;
use thaw_e2e::run;
use thaw_e2e::upstream::Upstream;

/// How long what goes on by itself may take, in a lab.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where Debian's plugins are.
const PLUGINS: &str = "/usr/lib/cni";
const BRIDGE: &str = "thaw-e2e-br";
const HOST4: &str = "10.91.0.1";
const HOST6: &str = "fd91::1";
/// What a pod answers to whoever connects: its name, in a file of its server's.
const SERVER: &str =
    "mkdir /tmp/s; cd /tmp/s; hostname > who; exec python3 -m http.server --bind :: 8080 >/dev/null 2>&1";

/// A node with containerd, and one image.
struct Node {
    // Stopped in this order.
    containerd: Containerd,
    thawd: Child,
    _upstream: Upstream,
    home: Home,
    image: String,
}

impl Node {
    /// One whose pods have this network, of Debian's plugins; they have none where it is not given.
    fn new(network: Option<&dyn Fn(&Path) -> String>) -> Node {
        let home = Home::new();
        let upstream = Upstream::test_images(&home.scratch("registry"), None);
        let thawd = start_thawd(&home);
        let image = format!("{}/python3:latest", upstream.host);
        let networks = match network {
            Some(network) => Networks {
                plugins: PLUGINS.into(),
                network: network(&home.scratch("ipam")),
            },
            None => Networks::nothing(&home),
        };
        let containerd = Containerd::start_with(&home, &snapshots(&home), &image, &networks);
        containerd.pull(&image).unwrap();
        Node {
            containerd,
            thawd,
            _upstream: upstream,
            home,
            image,
        }
    }

    fn call<Q, A>(&self, method: &str, request: Q) -> A
    where
        Q: prost::Message + Clone + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let answer = self.containerd.cri("RuntimeService", method, request);
        answer.unwrap_or_else(|e| panic!("{method}: {e}"))
    }

    fn is_empty_soon(&self) {
        until("microVMs are gone", || {
            let listed = run(&mut self.home.thaw(&["--json", "ps"])).ok();
            let listed: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
            listed.is_empty()
        });
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.thawd.kill();
        let _ = self.thawd.wait();
    }
}

fn snapshots(home: &Home) -> std::path::PathBuf {
    home.run().join("snapshots.sock")
}

fn start_thawd(home: &Home) -> Child {
    home.thawd(&["--snapshots-socket", snapshots(home).to_str().unwrap()])
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "not so after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A command of iproute2: what it printed.
fn ip(line: &str) -> String {
    let (program, arguments) = line.split_once(' ').unwrap();
    let done = Command::new(program).args(arguments.split(' ')).output().unwrap();
    assert!(done.status.success(), "{line}: {done:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// A pod by CRI, its container serving.
struct Pod<'a> {
    node: &'a Node,
    id: cri::Pod,
    container: cri::Container,
    addresses: Vec<IpAddr>,
}

impl Pod<'_> {
    fn serving<'a>(node: &'a Node, name: &str) -> Pod<'a> {
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: name.into(),
                uid: name.into(),
                namespace: "default".into(),
                ..Default::default()
            }),
            hostname: name.into(),
            log_directory: node.home.scratch("logs").display().to_string(),
            ..Default::default()
        };
        let id: cri::Pod = node.call(
            "RunPodSandbox",
            cri::RunPodSandboxRequest {
                config: Some(config.clone()),
                runtime_handler: "thaw".into(),
            },
        );
        let container: cri::Container = node.call(
            "CreateContainer",
            cri::CreateContainerRequest {
                pod_sandbox_id: id.pod_sandbox_id.clone(),
                config: Some(cri::ContainerConfig {
                    metadata: Some(cri::ContainerMetadata {
                        name: "server".into(),
                        ..Default::default()
                    }),
                    image: Some(cri::ImageSpec {
                        image: node.image.clone(),
                    }),
                    command: ["sh", "-c", SERVER].map(str::to_owned).to_vec(),
                    log_path: format!("{name}.log"),
                    ..Default::default()
                }),
                sandbox_config: Some(config),
            },
        );
        let _: cri::Empty = node.call("StartContainer", container.clone());
        let status: cri::PodSandboxStatusResponse = node.call(
            "PodSandboxStatus",
            cri::PodSandboxStatusRequest {
                pod_sandbox_id: id.pod_sandbox_id.clone(),
            },
        );
        let network = status.status.unwrap().network.unwrap();
        let more = network.additional_ips.into_iter().map(|one| one.ip);
        let addresses = std::iter::once(network.ip).chain(more);
        Pod {
            node,
            id,
            container,
            addresses: addresses.map(|ip| ip.parse().unwrap()).collect(),
        }
    }

    /// What a command in it printed.
    fn exec(&self, command: &[&str]) -> String {
        let executed: cri::ExecSyncResponse = self.node.call(
            "ExecSync",
            cri::ExecSyncRequest {
                container_id: self.container.container_id.clone(),
                cmd: command.iter().map(|word| (*word).to_owned()).collect(),
                timeout: 120,
            },
        );
        let [out, err] = [executed.stdout, executed.stderr].map(|said| String::from_utf8(said).unwrap());
        assert_eq!(executed.exit_code, 0, "{command:?}: {out} {err}");
        out
    }

    /// What is served at an address, as it sees it.
    fn fetch(&self, address: SocketAddr) -> String {
        let script = format!(
            "import urllib.request as r; print(r.urlopen('http://{address}/who', timeout=60).read().decode(), end='')"
        );
        self.exec(&["python3", "-c", &script])
    }

    fn end(self) {
        let _: cri::Empty = self.node.call("StopPodSandbox", self.id.clone());
        let _: cri::Empty = self.node.call("RemovePodSandbox", self.id);
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
fn pods_on_a_bridge_reach_it_the_host_and_one_another_and_are_reached() {
    let node = Node::new(Some(&|state| {
        format!(
            r#"{{"cniVersion":"0.4.0","name":"e2e","plugins":[{{"type":"bridge","bridge":"{BRIDGE}","isGateway":true,"mtu":1400,
            "ipam":{{"type":"host-local","dataDir":{state:?},"ranges":[[{{"subnet":"10.91.0.0/24"}}],[{{"subnet":"fd91::/64"}}]],
            "routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"::/0"}}]}}}}]}}"#
        )
    }));
    let (one, other) = (Pod::serving(&node, "one"), Pod::serving(&node, "other"));
    assert_eq!(one.addresses.len(), 2, "{:?}", one.addresses);
    for address in &one.addresses {
        let address = SocketAddr::new(*address, 8080);
        // From the host, and from the other pod.
        assert_eq!(fetch(address), "one\n");
        assert_eq!(other.fetch(address), "one\n", "{address}");
    }
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
        assert_eq!(one.exec(&["python3", "-c", &script]), "all\n");
        assert_eq!(served.join().unwrap(), *own);
    }
    let script = "cat /sys/class/net/eth0/mtu; ls /sys/class/net | grep -c eth";
    assert_eq!(one.exec(&["sh", "-c", script]), "1400\n1\n");
    one.end();
    // The other is not disturbed.
    assert_eq!(fetch(SocketAddr::new(other.addresses[0], 8080)), "other\n");
    other.end();
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

#[test]
#[ignore = "long"]
fn a_namespace_is_as_it_was_when_its_pod_ends_whichever_thawd_ended_it() {
    let mut node = Node::new(None);
    let namespace = Namespace::new("e2e");
    let before = namespace.has();
    let with = "network:/run/netns/e2e";
    let start = |node: &Node, id: &str| {
        node.containerd.run_ctr(&[
            "run",
            "-d",
            "--runtime",
            RUNTIME,
            "--snapshotter",
            "thaw",
            "--with-ns",
            with,
            &node.image,
            id,
            "sh",
            "-c",
            SERVER,
        ])
    };
    let end = |node: &Node, id: &str| {
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
    };
    let server: SocketAddr = "10.92.0.2:8080".parse().unwrap();

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
    node.thawd.kill().unwrap();
    node.thawd.wait().unwrap();
    fetch(server);
    node.thawd = start_thawd(&node.home);
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
