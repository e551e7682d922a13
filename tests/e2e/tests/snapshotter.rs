//! containerd with Thaw as its snapshotter: pulls by CRI fetch no layer, and containers get the store's image.

#![allow(clippy::unwrap_used)]

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use thaw_e2e::home::Home;
use thaw_e2e::run;
use thaw_e2e::upstream::Upstream;
use tonic::transport::Endpoint;

/// CRI's messages (`runtime.v1`), as far as they are needed here.
#[derive(Clone, PartialEq, prost::Message)]
struct ImageSpec {
    #[prost(string, tag = "1")]
    image: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PullImageRequest {
    #[prost(message, optional, tag = "1")]
    image: Option<ImageSpec>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PullImageResponse {
    #[prost(string, tag = "1")]
    image_ref: String,
}

/// A containerd of the test's own, stopped when dropped.
struct Containerd {
    process: Child,
    socket: PathBuf,
}

impl Containerd {
    fn start(directory: &Path, snapshots: &Path) -> Containerd {
        let socket = directory.join("containerd.sock");
        let config = format!(
            "version = 2\nroot = {root:?}\nstate = {state:?}\n[grpc]\naddress = {socket:?}\n\
             [proxy_plugins.thaw]\ntype = \"snapshot\"\naddress = {snapshots:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"thaw\"\n\
             disable_snapshot_annotations = false\n",
            root = directory.join("root"),
            state = directory.join("state"),
        );
        let path = directory.join("config.toml");
        std::fs::write(&path, config).unwrap();
        let mut process = Command::new("containerd")
            .arg("--config")
            .arg(&path)
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
        Containerd { process, socket }
    }

    /// `ctr` in CRI's namespace.
    fn ctr(&self, arguments: &[&str]) -> String {
        self.try_ctr(arguments).unwrap()
    }

    /// What it printed, or what was wrong.
    fn try_ctr(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new("ctr");
        command
            .arg("--address")
            .arg(&self.socket)
            .args(["--namespace", "k8s.io"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let outcome = run(&mut command);
        match outcome.status.success() {
            true => Ok(outcome.stdout),
            false => Err(outcome.stderr),
        }
    }

    /// Pulls as the kubelet does. Returns the image's ID.
    fn pull(&self, image: &str) -> Result<String, tonic::Status> {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let address = format!("unix://{}", self.socket.display());
            let channel = Endpoint::try_from(address).unwrap().connect().await.unwrap();
            let mut client = tonic::client::Grpc::new(channel);
            client.ready().await.unwrap();
            let image = Some(ImageSpec { image: image.into() });
            let request = tonic::Request::new(PullImageRequest { image });
            let path = "/runtime.v1.ImageService/PullImage".parse().unwrap();
            let codec = tonic_prost::ProstCodec::<PullImageRequest, PullImageResponse>::default();
            let response = client.unary(request, path, codec).await?;
            Ok(response.into_inner().image_ref)
        })
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The committed snapshot nothing stands on.
fn top(containerd: &Containerd) -> String {
    let listed = containerd.ctr(&["snapshots", "--snapshotter", "thaw", "ls"]);
    let rows: Vec<Vec<&str>> = listed
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect())
        .collect();
    let parents: Vec<&str> = rows
        .iter()
        .filter(|row| row.len() == 3)
        .map(|row| row[1])
        .collect();
    let tops: Vec<&str> = rows
        .iter()
        .map(|row| row[0])
        .filter(|name| !parents.contains(name))
        .collect();
    assert_eq!(tops.len(), 1, "{listed}");
    tops[0].into()
}

#[test]
fn pulls_by_cri_fetch_no_layer_and_a_container_gets_the_image() {
    let home = Home::new();
    let upstream = Upstream::test_images(&home.scratch("registry"), None);
    let socket = home.run().join("snapshots.sock");
    let mut thawd = home.thawd(&["--snapshots-socket", socket.to_str().unwrap()]);
    let containerd = Containerd::start(&home.scratch("containerd"), &socket);
    let image = format!("{}/python3:latest", upstream.host);
    containerd.pull(&image).unwrap();

    // What containerd has is documents; file data is the store's.
    let contents = containerd.ctr(&["content", "ls"]);
    assert!(
        contents
            .lines()
            .skip(1)
            .all(|line| !line.contains("MB") && !line.contains("MiB")),
        "{contents}"
    );
    assert!(!home.stored("data").is_empty());

    // A container's snapshot is one mount that Thaw's shim knows, by the image's digest.
    let top = top(&containerd);
    containerd.ctr(&["snapshots", "--snapshotter", "thaw", "prepare", "container", &top]);
    let told_by = [
        "snapshots",
        "--snapshotter",
        "thaw",
        "mounts",
        "/target",
        "container",
    ];
    let told = containerd.try_ctr(&told_by).unwrap();
    let stored = run(&mut home.thaw(&["--json", "image", "ls"])).ok();
    let stored: serde_json::Value = serde_json::from_str(&stored).unwrap();
    let digest = stored[0]["digest"].as_str().unwrap();
    assert!(
        told.contains("-t thaw") && told.contains(digest),
        "{told}; {stored}"
    );

    // Killed and started again, it knows what it knew.
    thawd.kill().unwrap();
    thawd.wait().unwrap();
    let mut thawd = home.thawd(&["--snapshots-socket", socket.to_str().unwrap()]);
    // containerd dials again by itself, after a pause of its own.
    let mut again = Err(String::new());
    for _ in 0..100 {
        again = containerd.try_ctr(&told_by);
        if again.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(again.as_ref(), Ok(&told));

    // What is not there is an error, and leaves no snapshot.
    let absent = format!("{}/no-such-image:latest", upstream.host);
    assert!(containerd.pull(&absent).is_err());
    containerd.ctr(&["snapshots", "--snapshotter", "thaw", "rm", "container"]);
    thawd.kill().unwrap();
    thawd.wait().unwrap();
}
