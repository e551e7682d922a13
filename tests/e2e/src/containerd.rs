//! Debian's containerd, of a test's own: with Thaw's snapshotter and runtime, `ctr` and CRI.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tonic::transport::Endpoint;

use crate::cri;
use crate::home::Home;
use crate::{Outcome, binary, finish};

/// The runtime's name.
pub const RUNTIME: &str = "io.containerd.thaw.v2";

const CONFIG: &str = "config.toml";

/// A CNI plugin that makes nothing: a pod's network namespace has its loopback alone.
const CNI_PLUGIN: &str = r#"#!/bin/sh
version=$(sed -n 's/.*"cniVersion" *: *"\([^"]*\)".*/\1/p' | head -n 1)
case $CNI_COMMAND in
  ADD) echo "{\"cniVersion\":\"${version:-0.3.1}\",\"interfaces\":[{\"name\":\"$CNI_IFNAME\",\"sandbox\":\"$CNI_NETNS\"}],\"ips\":[{\"version\":\"4\",\"interface\":0,\"address\":\"10.88.0.2/24\"}]}" ;;
  VERSION) echo '{"cniVersion":"0.4.0","supportedVersions":["0.3.0","0.3.1","0.4.0"]}' ;;
esac
"#;
const CNI_NETWORK: &str =
    r#"{"cniVersion":"0.3.1","name":"nothing","plugins":[{"cniVersion":"0.3.1","type":"nothing"}]}"#;

/// What makes pods' networks.
pub struct Networks {
    /// Where the plugins are.
    pub plugins: PathBuf,
    /// The network's configuration: a list of them.
    pub network: String,
}

impl Networks {
    /// A pod has none.
    pub fn nothing(home: &Home) -> Networks {
        use std::os::unix::fs::PermissionsExt;
        let plugins = home.scratch("cni-bin");
        for name in ["nothing", "loopback"] {
            let plugin = plugins.join(name);
            std::fs::write(&plugin, CNI_PLUGIN).unwrap();
            std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Networks {
            plugins,
            network: CNI_NETWORK.into(),
        }
    }

    fn write(&self, directory: &Path) -> PathBuf {
        std::fs::write(directory.join("10-e2e.conflist"), &self.network).unwrap();
        directory.into()
    }
}

/// Stopped when dropped; what it left running is not.
pub struct Containerd {
    process: Child,
    socket: PathBuf,
    /// What it knows and has.
    directory: PathBuf,
    /// thawd's run directory.
    run: PathBuf,
}

impl Containerd {
    /// Over a thawd of `home`, which serves snapshots at `snapshots`. Pods' own containers are of the image `pause`; pods have
    /// no network.
    pub fn start(home: &Home, snapshots: &Path, pause: &str) -> Containerd {
        Containerd::start_with(home, snapshots, pause, &Networks::nothing(home))
    }

    /// The same, whose pods have a network.
    pub fn start_with(home: &Home, snapshots: &Path, pause: &str, networks: &Networks) -> Containerd {
        let directory = home.scratch("containerd");
        let socket = directory.join("containerd.sock");
        let plugins = &networks.plugins;
        let networks = networks.write(&home.scratch("cni-net"));
        let config = format!(
            "version = 2\nroot = {root:?}\nstate = {state:?}\n[grpc]\naddress = {socket:?}\n\
             [proxy_plugins.thaw]\ntype = \"snapshot\"\naddress = {snapshots:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = {pause:?}\nrestrict_oom_score_adj = true\n\
             disable_hugetlb_controller = false\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = {plugins:?}\nconf_dir = {networks:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"thaw\"\ndefault_runtime_name = \"thaw\"\n\
             disable_snapshot_annotations = false\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.thaw]\nruntime_type = {RUNTIME:?}\n\
             privileged_without_host_devices = true\npod_annotations = [\"run.thaw.*\"]\n",
            root = directory.join("root"),
            state = directory.join("state"),
        );
        std::fs::write(directory.join(CONFIG), config).unwrap();
        Containerd {
            process: launch(&directory, &home.run()),
            socket,
            directory,
            run: home.run(),
        }
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts it again, after it was killed.
    pub fn start_again(&mut self) {
        self.process = launch(&self.directory, &self.run);
    }

    /// The bundles of tasks.
    pub fn bundles(&self) -> Vec<PathBuf> {
        let tasks = self.directory.join("state/io.containerd.runtime.v2.task/k8s.io");
        let entries = std::fs::read_dir(tasks).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    /// `ctr` in CRI's namespace, not started.
    pub fn ctr_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("ctr");
        command
            .arg("--address")
            .arg(&self.socket)
            .args(["--namespace", "k8s.io"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// What it did.
    pub fn run_ctr(&self, arguments: &[&str]) -> Outcome {
        finish(self.ctr_command(arguments).spawn().unwrap(), "")
    }

    /// What it printed; its failure fails the test.
    pub fn ctr(&self, arguments: &[&str]) -> String {
        self.run_ctr(arguments).ok()
    }

    /// What it printed, or what was wrong.
    pub fn try_ctr(&self, arguments: &[&str]) -> Result<String, String> {
        let outcome = self.run_ctr(arguments);
        match outcome.status.success() {
            true => Ok(outcome.stdout),
            false => Err(outcome.stderr),
        }
    }

    /// Calls CRI, as the kubelet does.
    pub fn cri<Q, A>(&self, service: &str, method: &str, request: Q) -> Result<A, tonic::Status>
    where
        Q: prost::Message + Clone + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let address = format!("unix://{}", self.socket.display());
            let channel = Endpoint::try_from(address).unwrap().connect().await.unwrap();
            let mut client = tonic::client::Grpc::new(channel);
            client.ready().await.unwrap();
            let path = format!("/runtime.v1.{service}/{method}").parse().unwrap();
            let codec = tonic_prost::ProstCodec::<Q, A>::default();
            let response = client.unary(tonic::Request::new(request), path, codec).await?;
            Ok(response.into_inner())
        })
    }

    /// Pulls as the kubelet does. Returns the image's ID.
    pub fn pull(&self, image: &str) -> Result<String, tonic::Status> {
        self.pull_as(image, None)
    }

    /// The same, with what a pod's secret says.
    pub fn pull_as(&self, image: &str, auth: Option<cri::AuthConfig>) -> Result<String, tonic::Status> {
        let image = Some(cri::ImageSpec { image: image.into() });
        let request = cri::PullImageRequest { image, auth };
        let pulled: cri::PullImageResponse = self.cri("ImageService", "PullImage", request)?;
        Ok(pulled.image_ref)
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// containerd over what is in `directory`, serving.
fn launch(directory: &Path, run: &Path) -> Child {
    // Where it finds the shim.
    let ours = binary("containerd-shim-thaw-v2");
    let ours = ours.parent().unwrap().canonicalize().unwrap();
    let search = format!("{}:{}", ours.display(), std::env::var("PATH").unwrap_or_default());
    let mut process = Command::new("containerd")
        .arg("--config")
        .arg(directory.join(CONFIG))
        .env("PATH", search)
        .env("THAW_RUN", run)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(process.stderr.take().unwrap()).lines();
    let begun = lines
        .by_ref()
        .map_while(Result::ok)
        .inspect(|line| eprintln!("containerd: {line}"))
        .any(|line| line.contains("containerd successfully booted"));
    assert!(begun, "containerd ended before it served");
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            eprintln!("containerd: {line}");
        }
    });
    process
}
