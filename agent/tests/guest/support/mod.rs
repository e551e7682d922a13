//! A guest without a machine: the agent in namespaces of its own, and the host's side of the connection.

mod calls;
mod handshake;
mod spec;

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use thaw_protocol::agent::agent_ttrpc::AgentServiceClient;
use thaw_protocol::handshake::*;

pub use calls::{code_of, context, exec_request, wait_gone, write_request};
pub use handshake::identity;
use handshake::{connect, shake_hands};
use spec::make_rootfs;
pub use spec::{bind, capabilities, mount, spec};

pub struct Guest {
    pub client: AgentServiceClient,
    agent: Child,
    dir: PathBuf,
    cgroup: String,
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
    /// Starts the agent and performs the handshake.
    pub async fn boot() -> Option<Self> {
        if let Some(reason) = missing() {
            thaw_test_skip::skip(reason);
            return None;
        }
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // Cargo creates it where it builds; the lab has only the build's results.
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
        // Garbage from an earlier connection must not prevent the handshake.
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

    /// Gives the agent another identity after its first.
    pub fn becomes(&self, identity: Identity) -> Acknowledgement {
        shake_hands(&self.dir, identity)
    }

    /// Stops or resumes the workloads.
    pub fn greet(&self, greeting: &Greeting) {
        let mut stream = connect(&self.dir.join("1023"));
        write_frame(&mut stream, greeting).unwrap();
        let answer: Quiesced = read_frame(&mut stream).unwrap();
        assert_eq!((answer.version, answer.failure), (HANDSHAKE_VERSION, None));
    }

    /// Opens another connection to the API.
    pub async fn connect_again(&self) -> AgentServiceClient {
        connect_api(&self.dir).await
    }

    /// Closes the connection to the API and opens another.
    pub async fn reconnect(&mut self) {
        self.client = self.connect_again().await;
    }

    /// Whether the kernel reports that a container is frozen.
    pub fn is_frozen(&self, id: &str) -> bool {
        let path = format!(
            "/proc/{}/root/sys/fs/cgroup/{}/{id}/cgroup.events",
            self.agent_pid(),
            self.cgroup
        );
        fs::read_to_string(path).unwrap().contains("frozen 1")
    }

    /// A path of the guest, as this test sees it.
    pub fn path_in(&self, path: &str) -> PathBuf {
        format!("/proc/{}/root{path}", self.agent_pid()).into()
    }

    /// The cgroup path in a container's specification.
    pub fn cgroup_path(&self, id: &str) -> String {
        format!("/{}/{id}", self.cgroup)
    }

    pub fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    /// Reads from a port of its localhost to the end.
    pub fn forwarded(&self, port: u16) -> Vec<u8> {
        let mut stream = connect(&self.dir.join(FORWARD_PORT.to_string()));
        stream.write_all(&port.to_be_bytes()).unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).unwrap();
        said
    }

    /// The agent's PID in this namespace.
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

    /// Waits until the agent has no child, not even a zombie.
    pub async fn wait_for_no_process(&self) {
        let end = Instant::now() + Duration::from_secs(30);
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

    /// Asserts that no process, mount or cgroup of a container is left.
    pub async fn assert_clean(&self) {
        let end = Instant::now() + Duration::from_secs(30);
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

async fn connect_api(dir: &Path) -> AgentServiceClient {
    let address = format!("unix://{}", dir.join("1024").display());
    AgentServiceClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}
