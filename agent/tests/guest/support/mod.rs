//! A guest without a machine: the agent in namespaces of its own, and a host's side of the conversation.

use std::fs;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::agent_ttrpc::AgentServiceClient;
use thaw_protocol::agent::{oci, types};
use thaw_protocol::handshake::*;
use ttrpc::context::Context;

pub struct Guest {
    pub client: AgentServiceClient,
    agent: Child,
    dir: PathBuf,
    cgroup: String,
}

/// No answer within this is a hang.
pub fn context() -> Context {
    ttrpc::context::with_duration(Duration::from_secs(60))
}

pub fn code_of(e: &ttrpc::Error) -> ttrpc::Code {
    match e {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("not a status: {other}"),
    }
}

fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("root is needed");
    }
    for tool in ["unshare", "ip", "busybox"] {
        if !["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
            .iter()
            .any(|d| Path::new(d).join(tool).exists())
        {
            return Some("unshare, ip and busybox are needed (util-linux, iproute2, busybox-static)");
        }
    }
    None
}

impl Guest {
    /// Starts the agent and shakes hands.
    pub async fn boot() -> Option<Self> {
        if let Some(reason) = missing() {
            thaw_test_skip::skip(reason);
            return None;
        }
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // Cargo makes it where it builds; the lab has only what was built.
        fs::create_dir_all(parent).unwrap();
        let dir = tempfile::Builder::new()
            .prefix("guest-")
            .tempdir_in(parent)
            .unwrap()
            .keep();
        make_rootfs(&dir.join("rootfs"));
        // exec keeps the PID: the agent is the first process of the PID namespace.
        let script = "ip link add eth0 type veth peer name outside && ip link set outside up && exec \"$@\"";
        let agent = Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--net",
                "--uts",
                "--ipc",
                "sh",
                "-c",
                script,
                "sh",
            ])
            .arg(env!("CARGO_BIN_EXE_thaw-agent"))
            .arg("--unix")
            .arg(&dir)
            .stderr(Stdio::from(fs::File::create(dir.join("log")).unwrap()))
            .spawn()
            .unwrap();
        let cgroup = format!("thaw-test-{}", dir.file_name().unwrap().to_str().unwrap());
        // A host that talks nonsense first must not spoil it.
        drop(std::io::Write::write_all(
            &mut connect(&dir.join("1023")),
            &[1, 0, 0, 0, 255],
        ));
        let ack = shake_hands(&dir, identity(7));
        assert_eq!(
            ack.failure,
            None,
            "{}",
            fs::read_to_string(dir.join("log")).unwrap_or_default()
        );
        assert_eq!(ack.nonce, [5; 16]);
        assert!(ack.agent_ready >= ack.agent_started && ack.agent_started > 0);
        Some(Guest {
            client: connect_api(&dir).await,
            agent,
            dir,
            cgroup,
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What the agent makes of an identity after its first.
    pub fn becomes(&self, identity: Identity) -> Acknowledgement {
        shake_hands(&self.dir, identity)
    }

    /// Asks for a stop or its end.
    pub fn greet(&self, greeting: &Greeting) {
        let mut stream = connect(&self.dir.join("1023"));
        write_frame(&mut stream, greeting).unwrap();
        let answer: Quiesced = read_frame(&mut stream).unwrap();
        assert_eq!((answer.version, answer.failure), (HANDSHAKE_VERSION, None));
    }

    /// A connection of its own to the API.
    pub async fn connect_again(&self) -> AgentServiceClient {
        connect_api(&self.dir).await
    }

    /// Loses the connection to the API and makes another.
    pub async fn reconnect(&mut self) {
        self.client = self.connect_again().await;
    }

    /// Whether the kernel says that a container is frozen.
    pub fn is_frozen(&self, id: &str) -> bool {
        let path = format!(
            "/proc/{}/root/sys/fs/cgroup/{}/{id}/cgroup.events",
            self.agent_pid(),
            self.cgroup
        );
        fs::read_to_string(path).unwrap().contains("frozen 1")
    }

    /// The cgroup of a container, as its specification has it.
    pub fn cgroup_path(&self, id: &str) -> String {
        format!("/{}/{id}", self.cgroup)
    }

    pub fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    pub async fn create(&self, id: &str, spec: oci::Spec) -> ttrpc::Result<()> {
        self.create_with(id, spec, Vec::new()).await
    }

    pub async fn create_with(
        &self,
        id: &str,
        mut spec: oci::Spec,
        storages: Vec<Storage>,
    ) -> ttrpc::Result<()> {
        spec.Linux.as_mut().unwrap().CgroupsPath = self.cgroup_path(id);
        let request = CreateContainerRequest {
            container_id: id.into(),
            exec_id: id.into(),
            storages,
            OCI: MessageField::some(spec),
            ..Default::default()
        };
        self.client.create_container(context(), &request).await.map(drop)
    }

    /// One that sees the processes of others that are made so.
    pub async fn create_sharing(&self, id: &str, mut spec: oci::Spec) -> ttrpc::Result<()> {
        spec.Linux.as_mut().unwrap().CgroupsPath = format!("/{}/{id}", self.cgroup);
        let request = CreateContainerRequest {
            container_id: id.into(),
            exec_id: id.into(),
            OCI: MessageField::some(spec),
            sandbox_pidns: true,
            ..Default::default()
        };
        self.client.create_container(context(), &request).await.map(drop)
    }

    pub async fn destroy(&self) {
        let request = DestroySandboxRequest::new();
        self.client.destroy_sandbox(context(), &request).await.unwrap();
    }

    pub async fn start(&self, id: &str) -> ttrpc::Result<()> {
        let request = StartContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.start_container(context(), &request).await.map(drop)
    }

    pub async fn exec(&self, id: &str, exec: &str, args: &[&str], terminal: bool) -> ttrpc::Result<()> {
        let mut request = exec_request(id, exec, args);
        request.process.mut_or_insert_default().Terminal = terminal;
        self.client.exec_process(context(), &request).await.map(drop)
    }

    pub async fn exec_refused_without_terminal(&self, id: &str) {
        assert!(
            self.exec(id, "late", &["true"], true).await.is_err(),
            "the container has ended"
        );
    }

    pub async fn call_unknown(&self, id: &str) -> ttrpc::Result<()> {
        self.signal(id, "", 9).await
    }

    pub async fn wait(&self, id: &str, exec: &str) -> i32 {
        let request = WaitProcessRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        self.client
            .wait_process(context(), &request)
            .await
            .unwrap()
            .status
    }

    pub async fn signal(&self, id: &str, exec: &str, signal: u32) -> ttrpc::Result<()> {
        let request = SignalProcessRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            signal,
            ..Default::default()
        };
        self.client.signal_process(context(), &request).await.map(drop)
    }

    pub async fn remove(&self, id: &str) -> ttrpc::Result<()> {
        let request = RemoveContainerRequest {
            container_id: id.into(),
            timeout: 10,
            ..Default::default()
        };
        self.client.remove_container(context(), &request).await.map(drop)
    }

    pub async fn write(&self, id: &str, exec: &str, data: &[u8]) -> ttrpc::Result<u32> {
        let mut request = write_request(id, data);
        request.exec_id = exec.into();
        self.client.write_stdin(context(), &request).await.map(|r| r.len)
    }

    pub async fn close_stdin(&self, id: &str, exec: &str) -> ttrpc::Result<()> {
        let request = CloseStdinRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        self.client.close_stdin(context(), &request).await.map(drop)
    }

    pub async fn resize(&self, id: &str, exec: &str, row: u32, column: u32) -> ttrpc::Result<()> {
        let request = TtyWinResizeRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            row,
            column,
            ..Default::default()
        };
        self.client.tty_win_resize(context(), &request).await.map(drop)
    }

    pub async fn read(&self, id: &str, exec: &str, len: u32) -> ttrpc::Result<Vec<u8>> {
        let request = ReadStreamRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            len,
            ..Default::default()
        };
        self.client.read_stdout(context(), &request).await.map(|r| r.data)
    }

    /// Everything to the end of stdout or stderr.
    pub async fn read_all(&self, id: &str, exec: &str, stderr: bool) -> Vec<u8> {
        let request = ReadStreamRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            len: 32768,
            ..Default::default()
        };
        let mut all = Vec::new();
        loop {
            let read = if stderr {
                self.client.read_stderr(context(), &request).await
            } else {
                self.client.read_stdout(context(), &request).await
            };
            match read {
                Ok(r) => {
                    assert!(!r.data.is_empty());
                    all.extend(r.data);
                }
                Err(e) if code_of(&e) == ttrpc::Code::OUT_OF_RANGE => return all,
                Err(e) => panic!("{e}"),
            }
        }
    }

    /// Reads stdout until it has said `text`.
    pub async fn read_until(&self, id: &str, exec: &str, text: &str) {
        let mut said = String::new();
        while !said.contains(text) {
            let more = tokio::time::timeout(Duration::from_secs(10), self.read(id, exec, 4096)).await;
            let more = more.unwrap_or_else(|_| panic!("waited for {text:?}, read {said:?}"));
            said.push_str(&String::from_utf8_lossy(
                &more.unwrap_or_else(|e| panic!("{e} after {said:?}")),
            ));
        }
    }

    pub async fn pause(&self, id: &str) -> ttrpc::Result<()> {
        let request = PauseContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.pause_container(context(), &request).await.map(drop)
    }

    pub async fn resume(&self, id: &str) -> ttrpc::Result<()> {
        let request = ResumeContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.resume_container(context(), &request).await.map(drop)
    }

    pub async fn stats(&self, id: &str) -> StatsContainerResponse {
        let request = StatsContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.stats_container(context(), &request).await.unwrap()
    }

    /// What is said on a port of its localhost, to the end.
    pub fn forwarded(&self, port: u16) -> Vec<u8> {
        let mut stream = connect(&self.dir.join(FORWARD_PORT.to_string()));
        stream.write_all(&port.to_be_bytes()).unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).unwrap();
        said
    }

    pub async fn interfaces(&self) -> Vec<types::Interface> {
        self.client
            .list_interfaces(context(), &ListInterfacesRequest::new())
            .await
            .unwrap()
            .Interfaces
    }

    pub async fn routes(&self) -> Vec<types::Route> {
        self.client
            .list_routes(context(), &ListRoutesRequest::new())
            .await
            .unwrap()
            .Routes
    }

    /// The agent's PID as this namespace knows it.
    fn agent_pid(&self) -> u32 {
        let path = format!("/proc/{0}/task/{0}/children", self.agent.id());
        fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }

    fn children(&self) -> Vec<u32> {
        let pid = self.agent_pid();
        let mut found = Vec::new();
        for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
            let text = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(text.split_whitespace().filter_map(|p| p.parse::<u32>().ok()));
        }
        found
    }

    /// Waits until the agent has no child, not even one that has ended.
    pub async fn wait_for_no_process(&self) {
        let end = Instant::now() + Duration::from_secs(5);
        while !self.children().is_empty() {
            assert!(Instant::now() < end, "left behind: {:?}", self.children());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn mounts(&self) -> Vec<String> {
        let text = fs::read_to_string(format!("/proc/{}/mountinfo", self.agent_pid())).unwrap();
        let dir = self.dir.to_str().unwrap();
        text.lines()
            .filter(|l| l.contains(dir))
            .map(str::to_owned)
            .collect()
    }

    fn cgroups(&self) -> Vec<PathBuf> {
        let root = format!("/proc/{}/root/sys/fs/cgroup/{}", self.agent_pid(), self.cgroup);
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        entries
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
            .map(|e| e.path())
            .collect()
    }

    pub fn has_controller(&self, name: &str) -> bool {
        let path = format!("/proc/{}/root/sys/fs/cgroup/cgroup.controllers", self.agent_pid());
        fs::read_to_string(path).is_ok_and(|t| t.split_whitespace().any(|c| c == name))
    }

    /// No process, mount or cgroup of a container is left.
    pub async fn assert_clean(&self) {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            let left = (self.children(), self.mounts(), self.cgroups());
            if left.0.is_empty() && left.1.is_empty() && left.2.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "left behind: {left:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// The API still answers, and knows no container.
pub async fn wait_gone(g: &Guest) {
    assert!(g.start("a").await.is_err());
}

impl Drop for Guest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "the agent's log:\n{}",
                fs::read_to_string(self.dir.join("log")).unwrap_or_default()
            );
        }
        let root = format!("/proc/{}/root/sys/fs/cgroup/{}", self.agent_pid(), self.cgroup);
        let _ = fs::write(format!("{root}/cgroup.kill"), "1");
        for cgroup in self.cgroups() {
            let _ = fs::remove_dir(cgroup);
        }
        let _ = fs::remove_dir(root);
        let _ = self.agent.kill();
        let _ = self.agent.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn connect(path: &Path) -> UnixStream {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return stream,
            Err(e) if Instant::now() > end => panic!("{}: {e}", path.display()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

pub fn exec_request(id: &str, exec: &str, args: &[&str]) -> ExecProcessRequest {
    ExecProcessRequest {
        container_id: id.into(),
        exec_id: exec.into(),
        process: MessageField::some(process(args)),
        ..Default::default()
    }
}

/// To the container's first process.
pub fn write_request(id: &str, data: &[u8]) -> WriteStreamRequest {
    WriteStreamRequest {
        container_id: id.into(),
        exec_id: id.into(),
        data: data.to_vec(),
        ..Default::default()
    }
}

async fn connect_api(dir: &Path) -> AgentServiceClient {
    let address = format!("unix://{}", dir.join("1024").display());
    AgentServiceClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}

fn shake_hands(dir: &Path, identity: Identity) -> Acknowledgement {
    let mut stream = connect(&dir.join("1023"));
    write_frame(&mut stream, &Greeting::Become(Box::new(identity))).unwrap();
    loop {
        match read_frame(&mut stream).unwrap() {
            FromAgent::Acknowledged(acknowledgement) => return *acknowledgement,
            // As late as possible: it is this machine's clock that is set, to what it says.
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

/// An identity that shows its number.
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
        // What this machine has in any case: it is its own sysfs that the agent would write to.
        cpus: 1,
        memory_mib: 1,
        rehearsal: false,
    }
}

fn make_rootfs(root: &Path) {
    for dir in ["bin", "etc", "proc", "sys", "dev", "tmp", "run"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    let busybox = ["/usr/bin/busybox", "/bin/busybox"]
        .iter()
        .find(|p| Path::new(p).exists())
        .unwrap();
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    for applet in
        "sh cat echo id sleep true false wc head hostname stty pwd ls mount grep mkdir touch test tr"
            .split_whitespace()
    {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nwww:x:33:34::/var/www:/bin/sh\n",
    )
    .unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nwww:x:34:\nmore:x:50:www\n").unwrap();
}

pub fn capabilities(names: &[&str]) -> oci::LinuxCapabilities {
    let set: Vec<String> = names.iter().map(ToString::to_string).collect();
    oci::LinuxCapabilities {
        Bounding: set.clone(),
        Effective: set.clone(),
        Permitted: set,
        ..Default::default()
    }
}

fn process(args: &[&str]) -> oci::Process {
    oci::Process {
        Args: args.iter().map(ToString::to_string).collect(),
        Env: vec!["PATH=/bin".into()],
        Cwd: "/".into(),
        User: MessageField::some(oci::User::new()),
        Capabilities: MessageField::some(capabilities(&[
            "CAP_CHOWN",
            "CAP_SETUID",
            "CAP_SETGID",
            "CAP_KILL",
            "CAP_DAC_OVERRIDE",
        ])),
        ..Default::default()
    }
}

pub fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> oci::Mount {
    oci::Mount {
        destination: destination.into(),
        type_: kind.into(),
        source: source.into(),
        options: options.iter().map(ToString::to_string).collect(),
        ..Default::default()
    }
}

pub fn bind(source: &str, destination: &str, options: &[&str]) -> oci::Mount {
    mount(destination, "bind", source, options)
}

/// What a container engine gives a container.
pub fn spec(g: &Guest, args: &[&str]) -> oci::Spec {
    let namespace = |kind: &str| oci::LinuxNamespace {
        Type: kind.into(),
        ..Default::default()
    };
    oci::Spec {
        Process: MessageField::some(process(args)),
        Root: MessageField::some(oci::Root {
            Path: g.rootfs().to_str().unwrap().into(),
            ..Default::default()
        }),
        Mounts: vec![
            mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount(
                "/dev",
                "tmpfs",
                "tmpfs",
                &["nosuid", "strictatime", "mode=755", "size=65536k"],
            ),
            mount(
                "/dev/pts",
                "devpts",
                "devpts",
                &[
                    "nosuid",
                    "noexec",
                    "newinstance",
                    "ptmxmode=0666",
                    "mode=0620",
                    "gid=5",
                ],
            ),
            mount(
                "/dev/shm",
                "tmpfs",
                "shm",
                &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
            ),
            mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        ],
        Linux: MessageField::some(oci::Linux {
            Namespaces: ["pid", "ipc", "uts", "mount", "cgroup"].map(namespace).to_vec(),
            ..Default::default()
        }),
        ..Default::default()
    }
}
