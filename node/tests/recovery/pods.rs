//! Pods for containerd's shim in namespaces that a plugin has made. Whichever process dies, the namespace is restored once its pod has
//! ended.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use thaw_failpoint::Failpoint;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::pods::{CreatePodRequest, CreatePodResponse, PodNetwork, PodRequest};
use thaw_protocol::shim::pods_ttrpc::PodsClient;
use thaw_tiny_node::Place;
use thaw_tiny_node::daemon::{eventually, log};
use ttrpc::context::Context;

use crate::node::Node;

/// Kills a thawd at a failpoint, the `nth` time it reaches it, while it creates a pod and ends it. The next thawd finds that pod and an
/// earlier one. Returns whether the thawd died.
pub async fn killed_at(node: &mut Node, point: Failpoint, nth: usize, what: &str) -> bool {
    let (old, new) = (Namespace::new(), Namespace::new());
    let untouched = new.has();
    assert_eq!(old.has(), untouched);
    let first = node.start();
    let survivor = create(&node.place, &old).await.unwrap();
    first.kill();
    assert_ne!(old.has(), untouched, "{what}: it is led to the guest still");

    let mut doomed = node.start_doomed(point, nth);
    if doomed.serves(&node.place)
        && let Err(e) = life(&node.place, &new).await
    {
        // Its clients see its death first.
        eventually(&format!("{what}: thawd ends, and not {e}"), || doomed.has_ended());
    }
    let status = doomed.stop();
    let died = status.signal() == Some(9);
    assert!(
        died || status.success(),
        "{what}: {status:?}: {}",
        log(&node.place)
    );

    let vmm = ProcessRecord::of(survivor.vmm_pid);
    assert!(
        vmm.is_some_and(|vmm| vmm.lives()),
        "{what}: the pod does not go on"
    );
    let next = node.start();
    let client = node.client();
    let living = client.list().await.unwrap();
    let found = living.iter().find(|s| s.id == survivor.sandbox_id);
    assert_eq!(
        found.map(|s| s.state.as_str()),
        Some("running"),
        "{what}: {living:?}; {}",
        log(&node.place)
    );
    for sandbox in &living {
        client.delete(&sandbox.id).await.unwrap();
    }
    for namespace in [&old, &new] {
        assert_eq!(namespace.has(), untouched, "{what}: {}", log(&node.place));
        // The namespace can be used by another pod.
        life(&node.place, namespace).await.unwrap();
        assert_eq!(namespace.has(), untouched, "{what}: {}", log(&node.place));
    }
    assert!(next.stop().success(), "{what}: {}", log(&node.place));
    node.is_empty_again(what);
    died
}

/// Creates a pod and ends it.
async fn life(place: &Place, namespace: &Namespace) -> ttrpc::Result<()> {
    let pod = create(place, namespace).await?;
    let request = PodRequest {
        sandbox_id: pod.sandbox_id,
        ..Default::default()
    };
    let client = connect(place).await?;
    client.end(Context::default(), &request).await.map(drop)
}

async fn create(place: &Place, namespace: &Namespace) -> ttrpc::Result<CreatePodResponse> {
    let request = CreatePodRequest {
        network: MessageField::some(PodNetwork {
            mode: Mode::NAMESPACE.into(),
            namespace: namespace.path(),
            ..Default::default()
        }),
        cpus: 1,
        memory_mib: 128,
        client_pid: std::process::id() as i32,
        ..Default::default()
    };
    connect(place).await?.create(Context::default(), &request).await
}

async fn connect(place: &Place) -> ttrpc::Result<PodsClient> {
    let address = format!("unix://{}", place.path("run/pods.sock").display());
    Ok(PodsClient::new(ttrpc::r#async::Client::connect(&address).await?))
}

/// A network namespace as a plugin leaves it, with an interface.
struct Namespace(File);

impl Namespace {
    fn new() -> Namespace {
        let made = std::thread::spawn(|| {
            // SAFETY: it does not unshare descriptors, which is the only thing that would break other code's assumptions.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
            for line in [
                "link add eth0 type veth peer name outside",
                "address add 10.88.0.5/16 dev eth0",
                "link set eth0 up",
            ] {
                let done = Command::new("ip").args(line.split(' ')).output().unwrap();
                assert!(done.status.success(), "ip {line}: {done:?}");
            }
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        Namespace(made.join().unwrap())
    }

    /// The path by which other processes open it.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Its interfaces, and the rules that redirect their frames.
    fn has(&self) -> (Vec<String>, String) {
        let look = || {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            let interfaces = thaw_tiny_node::counts::interfaces();
            let shown = Command::new("tc").args(["qdisc", "show"]).output().unwrap();
            assert!(shown.status.success(), "{shown:?}");
            let disciplines = String::from_utf8(shown.stdout).unwrap();
            let ingress = disciplines.lines().filter(|line| line.contains("ingress"));
            (interfaces.into_iter().collect(), ingress.collect())
        };
        std::thread::scope(|scope| scope.spawn(look).join()).unwrap()
    }
}
