//! What the containers of a pod share, by CRI's namespace options.

use thaw_e2e::cri;
use thaw_e2e::node::{Node, Pod, until};

/// The command lines of all processes that a container sees.
const PROCESSES: &str = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '";

#[test]
#[ignore = "long"]
fn a_pods_containers_share_what_they_are_to() {
    let node = Node::new();
    let shared = node
        .pod_with("shared", |config| namespaces(config).pid = 0)
        .unwrap();
    let [a, b, c] = ["1", "2", "3"].map(|name| sharing(&shared, name, 0));
    let seen = node.said(&c, PROCESSES);
    assert!(
        ["1000.1", "1000.2", "1000.3"]
            .iter()
            .all(|sleep| seen.contains(sleep)),
        "{seen}"
    );
    assert_eq!(
        node.said(&a, "cat /proc/1/comm; hostname; ls /dev/shm"),
        "pause\nshared\n1\n2\n3\n"
    );
    // What one listens on, the others reach: one network.
    let listen =
        "import socket; s = socket.create_server((\"127.0.0.1\", 8000)); s.accept()[0].send(b\"heard\")";
    node.said(&a, &format!("nohup python3 -c '{listen}' > /dev/null 2>&1 &"));
    let dial = "import socket; print(socket.create_connection((\"127.0.0.1\", 8000)).recv(9).decode())";
    let dial = format!("until python3 -c '{dial}' 2> /dev/null; do sleep 0.1; done");
    assert_eq!(node.said(&b, &dial), "heard\n");
    // System V objects.
    let make = "import ctypes; print(ctypes.CDLL(None).shmget(7, 4096, 0o1600) >= 0)";
    assert_eq!(node.said(&a, &format!("python3 -c '{make}'")), "True\n");
    assert_eq!(node.said(&b, "tail -n +2 /proc/sysvipc/shm | wc -l"), "1\n");
    // Shared memory outlives whose it was; a container that ends takes its processes along, and only these.
    node.stop(&a, 0);
    node.remove(&a);
    let seen = node.said(&b, PROCESSES);
    assert!(!seen.contains("1000.1") && seen.contains("1000.3"), "{seen}");
    node.stop(&b, 0);
    node.stop(&c, 0);
    let d = sharing(&shared, "4", 0);
    until("it has begun", || node.said(&d, "ls /dev/shm").ends_with("4\n"));
    assert_eq!(node.said(&d, "cat /dev/shm/1; ls /dev/shm"), "1\n1\n2\n3\n4\n");
    shared.remove();

    // Apart, but for one that is to look into the only other.
    let pod = node.pod("apart");
    let target = sharing(&pod, "1", 1);
    assert!(
        node.said(&target, "tr '\\0' ' ' < /proc/1/cmdline")
            .contains("1000.1")
    );
    let debugger = pod.container_with("debugger", "sleep 1000.2", |_, security| {
        let options = security.namespace_options.as_mut().unwrap();
        (options.pid, options.target_id) = (3, target.container_id.clone());
    });
    assert!(
        node.said(&debugger, "tr '\\0' ' ' < /proc/1/cmdline")
            .contains("1000.1")
    );
    pod.remove();

    namespaces_of_the_host_are_refused(&node);
    pod_may_accept_the_guests_own_namespaces(&node);
    node.is_empty_soon();
}

/// Each is refused by name.
fn namespaces_of_the_host_are_refused(node: &Node) {
    type Ask = fn(&mut cri::NamespaceOption);
    let asks: [(Ask, &str); 3] = [
        (|of| of.network = 2, "host's network"),
        (|of| of.pid = 2, "hostPID"),
        (|of| of.ipc = 2, "hostIPC"),
    ];
    for (ask, word) in asks {
        let refused = node.pod_with("host", |config| ask(namespaces(config)));
        let refused = refused.map(|_| ()).unwrap_err();
        assert!(refused.message().contains(word), "{refused}");
    }
}

/// What is the host's to Kubernetes is the guest's to such a pod.
fn pod_may_accept_the_guests_own_namespaces(node: &Node) {
    let accepted = node.pod_with("guest", |config| {
        (namespaces(config).pid, namespaces(config).ipc) = (2, 2);
        config
            .annotations
            .insert("run.thaw.host-namespaces".into(), "guest".into());
    });
    let accepted = accepted.unwrap();
    let container = sharing(&accepted, "1", 2);
    let seen = node.said(&container, PROCESSES);
    assert!(seen.contains("1000.1") && seen.contains("/sbin/init"), "{seen}");
    accepted.remove();
}

/// A container of which shared memory and the list of processes show the name. `pid` is CRI's mode of its PID namespace.
fn sharing(pod: &Pod<'_>, name: &str, pid: i32) -> cri::Container {
    let script = format!("echo {name} > /dev/shm/{name}; sleep 1000.{name}");
    pod.container_with(name, &script, |_, security| {
        security.namespace_options.as_mut().unwrap().pid = pid;
    })
}

fn namespaces(config: &mut cri::PodSandboxConfig) -> &mut cri::NamespaceOption {
    let security = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
    security.namespace_options.as_mut().unwrap()
}
