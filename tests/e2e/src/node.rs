//! A node as Kubernetes has them: thawd, containerd with Thaw's snapshotter and runtime, and one image; pods by CRI.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::containerd::{Containerd, Networks, RUNTIME};
use crate::cri;
use crate::home::Home;
use crate::upstream::Upstream;
use crate::{pid_of, run, stuck};

/// How long what goes on by itself may take, in a lab.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A node with containerd, and one image.
pub struct Node {
    // Stopped in this order.
    pub containerd: Containerd,
    thawd: Child,
    _upstream: Upstream,
    pub home: Home,
    pub image: String,
}

impl Node {
    /// One with Python's image, pulled, whose pods have no network.
    pub fn new() -> Node {
        Node::with_network(Networks::nothing)
    }

    /// The same, whose pods have this network.
    pub fn with_network(networks: impl FnOnce(&Home) -> Networks) -> Node {
        let node = Node::unpulled("python3", networks);
        node.containerd.pull(&node.image).unwrap();
        node
    }

    /// One with a test image that is still in its registry.
    pub fn unpulled(image: &str, networks: impl FnOnce(&Home) -> Networks) -> Node {
        Node::of_registry(image, |state| Upstream::test_images(state, None), networks)
    }

    /// The same, of a registry of its own.
    pub fn of_registry(
        image: &str,
        registry: impl FnOnce(&Path) -> Upstream,
        networks: impl FnOnce(&Home) -> Networks,
    ) -> Node {
        let home = Home::new();
        let upstream = registry(&home.scratch("registry"));
        let thawd = thawd(&home);
        let image = format!("{}/{image}:latest", upstream.host);
        let networks = networks(&home);
        Node {
            containerd: Containerd::start_with(&home, &snapshots(&home), &image, &networks),
            thawd,
            _upstream: upstream,
            home,
            image,
        }
    }

    /// `ctr run` with words before the image.
    pub fn run<'a>(&'a self, options: &[&'a str], id: &'a str, command: &[&'a str]) -> Vec<&'a str> {
        let fixed = ["run", "--runtime", RUNTIME, "--snapshotter", "thaw"];
        [&fixed, options, &[&self.image, id], command].concat()
    }

    /// What thawd lists.
    pub fn sandboxes(&self) -> Vec<serde_json::Value> {
        let listed = run(&mut self.home.thaw(&["--json", "ps"])).ok();
        serde_json::from_str(&listed).unwrap()
    }

    /// Why those failed that thawd lists.
    pub fn failures(&self) -> Vec<String> {
        let listed = run(&mut self.home.thaw(&["--json", "ps", "-a"])).ok();
        let listed: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
        let reasons = listed.iter().filter_map(|s| s["failure"]["reason"].as_str());
        reasons.map(str::to_owned).collect()
    }

    /// Waits until no microVM is there, and no shim.
    pub fn is_empty_soon(&self) {
        until("microVMs and shims are gone", || {
            self.sandboxes().is_empty() && shims().is_empty()
        });
    }

    /// Ends thawd as a service's stop does.
    pub fn stop_thawd(&mut self) {
        rustix::process::kill_process(pid_of(self.thawd.id() as i32), Signal::TERM).unwrap();
        self.thawd.wait().unwrap();
    }

    /// Kills thawd.
    pub fn kill_thawd(&mut self) {
        self.thawd.kill().unwrap();
        self.thawd.wait().unwrap();
    }

    /// Starts another, after that.
    pub fn start_thawd(&mut self) {
        self.thawd = thawd(&self.home);
    }

    /// Starts containerd again, after it was killed, and waits until its CRI answers: that has read what there was then.
    pub fn start_containerd(&mut self) {
        self.containerd.start_again();
        until("CRI answers", || {
            let version = self.try_call::<cri::Empty, cri::Empty>("Version", cri::Empty {});
            version.is_ok()
        });
    }

    /// Calls CRI's runtime service; a refusal fails the test.
    pub fn call<Q, A>(&self, method: &str, request: Q) -> A
    where
        Q: prost::Message + Clone + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        self.try_call(method, request)
            .unwrap_or_else(|e| panic!("{method}: {e}"))
    }

    /// Calls CRI's runtime service.
    pub fn try_call<Q, A>(&self, method: &str, request: Q) -> Result<A, tonic::Status>
    where
        Q: prost::Message + Clone + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        self.containerd.cri("RuntimeService", method, request)
    }

    /// Starts a pod whose containers keep their processes to themselves, as Kubernetes has it unless told.
    pub fn pod(&self, name: &str) -> Pod<'_> {
        self.pod_with(name, |_| ())
            .unwrap_or_else(|e| panic!("pod {name}: {e}"))
    }

    /// Starts a pod that is somewhat different.
    pub fn pod_with(
        &self,
        name: &str,
        change: impl FnOnce(&mut cri::PodSandboxConfig),
    ) -> Result<Pod<'_>, tonic::Status> {
        let logs = self.home.scratch(&format!("logs-{name}"));
        let mut config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: name.into(),
                uid: name.into(),
                namespace: "default".into(),
                attempt: 0,
            }),
            hostname: name.into(),
            log_directory: logs.display().to_string(),
            linux: Some(cri::LinuxPodSandboxConfig {
                security_context: Some(cri::LinuxSandboxSecurityContext {
                    namespace_options: Some(apart()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        change(&mut config);
        let made: cri::Pod = self.try_call(
            "RunPodSandbox",
            cri::RunPodSandboxRequest {
                config: Some(config.clone()),
                runtime_handler: "thaw".into(),
            },
        )?;
        Ok(Pod {
            node: self,
            id: made.pod_sandbox_id,
            config,
            logs,
        })
    }
}

impl Default for Node {
    fn default() -> Self {
        Node::new()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.thawd.kill();
        let _ = self.thawd.wait();
    }
}

fn snapshots(home: &Home) -> PathBuf {
    home.run().join("snapshots.sock")
}

fn thawd(home: &Home) -> Child {
    home.thawd(&["--snapshots-socket", snapshots(home).to_str().unwrap()])
}

/// Processes of a container's own.
fn apart() -> cri::NamespaceOption {
    cri::NamespaceOption {
        pid: 1,
        ..Default::default()
    }
}

/// A pod that runs.
pub struct Pod<'a> {
    node: &'a Node,
    pub id: String,
    config: cri::PodSandboxConfig,
    logs: PathBuf,
}

impl Pod<'_> {
    /// Starts a container that executes a shell's script.
    pub fn container(&self, name: &str, script: &str) -> cri::Container {
        self.container_with(name, script, |_, _| ())
    }

    /// Starts one that is somewhat different.
    pub fn container_with(
        &self,
        name: &str,
        script: &str,
        change: impl FnOnce(&mut cri::ContainerConfig, &mut cri::LinuxContainerSecurityContext),
    ) -> cri::Container {
        let made = self
            .create(name, script, change)
            .unwrap_or_else(|e| panic!("CreateContainer {name}: {e}"));
        let _: cri::Empty = self.node.call("StartContainer", made.clone());
        made
    }

    /// Makes one and does not start it.
    pub fn create(
        &self,
        name: &str,
        script: &str,
        change: impl FnOnce(&mut cri::ContainerConfig, &mut cri::LinuxContainerSecurityContext),
    ) -> Result<cri::Container, tonic::Status> {
        let mut config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata {
                name: name.into(),
                attempt: 0,
            }),
            image: Some(cri::ImageSpec {
                image: self.node.image.clone(),
            }),
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            log_path: format!("{name}.log"),
            ..Default::default()
        };
        let mut security = cri::LinuxContainerSecurityContext {
            namespace_options: Some(apart()),
            ..Default::default()
        };
        change(&mut config, &mut security);
        config.linux.get_or_insert_default().security_context = Some(security);
        self.node.try_call(
            "CreateContainer",
            cri::CreateContainerRequest {
                pod_sandbox_id: self.id.clone(),
                config: Some(config),
                sandbox_config: Some(self.config.clone()),
            },
        )
    }

    /// What a container has written, without what CRI puts before each line.
    pub fn log(&self, name: &str) -> String {
        let text = std::fs::read_to_string(self.logs.join(format!("{name}.log"))).unwrap_or_default();
        let lines = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
        lines.map(|line| format!("{line}\n")).collect()
    }

    /// What a container has written, once that is all: once it has ended.
    pub fn whole_log(&self, name: &str, container: &cri::Container) -> String {
        self.node.ends_soon(container);
        self.log(name)
    }

    /// Stops it and removes it, containers and all.
    pub fn remove(self) {
        self.node.remove_pod(&self.id);
    }
}

impl Node {
    /// Its state, 2 for ended, and exit code.
    pub fn state(&self, container: &cri::Container) -> (i32, i32) {
        let status = self.status(container);
        (status.state, status.exit_code)
    }

    pub fn status(&self, container: &cri::Container) -> cri::ContainerStatus {
        let status: cri::ContainerStatusResponse = self.call("ContainerStatus", container.clone());
        status.status.unwrap()
    }

    /// Waits for its end: its exit code.
    pub fn ends_soon(&self, container: &cri::Container) -> i32 {
        until("the container has ended", || self.state(container).0 == 2);
        self.state(container).1
    }

    /// Executes a shell's script: what it wrote to both outputs, and its code.
    pub fn exec(&self, container: &cri::Container, script: &str) -> (String, String, i32) {
        let done: cri::ExecSyncResponse = self.call(
            "ExecSync",
            cri::ExecSyncRequest {
                container_id: container.container_id.clone(),
                cmd: ["sh", "-c", script].map(str::to_owned).to_vec(),
                // Many may be executed at once.
                timeout: 600,
            },
        );
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (text(done.stdout), text(done.stderr), done.exit_code)
    }

    /// What a script wrote that must succeed.
    pub fn said(&self, container: &cri::Container, script: &str) -> String {
        let (out, err, code) = self.exec(container, script);
        assert_eq!(code, 0, "{script}: {out}{err}");
        out
    }

    /// Stops it, killed after so many seconds.
    pub fn stop(&self, container: &cri::Container, timeout: i64) {
        let request = cri::StopContainerRequest {
            container_id: container.container_id.clone(),
            timeout,
        };
        let _: cri::Empty = self.call("StopContainer", request);
    }

    /// Stops a pod and removes it, containers and all.
    pub fn remove_pod(&self, id: &str) {
        let id = cri::Pod {
            pod_sandbox_id: id.into(),
        };
        let _: cri::Empty = self.call("StopPodSandbox", id.clone());
        let _: cri::Empty = self.call("RemovePodSandbox", id);
    }

    pub fn remove(&self, container: &cri::Container) {
        let _: cri::Empty = self.call("RemoveContainer", container.clone());
    }
}

/// Waits until something is so.
pub fn until(what: &str, holds: impl Fn() -> bool) {
    until_within(PATIENCE, what, holds);
}

/// The same, where much goes on at once.
pub fn until_within(patience: Duration, what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        let is_late = began.elapsed() >= patience;
        assert!(
            !is_late,
            "not so after {patience:?}: {what}{}",
            stuck::report_of_thawd()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The shims there are.
pub fn shims() -> Vec<i32> {
    running("containerd-shim-thaw-v2")
}

/// The processes that serve shares.
pub fn serving() -> Vec<i32> {
    running("thaw-share")
}

/// The processes that run a program of this name.
fn running(name: &str) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|p| p.file_name().to_str()?.parse().ok());
    let runs = |pid: &i32| {
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        program.file_name().is_some_and(|file| file == name)
    };
    pids.filter(runs).collect()
}

/// Kills a process.
pub fn kill(pid: i32) {
    rustix::process::kill_process(pid_of(pid), Signal::KILL).unwrap();
}
