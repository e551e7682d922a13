//! What a kubelet expects of a runtime, over CRI: pods and containers, their streams, their limits, what they may and share.
//!
//! Minutes in a lab, so not in every run: `tests/e2e/run --all yes --only cri`. THAW_PODS and THAW_EXECS say how many there are
//! at once.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use thaw_e2e::containerd::Networks;
use thaw_e2e::cri;
use thaw_e2e::node::{Node, PATIENCE, Pod, shims, until, until_within};
use thaw_e2e::upstream::Upstream;
use thaw_e2e::websocket::WebSocket;

#[path = "cri/sharing.rs"]
mod sharing;

const MIB: i64 = 1 << 20;

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

fn limits(config: &mut cri::ContainerConfig, resources: cri::LinuxContainerResources) {
    config.linux.get_or_insert_default().resources = Some(resources);
}

#[test]
#[ignore = "long"]
fn cri_containers_run_restart_log_and_have_limits() {
    let node = Node::new();
    let pod = node.pod("the-pod");
    let first = pod.container_with(
        "first",
        "hostname; cat /etc/hostname; echo $A; pwd; sleep 1000",
        |config, _| {
            config.working_dir = "/made/for/me".into();
            config.envs = vec![cri::KeyValue {
                key: "A".into(),
                value: "b c".into(),
            }];
            limits(
                config,
                cri::LinuxContainerResources {
                    memory_limit_in_bytes: 64 * MIB,
                    ..Default::default()
                },
            );
        },
    );
    let second = pod.container("second", "echo to-stderr >&2; exit 5");
    assert_eq!(node.ends_soon(&second), 5);
    assert_eq!(node.state(&first), (1, 0));
    assert_eq!(
        (node.sandboxes().len(), shims().len()),
        (1, 1),
        "one microVM, one shim"
    );
    let log = "the-pod\nthe-pod\nb c\n/made/for/me\n";
    until("the logs are written", || {
        pod.log("first") == log && pod.log("second") == "to-stderr\n"
    });

    let executed = node.exec(&first, "echo out; echo err >&2; exit 6");
    assert_eq!(executed, ("out\n".into(), "err\n".into(), 6));
    // One that does not end in its time is killed.
    let slow = cri::ExecSyncRequest {
        container_id: first.container_id.clone(),
        cmd: ["sleep", "1000"].map(str::to_owned).to_vec(),
        timeout: 1,
    };
    let slow: Result<cri::ExecSyncResponse, _> = node.try_call("ExecSync", slow);
    assert_eq!(slow.unwrap_err().code(), tonic::Code::DeadlineExceeded);
    // The container's own is left.
    assert_eq!(
        node.said(&first, "grep -lz '^sleep$' /proc/[0-9]*/cmdline | wc -l"),
        "1\n"
    );

    memory_limit_is_in_force_and_changed(&node, &first);

    // As a kubelet restarts it: another of the same name in the same pod.
    node.stop(&first, 0);
    assert_eq!(node.state(&first), (2, 137));
    let again = pod.container_with(
        "first",
        "trap 'exit 9' TERM; echo again; while :; do sleep 0.1; done",
        |config, _| {
            config.metadata.as_mut().unwrap().attempt = 1;
            config.log_path = "again.log".into();
        },
    );
    until("it runs again", || pod.log("again") == "again\n");
    for container in [&first, &second] {
        node.remove(container);
    }
    // Asked to end, it has time to.
    node.stop(&again, 60);
    assert_eq!(node.state(&again), (2, 9));
    // With its pod everything goes that is left of it.
    pod.remove();
    node.is_empty_soon();
    assert!(node.containerd.bundles().is_empty());
}

/// A container with a limit of 64 MiB gets one of 80 MiB while it runs.
fn memory_limit_is_in_force_and_changed(node: &Node, container: &cri::Container) {
    let limit = "cat /sys/fs/cgroup/memory.max";
    assert_eq!(node.said(container, limit), format!("{}\n", 64 * MIB));
    let update = cri::UpdateContainerResourcesRequest {
        container_id: container.container_id.clone(),
        linux: Some(cri::LinuxContainerResources {
            memory_limit_in_bytes: 80 * MIB,
            ..Default::default()
        }),
    };
    let _: cri::Empty = node.call("UpdateContainerResources", update);
    assert_eq!(node.said(container, limit), format!("{}\n", 80 * MIB));
    let stats: cri::ContainerStatsResponse = node.call("ContainerStats", container.clone());
    let stats = stats.stats.unwrap();
    let used = stats
        .memory
        .and_then(|memory| memory.working_set_bytes)
        .unwrap()
        .value;
    assert!((1..80 * MIB as u64).contains(&used), "{used}");
    assert!(
        stats
            .cpu
            .and_then(|cpu| cpu.usage_core_nano_seconds)
            .unwrap()
            .value
            > 0
    );
}

fn stream<Q>(node: &Node, method: &str, request: Q) -> WebSocket
where
    Q: prost::Message + Clone + Send + Sync + 'static,
{
    let url: cri::Url = node.call(method, request);
    WebSocket::connect(&url.url, "v4.channel.k8s.io")
}

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const ERROR: usize = 3;
const RESIZE: u8 = 4;

#[test]
#[ignore = "long"]
fn streams_are_executed_and_attached_to() {
    let node = Node::new();
    let pod = node.pod("streams");
    let shell = pod.container_with("shell", "echo begun; cat; echo ended", |config, _| {
        config.stdin = true;
        config.stdin_once = true;
    });
    let exec = |cmd: &str, tty: bool, stdin: bool| {
        let request = cri::ExecRequest {
            container_id: shell.container_id.clone(),
            cmd: ["sh", "-c", cmd].map(str::to_owned).to_vec(),
            tty,
            stdin,
            stdout: true,
            stderr: !tty,
        };
        stream(&node, "Exec", request)
    };
    let [_, out, err, status] = exec("echo out; echo err >&2; exit 7", false, false).rest();
    assert_eq!((out.as_str(), err.as_str()), ("out\n", "err\n"));
    assert!(status.contains("\"7\""), "{status}");
    let large = exec("head -c 3000000 /dev/zero | tr '\\0' x", false, false).rest();
    assert_eq!(large[usize::from(STDOUT)].len(), 3_000_000);
    assert!(large[ERROR].contains("Success"), "{}", large[ERROR]);

    let mut terminal = exec(
        // A trap that is taken ends a read without a line.
        "trap 'stty size' WINCH; echo ready; until read line; do :; done; echo \"<$line>\"; cat",
        true,
        true,
    );
    terminal.until(STDOUT, "ready");
    terminal.send(RESIZE, br#"{"Width":101,"Height":37}"#);
    terminal.send(STDIN, b"typed\n");
    terminal.until(STDOUT, "<typed>");
    terminal.send(STDIN, b"\x04");
    let rest = terminal.rest();
    assert!(rest[ERROR].contains("Success"), "{rest:?}");

    // stdin of the container is closed with the first who attached to it.
    let attach = cri::AttachRequest {
        container_id: shell.container_id.clone(),
        stdin: true,
        stdout: true,
        stderr: true,
        tty: false,
    };
    let mut attached = stream(&node, "Attach", attach);
    attached.send(STDIN, b"hello\n");
    attached.until(STDOUT, "hello\n");
    drop(attached);
    assert_eq!(node.ends_soon(&shell), 0);
    assert_eq!(pod.log("shell"), "begun\nhello\nended\n");
    pod.remove();
    node.is_empty_soon();
}

#[test]
#[ignore = "long"]
fn a_container_is_who_and_may_what_it_was_told() {
    let node = Node::new();
    let pod = node
        .pod_with("security", |config| {
            let sysctls = [
                ("kernel.shm_rmid_forced", "1"),
                ("net.ipv4.ip_local_port_range", "1024 2048"),
            ];
            let sysctls = sysctls.map(|(key, value)| (key.to_owned(), value.to_owned()));
            config.linux.as_mut().unwrap().sysctls = sysctls.into();
        })
        .unwrap();
    let run = |name: &str, script: &str, change: &dyn Fn(&mut cri::LinuxContainerSecurityContext)| {
        let container = pod.container_with(name, script, |_, security| change(security));
        pod.whole_log(name, &container)
    };
    let said = run(
        "user",
        "id -u; id -g; id -G; touch /root/x 2>&1 | grep -c denied",
        &|security| {
            security.run_as_user = Some(cri::Int64Value { value: 1001 });
            security.run_as_group = Some(cri::Int64Value { value: 1002 });
            security.supplemental_groups = vec![1003, 1004];
        },
    );
    assert_eq!(said, "1001\n1002\n1002 1003 1004\n1\n");
    let said = run(
        "read-only",
        "touch /file; touch /dev/shm/file && echo shm",
        &|security| {
            security.readonly_rootfs = true;
        },
    );
    assert!(
        said.contains("Read-only file system") && said.ends_with("shm\n"),
        "{said}"
    );
    let capabilities = "grep -E 'Cap(Bnd|Eff)' /proc/self/status | cut -f 2";
    let said = run("capabilities", capabilities, &|security| {
        security.capabilities = Some(cri::Capability {
            add_capabilities: vec!["SYS_TIME".into()],
            drop_capabilities: vec!["ALL".into()],
        });
    });
    assert_eq!(said, "0000000002000000\n".repeat(2));
    let state = "grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status | cut -f 2; unshare -U true 2>&1 | grep -c -i permitted";
    let said = run("seccomp", state, &|security| {
        security.seccomp = Some(cri::SecurityProfile { profile_type: 0 });
        security.no_new_privs = true;
    });
    assert_eq!(said, "1\n2\n1\n");
    let said = run(
        "unconfined",
        "grep '^Seccomp:' /proc/self/status | cut -f 2",
        &|security| {
            security.seccomp = Some(cri::SecurityProfile { profile_type: 1 });
        },
    );
    assert_eq!(said, "0\n");
    let hidden = "cat /etc/passwd | wc -c; echo x > /proc/sys/kernel/hostname";
    let said = run("masked", hidden, &|security| {
        security.masked_paths = vec!["/etc/passwd".into()];
        security.readonly_paths = vec!["/proc/sys".into()];
    });
    assert!(said.starts_with("0\n") && said.contains("Read-only"), "{said}");
    let sysctls =
        "cat /proc/sys/kernel/shm_rmid_forced; tr '\\t' ' ' < /proc/sys/net/ipv4/ip_local_port_range";
    assert_eq!(run("sysctls", sysctls, &|_| ()), "1\n1024 2048\n");

    container_out_of_memory_says_so(&node, &pod);
    pod.remove();
    node.is_empty_soon();
}

fn container_out_of_memory_says_so(node: &Node, pod: &Pod<'_>) {
    let hog = pod.container_with(
        "hog",
        "exec dd if=/dev/zero of=/dev/null bs=200000000 count=1",
        |config, _| {
            let resources = cri::LinuxContainerResources {
                memory_limit_in_bytes: 32 * MIB,
                oom_score_adj: 500,
                ..Default::default()
            };
            limits(config, resources);
        },
    );
    assert_eq!(node.ends_soon(&hog), 137);
    until("the reason is told", || node.status(&hog).reason == "OOMKilled");
}

#[test]
#[ignore = "long"]
fn many_pods_at_once_and_many_execs_in_one() {
    let (pods, execs) = (number("THAW_PODS", 4), number("THAW_EXECS", 16));
    let node = Node::new();
    let names: Vec<String> = (0..pods).map(|n| format!("pod-{n}")).collect();
    let machines = std::thread::scope(|scope| {
        let node = &node;
        let starting = names.iter().map(|name| {
            scope.spawn(move || {
                let pod = node.pod(name);
                let container = pod.container("a", "hostname; sleep 1000");
                // All of them begin at once, on a lab's one processor.
                until_within(PATIENCE * pods.div_ceil(4) as u32, "it has begun", || {
                    pod.log("a") == format!("{name}\n")
                });
                (pod, node.said(&container, "cat /proc/sys/kernel/random/boot_id"))
            })
        });
        let starting: Vec<_> = starting.collect();
        let started: Vec<_> = starting.into_iter().map(|pod| pod.join().unwrap()).collect();
        assert_eq!(node.sandboxes().len(), pods);
        let identities: BTreeSet<_> = started.iter().map(|(_, identity)| identity.clone()).collect();
        let stopping: Vec<_> = started
            .into_iter()
            .map(|(pod, _)| scope.spawn(|| pod.remove()))
            .collect();
        stopping.into_iter().for_each(|pod| pod.join().unwrap());
        identities.len()
    });
    assert_eq!(machines, pods, "each is a machine of its own");
    node.is_empty_soon();

    let pod = node.pod("storm");
    let container = pod.container("a", "sleep 1000");
    std::thread::scope(|scope| {
        let (node, container) = (&node, &container);
        let running = (0..execs)
            .map(|n| scope.spawn(move || node.exec(container, &format!("echo {n}; exit {}", n % 100))));
        let running: Vec<_> = running.collect();
        for (n, exec) in running.into_iter().enumerate() {
            let done = exec.join().unwrap();
            assert_eq!((done.0, done.2), (format!("{n}\n"), (n % 100) as i32));
        }
    });
    pod.remove();
    node.is_empty_soon();
}

#[test]
#[ignore = "long"]
fn a_volume_its_image_declares_has_what_the_image_has_there() {
    let node = Node::unpulled("entrypoint", Networks::nothing);
    node.containerd.pull(&node.image).unwrap();
    let pod = node.pod("volumes");
    let script =
        "id -u; stat -c '%u:%g %a' /data /data/kept; cat /data/kept; echo new >/data/new; cat /data/new";
    let container = pod.container("a", script);
    assert_eq!(
        pod.whole_log("a", &container),
        "1000\n1000:1001 750\n1000:1001 640\nof the image\nnew\n"
    );
    pod.remove();
    node.is_empty_soon();
}

#[test]
#[ignore = "long"]
fn image_with_a_pull_secret_is_pulled_whole_and_runs() {
    let node = Node::of_registry("entrypoint", Upstream::private, Networks::nothing);
    // The lowest layer of two of them is in the store already.
    let public = Upstream::test_images(&node.home.scratch("public"), None);
    node.containerd
        .pull(&format!("{}/busybox:latest", public.host))
        .unwrap();
    assert!(node.containerd.pull(&node.image).is_err());
    let secret = cri::AuthConfig {
        username: "guest".into(),
        password: "opens-it".into(),
    };
    let of = |name: &str| node.image.replace("entrypoint", name);
    for name in ["entrypoint", "whiteouts", "uncompressed"] {
        node.containerd.pull_as(&of(name), Some(secret.clone())).unwrap();
    }
    let pod = node.pod("private");
    let said = |name: &str, script: &str| {
        let container = pod.container_with(name, script, |config, _| {
            config.image = Some(cri::ImageSpec { image: of(name) });
        });
        pod.whole_log(name, &container)
    };
    let written = "echo new >/data/new; cat /data/kept /data/new";
    assert_eq!(said("entrypoint", written), "of the image\nnew\n");
    // The image says what must be left of its /w after its three layers.
    let left = "cd /w && find . -type f | sed 's|^./||' | sort | while read f; do echo $f $(cat $f); done >/tmp/left; \
                cmp /tmp/left /expected && echo as expected";
    assert_eq!(said("whiteouts", left), "as expected\n");
    assert_eq!(said("uncompressed", "echo ran"), "ran\n");
    pod.remove();
    node.is_empty_soon();
}
